"use strict";
(() => {
  const LIVE = document.getElementById("live");
  const MAX_ROWS = 300;
  let charts = {}, tables = {}, hidden = new Set();

  // -- compressed parts of the page ---------------------------------------------------------------------
  async function unpacked(id) {
    const text = document.getElementById(id).textContent.trim();
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  }

  async function loadPlotly() {
    if (window.Plotly) return;
    const script = document.createElement("script");
    script.textContent = await unpacked("plotly");
    document.head.append(script);
  }

  // -- light and dark -----------------------------------------------------------------------------------
  const THEMES = ["system", "light", "dark"];
  let theme = "system";
  // Printed charts are light, and one or two of them fill the width of a page.
  let printing = false;
  const PAPER = { "--back": "#ffffff", "--fore": "#000000", "--line": "#d0d7de" };
  const dark = () => !printing && (theme === "dark" || (theme === "system" && matchMedia("(prefers-color-scheme: dark)").matches));
  const colour = (name) => (printing && PAPER[name]) || getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function nextTheme() {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    if (theme === "system") document.documentElement.removeAttribute("data-theme");
    else document.documentElement.dataset.theme = theme;
    document.getElementById("theme").textContent = "Theme: " + theme;
    redraw();
  }

  function layout(chart, narrow, size) {
    const line = colour("--line"), fore = colour("--fore"), back = colour("--back");
    const axis = (own) => ({ gridcolor: line, zerolinecolor: line, linecolor: line, ...own,
      title: { ...(own.title || {}), font: { size: 12 } }, tickfont: { size: narrow ? 9 : 11 },
      dtick: narrow && own.categoryarray && own.categoryarray.length > 12 ? Math.ceil(own.categoryarray.length / 8) : own.dtick });
    return { ...chart.layout, ...size, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: fore, family: "system-ui, sans-serif", size: 12 },
      hoverlabel: { bgcolor: back, bordercolor: line, font: { color: fore } },
      // the tool bar has its own strip above the data
      margin: { l: 50, r: 10, t: narrow ? 10 : 34, b: 45 }, modebar: { bgcolor: back, color: colour("--soft"), activecolor: fore },
      legend: { orientation: "h", traceorder: "normal", yref: "container", y: 0, yanchor: "bottom", x: 0, font: { size: narrow ? 10 : 11 } },
      xaxis: axis(chart.layout.xaxis), yaxis: axis(chart.layout.yaxis) };
  }

  // -- charts, drawn as they come into view -------------------------------------------------------------
  function traces(chart, narrow) {
    const flip = (trace) => (trace.reversescale && dark() ? { ...trace, reversescale: false }
      : trace.marker && trace.marker.reversescale && dark() ? { ...trace, marker: { ...trace.marker, reversescale: false } } : trace);
    const shrunk = (trace) => (narrow && trace.marker && Array.isArray(trace.marker.size)
      ? { ...trace, marker: { ...trace.marker, size: trace.marker.size.map((s) => Math.max(3, s / 2)) } } : trace);
    return chart.data.map((trace) => (trace.meta && hidden.has(trace.meta) ? { ...trace, visible: "legendonly" } : shrunk(flip(trace))));
  }

  async function draw(box) {
    const chart = charts[box.dataset.chart];
    if (!chart) return;
    const narrow = printing || box.clientWidth < 480;
    const size = printing ? { autosize: false, width: box.closest(".n1") ? 640 : 310, height: 290 } : { autosize: true };
    const config = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"],
      displayModeBar: narrow ? false : "hover", toImageButtonOptions: { format: "svg", filename: box.dataset.chart } };
    await Plotly.react(box, traces(chart, narrow), layout(chart, narrow, size), config);
    box.dataset.drawn = "yes";
  }

  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) { watcher.unobserve(entry.target); draw(entry.target); }
  }, { rootMargin: "600px" });

  const boxes = () => [...document.querySelectorAll("[data-chart]")];
  const redraw = () => Promise.all(boxes().filter((box) => box.dataset.drawn).map(draw));
  const drawAll = () => Promise.all(boxes().filter((box) => !box.dataset.drawn).map(draw));

  // -- tables -------------------------------------------------------------------------------------------
  const csvCell = (v) => { const s = v === null ? "" : String(v); return /[",\n]/.test(s) ? '"' + s.replaceAll('"', '""') + '"' : s; };
  const csv = (table) => [table.columns, ...table.rows].map((row) => row.map(csvCell).join(",")).join("\n") + "\n";
  const tsv = (table) => [table.columns, ...table.rows].map((row) => row.map((v) => (v === null ? "" : v)).join("\t")).join("\n");

  function save(key) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([csv(tables[key])], { type: "text/csv" }));
    link.download = key + ".csv";
    link.click();
    URL.revokeObjectURL(link.href);
  }

  async function copy(key, button) {
    const text = tsv(tables[key]);
    try { await navigator.clipboard.writeText(text); }
    catch {
      const area = document.createElement("textarea");
      area.value = text; document.body.append(area); area.select();
      document.execCommand("copy"); area.remove(); button.focus();
    }
    button.textContent = "Copied";
  }

  const element = (name, text, attributes) => { const e = document.createElement(name); if (text !== undefined) e.textContent = text; Object.assign(e, attributes || {}); return e; };

  function fill(details) {
    const key = details.dataset.table, table = tables[key];
    if (!table || details.dataset.filled) return;
    details.dataset.filled = "yes";
    const tools = element("div", undefined, { className: "tools" });
    for (const [kind, label] of [["copy", "Copy"], ["csv", "Save CSV"]]) {
      const button = element("button", label, { type: "button" });
      button.dataset[kind] = key; tools.append(button);
    }
    const scroll = element("div", undefined, { className: "scroll", tabIndex: 0 });
    const body = element("table");
    body.append(element("caption", table.caption));
    const head = body.createTHead().insertRow();
    const isNumber = (i) => table.rows.some((row) => typeof row[i] === "number") && i > 0;
    table.columns.forEach((column, i) => head.append(element("th", column, { scope: "col", className: isNumber(i) ? "n" : "" })));
    const rows = body.createTBody();
    for (const row of table.rows.slice(0, MAX_ROWS)) {
      const tr = rows.insertRow();
      row.forEach((v, i) => tr.append(i ? element("td", v === null ? "" : v, { className: typeof v === "number" ? "n" : "" }) : element("th", v === null ? "" : v, { scope: "row" })));
    }
    scroll.append(body);
    details.append(tools, scroll);
    if (table.rows.length > MAX_ROWS) details.append(element("p", "The first " + MAX_ROWS + " of " + table.rows.length + " rows. Copy and Save CSV include all."));
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.id === "theme") nextTheme();
    if (button.dataset.csv) save(button.dataset.csv);
    if (button.dataset.copy) copy(button.dataset.copy, button);
  });
  document.addEventListener("toggle", (event) => { if (event.target.dataset && event.target.dataset.table && event.target.open) fill(event.target); }, true);
  document.addEventListener("change", (event) => {
    const method = event.target.dataset && event.target.dataset.method;
    if (method === undefined) return;
    if (event.target.checked) hidden.delete(method); else hidden.add(method);
    redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  window.addEventListener("beforeprint", () => { printing = true; boxes().forEach(draw); });
  window.addEventListener("afterprint", () => { printing = false; redraw(); });

  // -- live updates ------------------------------------------------------------------------------------
  function take(content) { charts = content.charts; tables = content.tables; }

  // `interrupted` says that the page shows runs that were interrupted. The same command may resume them at the same address.
  async function refresh(version, interrupted) {
    let state;
    try { state = await (await fetch("state.json?after=" + version)).json(); }
    catch {
      if (!interrupted) LIVE.textContent = "the run has ended or cannot be reached";
      setTimeout(() => refresh(version, interrupted), 5000);
      return;
    }
    if (state.version !== version) {
      const open = [...document.querySelectorAll("details[open]")].map((d) => d.dataset.table);
      const height = window.scrollY;
      document.getElementById("content").innerHTML = state.body;
      take(state);
      for (const key of open) { const d = document.querySelector('details[data-table="' + CSS.escape(key) + '"]'); if (d) d.open = true; }
      for (const input of document.querySelectorAll("[data-method]")) input.checked = !hidden.has(input.dataset.method);
      boxes().forEach((box) => watcher.observe(box));
      window.scrollTo(0, height);
    }
    LIVE.textContent = state.finished ? state.status : "live, " + state.status;
    if (!state.finished) setTimeout(() => refresh(state.version, false), 1500);
    else if (state.status !== "finished") setTimeout(() => refresh(state.version, true), 5000);
  }

  async function start() {
    try {
      take(JSON.parse(await unpacked("charts")));
      await loadPlotly();
    } catch (error) {
      document.querySelector("main").prepend(element("p", "This browser cannot draw the charts (" + error + "). The tables are still readable.", { className: "missing" }));
      return;
    }
    boxes().forEach((box) => watcher.observe(box));
    document.documentElement.dataset.ready = "yes";
    if (LIVE) refresh(0, false);
  }
  window.fedskew = { drawAll };
  start();
})();
