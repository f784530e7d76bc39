"""`fedskew report`, `figures` and `live`: show the results of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedskew.cli.commands import RankBy, add_command, option
from fedskew.errors import UserError

PAGE = "report.html"
_FOLDERS = "run folders, or folders of run folders"
_FIGURE_FILES = (".pdf", ".svg", ".png", ".csv")


def add_to(app: typer.Typer) -> None:
    add_command(
        app, "report", _report,
        "fedskew report runs",
        "fedskew report runs/digits-* -o comparison.html --figures figures --format pdf",
        "fedskew report runs --format latex",
    )  # fmt: skip
    add_command(app, "figures", _figures, "fedskew figures --list", "fedskew figures fedlmd/2 runs -o figure2.pdf")
    add_command(app, "live", _live, "fedskew live runs", "fedskew live runs/my-sweep --wait")


def _report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help=_FOLDERS, show_default=False)],
    out: Annotated[str, typer.Option("--out", "-o", metavar="FILE", help="HTML file to write")] = PAGE,
    figures: Annotated[
        str | None, option("--figures", "FOLDER", "also save every figure in this folder, for use in papers")
    ] = None,
    format: Annotated[
        str,
        typer.Option("--format", metavar="KIND", help="format of the figures: png, svg, pdf, or several: svg,pdf; with "
                     "latex, markdown or csv, print the table of results and write no page"),
    ] = "pdf",
    features: Annotated[
        bool,
        typer.Option("--features/--no-features", help="draw the models' features, which needs the data and takes a few "
                     "seconds per method"),
    ] = True,
    rank_by: RankBy = None,
) -> None:  # fmt: skip
    """Write one self-contained HTML page about runs: results, evidence, and a summary in words."""
    from fedskew.cli.terminal import notice, stdout
    from fedskew.report.charts.matplotlib_view import parse_formats
    from fedskew.report.verdict import unfinished
    from fedskew.report.writing import page_path, write_loaded
    from fedskew.results import comparisons, load_runs, load_runs_and_races
    from fedskew.results.ranking import DEFAULT_METRIC, find_metric
    from fedskew.results.table import FORMATS as TABLE_FORMATS
    from fedskew.results.table import table_text

    metric = find_metric(rank_by or DEFAULT_METRIC)
    if format in TABLE_FORMATS:
        if figures is not None or out != PAGE:
            raise UserError(f"--format {format} prints a table only; expected no --out and no --figures")
        found = load_runs(runs)
        settings = comparisons(found.runs, metric.name)
        print(table_text(settings, format), end="")
        for line in [*(f"{one.label}: {line}" for one in settings for line in unfinished(one)), *found.unreadable]:
            notice(line)
        return
    target, kinds = page_path(out), parse_formats(format, TABLE_FORMATS)
    loaded = load_runs_and_races(runs)
    count = len(loaded.runs)
    if count:
        notice(f"reading {count} run{'s' if count > 1 else ''}" + (", drawing features" if features else ""))
    report = write_loaded(loaded, target, features, Path(figures) if figures else None, kinds, metric.name)
    console = stdout()
    for line in report.answer:
        console.print(line, markup=False, soft_wrap=True)
    for line in report.problems:
        notice(line)
    saved = f"; {len(report.figures)} figure files in {figures}" if figures else ""
    size = target.stat().st_size / 1e6
    console.print(f"report written to {target} ({size:.1f} MB){saved}", markup=False, soft_wrap=True)


def _figures(
    name: Annotated[
        str | None,
        typer.Argument(metavar="FIGURE", help="a figure such as fedlmd/2; --list shows them", show_default=False),
    ] = None,
    runs: Annotated[list[str] | None, typer.Argument(metavar="RUN...", help=_FOLDERS, show_default=False)] = None,
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", metavar="FILE", show_default=False,
                     help="a .pdf, .svg or .png file, or .csv for the numbers (default: FIGURE.pdf)"),
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="list the figures and the runs each needs")] = False,
) -> None:  # fmt: skip
    """Draw a figure in a paper's layout from runs on disk."""
    from fedskew.cli.terminal import notice, stdout
    from fedskew.report.figures.catalogue import find_figure
    from fedskew.report.writing import write_text
    from fedskew.results import comparisons, load_runs

    if listing or name is None:
        _list_figures()
        return
    entry = find_figure(name)
    if not runs:
        raise UserError(f"figure {name} needs runs: {entry.needs}; expected run folders after its name")
    target = Path(out or f"{name.replace('/', '-')}.pdf")
    if target.suffix.lower() not in _FIGURE_FILES:
        raise UserError(f"cannot save a figure as {str(target)!r}; expected {', '.join(_FIGURE_FILES)}")
    loaded = load_runs(runs)
    for line in loaded.unreadable:
        notice(line)
    figure = entry.draw(comparisons(loaded.runs))
    if target.suffix.lower() == ".csv":
        write_text(target, "\n".join(chart.table().csv() for chart in figure.charts))
    else:
        from fedskew.report.charts.matplotlib_view import save_figure

        save_figure(figure, target)
    stdout().print(f"{figure.caption}: {target}", markup=False, soft_wrap=True)


def _list_figures() -> None:
    from rich.table import Table
    from rich.text import Text

    from fedskew.cli.terminal import stdout
    from fedskew.report.figures.catalogue import FIGURES

    table = Table(title="figures from the papers", title_justify="left")
    for heading in ("figure", "shows", "needs runs of"):
        table.add_column(heading, overflow="fold")
    for entry in FIGURES.values():
        table.add_row(Text(entry.name, style="bold"), Text(entry.shows), Text(entry.needs))
    stdout().print(table)


def _live(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help=_FOLDERS, show_default=False)],
    port: Annotated[
        int | None,
        typer.Option("--port", metavar="N", help="port on 127.0.0.1 (default: 8765, or a free one)",
                     show_default=False, min=0, max=65535),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="wait for runs that have not started")] = False,
    rank_by: RankBy = None,
) -> None:  # fmt: skip
    """Serve a report on 127.0.0.1 that updates while runs progress. Stop it with Ctrl-C."""
    import threading

    from fedskew.cli.terminal import stdout
    from fedskew.live.server import LiveServer
    from fedskew.results.ranking import DEFAULT_METRIC, find_metric

    metric = find_metric(rank_by or DEFAULT_METRIC)
    if not wait:
        _require_runs(runs)
    try:
        server = LiveServer(runs, port, metric.name)
    except OSError as error:
        raise UserError(f"cannot serve on port {port}: {error.strerror or error}; choose another --port") from error
    server.start()
    stdout().print(f"live report: {server.url} (stop with Ctrl-C)", markup=False, soft_wrap=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        server.close()


def _require_runs(paths: list[str]) -> None:
    """Refuse a folder without runs or races. The live page of a misspelt folder would wait forever."""
    from fedskew.results import find_runs
    from fedskew.results.race import find_races

    for path in paths:
        if find_races([path]):
            continue
        try:
            find_runs([path])
        except UserError as error:
            raise UserError(f"{error}; to wait for runs that have not started, add --wait") from error
