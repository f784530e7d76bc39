"""The report in a real browser: drawn without an error, used with mouse and keyboard, asking nobody for anything.

Screenshots are kept in the folder that FEDSKEW_SCREENSHOTS names.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from fedskew.report.document import document
from fedskew.report.page.render import page as render
from fedskew.results import load_runs

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install fedskew[dev]")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip
DRAWN = """[...document.querySelectorAll('[data-chart]')]
    .every(box => box.dataset.drawn && box.querySelector('svg.main-svg'))"""


@dataclass
class Opened:
    """A page, and everything that it said or asked for."""

    page: Any
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    with sync_api.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=program, args=FLAGS)
        yield running
        running.close()


@pytest.fixture(scope="module")
def report(comparison: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render(document(load_runs([comparison]))), encoding="utf-8")
    return path


def opened(browser: Any, report: Path, width: int, scheme: str = "light") -> Opened:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.set_default_timeout(120_000)
    found = Opened(page)
    page.on("console", lambda message: found.errors.append(message.text) if message.type in ("error", "warning") else 0)
    page.on("pageerror", lambda error: found.errors.append(str(error)))
    page.on("request", lambda request: found.requests.append(request.url))
    page.goto(report.as_uri())
    page.wait_for_selector("html[data-ready=yes]")
    page.evaluate("fedskew.drawAll()")
    page.wait_for_function(DRAWN)
    return found


@pytest.fixture(scope="module")
def desktop(browser: Any, report: Path) -> Iterator[Opened]:
    """The page as several tests use it; each leaves it as it was, for drawing it takes seconds."""
    found = opened(browser, report, 1300)
    yield found
    found.page.close()


@pytest.fixture(scope="module")
def phone(browser: Any, report: Path) -> Iterator[Opened]:
    found = opened(browser, report, 390, "dark")
    yield found
    found.page.close()


@pytest.mark.parametrize(("device", "width", "scheme"), [("desktop", 1300, "light"), ("phone", 390, "dark")])
def test_everything_is_drawn_and_nothing_asked_for(
    device: str, width: int, scheme: str, report: Path, request: pytest.FixtureRequest
) -> None:
    found: Opened = request.getfixturevalue(device)
    if folder := os.environ.get("FEDSKEW_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        found.page.screenshot(path=Path(folder) / f"report-{width}-{scheme}.png", full_page=True)
    assert found.errors == []
    assert found.requests == [report.as_uri()]
    assert found.page.evaluate("document.documentElement.scrollWidth") <= width, "no scrolling sideways"
    sizes = found.page.evaluate("[...document.querySelectorAll('.main-svg')].map(s => s.getBoundingClientRect().width)")
    assert min(size for size in sizes if size) > 100


def test_the_bars_of_every_method_are_painted_in_its_colour(desktop: Opened) -> None:
    chart = desktop.page.locator("#chart-by-class")
    colours = desktop.page.evaluate("document.getElementById('chart-by-class').data.map(bar => bar.marker.color)")
    chart.scroll_into_view_if_needed()
    painted = imread(io.BytesIO(chart.screenshot()))[..., :3]
    for colour in colours:
        pixels = (np.abs(painted - to_rgb(colour)) < 0.02).all(axis=-1).sum()
        assert pixels > 500, colour


@pytest.mark.parametrize("device", ["desktop", "phone"])
def test_no_legend_lies_on_an_axis(device: str, request: pytest.FixtureRequest) -> None:
    page = request.getfixturevalue(device).page
    overlapping = page.evaluate("""[...document.querySelectorAll('[data-chart]')].filter(box => {
        const legend = box.querySelector('.legend'), title = box.querySelector('.xtitle');
        return legend && title && title.getBoundingClientRect().bottom > legend.getBoundingClientRect().top + 1;
    }).map(box => box.id)""")
    assert overlapping == []
    assert page.evaluate("document.querySelectorAll('.legend').length") > 3


def test_a_tooltip_tells_the_value(desktop: Opened) -> None:
    page = desktop.page
    chart = page.locator("#chart-accuracy")
    chart.scroll_into_view_if_needed()
    box = chart.locator(".nsewdrag").first.bounding_box()
    place = page.evaluate("document.getElementById('chart-accuracy')._fullLayout.xaxis.l2p(2)")
    said = ""
    for step in range(50):  # a chart that is just being fitted to the window forgets the mouse
        page.mouse.move(box["x"] + place + step % 9 - 4, box["y"] + box["height"] / 2, steps=3)
        page.evaluate("new Promise(requestAnimationFrame)")
        said = chart.locator(".hoverlayer").first.text_content()
        if "fedvls" in said:
            break
    assert "fedvls" in said


def test_the_tool_bar_lies_above_the_data(desktop: Opened) -> None:
    page = desktop.page
    chart = page.locator("#chart-accuracy")
    bar, plot = chart.locator(".modebar-group").first.bounding_box(), chart.locator(".nsewdrag").first.bounding_box()
    assert bar["y"] + bar["height"] <= plot["y"]


def test_a_method_is_hidden_in_all_charts_and_shown_again(desktop: Opened) -> None:
    page = desktop.page
    shown = """['accuracy', 'by-class'].map(key => document.getElementById('chart-' + key).data
        .filter(trace => trace.name === 'fedvls').every(trace => trace.visible === 'legendonly'))"""
    assert page.evaluate(shown) == [False, False]
    page.get_by_role("checkbox", name="fedvls").uncheck()
    page.wait_for_function(f"({shown}).every(Boolean)")
    page.get_by_role("checkbox", name="fedvls").check()
    page.wait_for_function(f"!({shown}).some(Boolean)")


def test_the_theme_changes_page_and_charts_and_goes_round(desktop: Opened) -> None:
    page = desktop.page
    colours = (
        "[getComputedStyle(document.body).backgroundColor, document.getElementById('chart-accuracy').layout.font.color]"
    )
    light = page.evaluate(colours)
    page.get_by_role("button", name="Theme").press("Enter")
    assert page.evaluate(colours) == light, "system is light here"
    page.get_by_role("button", name="Theme").press("Enter")
    page.wait_for_function(f"({colours})[1] !== {light[1]!r}")
    assert page.evaluate(colours)[0] == "rgb(20, 23, 28)"
    page.get_by_role("button", name="Theme").press("Enter")
    page.wait_for_function(f"({colours})[1] === {light[1]!r}")


def test_numbers_open_by_keyboard_and_save_as_csv(desktop: Opened) -> None:
    page = desktop.page
    details = page.locator("details[data-table=by-class]")
    details.locator("summary").press("Enter")
    details.locator("tbody tr").first.wait_for()
    assert details.locator("tbody tr").count() == 10
    with page.expect_download() as download:
        details.get_by_role("button", name="Save CSV").press("Enter")
    saved = Path(download.value.path()).read_text(encoding="utf-8").splitlines()
    assert saved[0].startswith("class,fedavg")
    assert len(saved) == 11
    details.get_by_role("button", name="Copy").click()
    details.get_by_role("button", name="Copied").wait_for()


def test_a_screen_reader_finds_names_for_everything(desktop: Opened) -> None:
    page = desktop.page
    unnamed = page.evaluate("""[...document.querySelectorAll('[role=img], section, nav, button, [role=region]')]
        .filter(e => !e.closest('.modebar'))
        .filter(e => !(e.getAttribute('aria-label') || e.getAttribute('aria-labelledby') || e.textContent.trim()))
        .map(e => e.outerHTML.slice(0, 80))""")
    assert unnamed == []
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map(h => +h.tagName[1])")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert page.evaluate("document.documentElement.lang") == "en"


def test_it_prints_black_on_white_even_from_a_dark_page(browser: Any, report: Path) -> None:
    page = opened(browser, report, 1300, "dark").page
    look = """() => { const chart = document.getElementById('chart-accuracy');
        return [chart.layout.font.color, chart.querySelector('.main-svg').getBoundingClientRect().width]; }"""
    before = page.evaluate(look)
    page.emulate_media(media="print")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    page.wait_for_function("document.getElementById('chart-accuracy').layout.width === 310")
    assert page.evaluate(look) == ["#000000", 310]
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.get_by_role("button", name="Theme").is_visible()
    assert page.pdf(format="A4").startswith(b"%PDF")
    page.emulate_media(media="screen", color_scheme="dark")
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    page.wait_for_function("document.getElementById('chart-accuracy').layout.font.color !== '#000000'")
    assert page.evaluate(look)[0] == before[0]
    page.close()


def test_without_javascript_the_answer_and_the_tables_are_there(browser: Any, report: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(report.as_uri())
    assert page.locator(".verdict .lead").is_visible()
    assert page.locator("#table-final tbody tr").count() == 3
    assert "The charts need JavaScript" in page.content()
    context.close()
