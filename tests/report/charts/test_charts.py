"""Charts: their tables hold what they show, both libraries take them, colours can be told apart."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest
from method_cases import slow

from fedskew.errors import UserError
from fedskew.report.charts.chart import Bars, BarSeries, Chart, Cloud, Figure, Heat, Line, Lines, Points
from fedskew.report.charts.matplotlib_view import parse_formats, save_figure
from fedskew.report.charts.palette import COLOURS, DARK, LIGHT, contrast
from fedskew.report.charts.plotly_view import plotly
from fedskew.report.charts.table import Table, number

LINES = Lines(
    "l", "curves", "round", "accuracy %", [Line("a", [0, 1, 2], [10, None, 30], [9, None, 29], [11, None, 31])]
)
BARS = Bars("b", "bars", "class", "accuracy %", ["<b>cat</b>", "dog"], [BarSeries("a", [1, None], [0.5, None])])
HEAT = Heat("h", "cells", "class", "client", "samples", ["x", "y"], ["0", "1", "2"], [[1, None, 3], [4, 5, 6]])
CLOUDS = Points("p", "cloud", [Cloud("$x$", [0, 1], [2, 3])])
CHARTS: list[Chart] = [LINES, BARS, HEAT, replace(HEAT, bubbles=True), replace(HEAT, scale="difference"), CLOUDS]


def test_a_table_holds_every_number_of_its_chart() -> None:
    assert LINES.table().rows[2] == ["a", 2, 30, 29, 31]
    assert BARS.table().columns == ["class", "a", "± a"]
    assert [list(row) for row in HEAT.table().rows] == [["x", 1, None, 3], ["y", 4, 5, 6]]
    assert CLOUDS.table().csv() == "class,x,y\n$x$,0,2\n$x$,1,3\n"


def test_a_chart_says_itself_in_words() -> None:
    assert "a goes from 10 at 0 to 30 at 2" in LINES.alt()
    assert "Lowest 1 at x, 0; highest 6 at y, 2" in HEAT.alt()
    assert "dog" not in BARS.alt(), "a bar that is not there has no value to tell"


def test_a_chart_without_values_says_so() -> None:
    assert Lines("m", "none", "round", "loss", [Line("a", [1], [None])]).alt().endswith("loss over round. no values.")


def test_of_many_series_the_words_name_some() -> None:
    many = Lines("m", "many", "x", "y", [Line(f"line {i}", [0, 1], [0, i]) for i in range(40)])
    assert "and 28 more" in many.alt()


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: f"{type(chart).__name__}")
def test_plotly_takes_every_chart(chart: Chart) -> None:
    drawn = go.Figure(plotly(chart))  # refuses properties that Plotly does not have
    assert len(drawn.data) >= 1


@pytest.mark.parametrize(
    ("chart", "top"), [(HEAT, 6), (replace(HEAT, top=10), 10), (replace(HEAT, values=[[0], [None]]), 1)]
)
def test_colours_of_an_amount_begin_at_nothing(chart: Heat, top: float) -> None:
    (drawn,) = plotly(chart)["data"]
    assert (drawn["zmin"], drawn["zmax"]) == (0, top)


def test_names_cannot_be_markup() -> None:
    assert "<b>" not in str(plotly(BARS))
    legend = [
        plotly(Points("p", "p", [Cloud("<unk>", [0.0], [0.0])])),
        plotly(Lines("l", "l", "x", "y", [Line("<unk>", [0], [0])])),
    ]
    assert [drawn["data"][0]["name"] for drawn in legend] == ["&lt;unk&gt;"] * 2


@pytest.mark.parametrize(
    ("kind", "charts"),
    [("svg", CHARTS), ("png", CHARTS[:2]), ("pdf", CHARTS[:2]), *slow(("png", CHARTS), ("pdf", CHARTS))],
)
def test_figures_for_papers_are_the_same_file_every_time(kind: str, charts: list[Chart], tmp_path: Path) -> None:
    figure = Figure("f", "all", charts, 3)
    files = [tmp_path / f"{i}.{kind}" for i in range(2)]
    for file in files:
        save_figure(figure, file)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_letters_in_a_figure_stay_letters(tmp_path: Path) -> None:
    save_figure(Figure("f", "one", [LINES]), tmp_path / "f.svg")
    assert "accuracy %</text>" in (tmp_path / "f.svg").read_text()


def test_other_formats_are_refused(tmp_path: Path) -> None:
    assert parse_formats("svg, PDF") == ["svg", "pdf"]
    with pytest.raises(UserError, match="did you mean 'png'"):
        parse_formats("pgn")
    with pytest.raises(UserError, match=r"expected \.png, \.svg or \.pdf"):
        save_figure(Figure("f", "one", [LINES]), tmp_path / "f.docx")


@pytest.mark.parametrize("colour", COLOURS)
def test_colours_stand_out_on_both_backgrounds(colour: str) -> None:
    assert min(contrast(colour, LIGHT), contrast(colour, DARK)) >= 3, "WCAG 1.4.11"


def test_contrast_is_that_of_wcag() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


SIGHT = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
"""What a reader sees of linear RGB, by Machado et al. (2009) at severity 1."""


def cielab(colour: str, sight: str) -> np.ndarray:
    channels = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.asarray(SIGHT[sight]) @ linear, 0, 1)
    to_xyz = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    ratio = np.array(to_xyz) @ seen / [0.95047, 1, 1.08883]
    x, y, z = np.where(ratio > 216 / 24389, np.cbrt(ratio), (24389 / 27 * ratio + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("sight", SIGHT)
def test_colour_blind_readers_can_tell_all_colours_apart(sight: str) -> None:
    seen = {colour: cielab(colour, sight) for colour in COLOURS}
    apart = {(a, b): np.linalg.norm(seen[a] - seen[b]) for a, b in combinations(COLOURS, 2)}
    assert min(apart.values()) >= 16, min(apart, key=lambda pair: apart[pair])


def test_fifty_series_all_look_different() -> None:
    lines = [Line(str(i), [0, 1], [0, 1], style=i) for i in range(50)]
    traces = plotly(Lines("l", "l", "x", "y", lines))["data"]
    assert len({(t["line"]["color"], t["line"]["dash"], t["marker"]["symbol"]) for t in traces}) == 50
    assert len({(t["line"]["color"], t["line"]["dash"]) for t in traces}) == 50


def test_no_two_series_in_a_row_look_alike() -> None:
    lines = [Line(str(i), [0, 1], [0, 1], style=i) for i in range(30)]
    looks = [(t["line"]["color"], t["line"]["dash"]) for t in plotly(Lines("l", "l", "x", "y", lines))["data"]]
    assert all(one != other for one, other in pairwise(looks))
    assert len(set(looks[:10])) == 10


def test_rows_must_fit_their_columns() -> None:
    with pytest.raises(ValueError, match="has 3 cells, expected 2"):
        Table("t", "t", ["a", "b"], [[1, 2, 3]])


def test_numbers_are_rounded_without_a_negative_zero() -> None:
    assert str(number(-0.001)) == "0.0"
    assert number(float("nan")) is None


def test_many_curves_with_long_names_leave_room_for_themselves(tmp_path: Path) -> None:
    """Matplotlib warns, which is an error here, where a legend squeezes a panel to nothing."""
    names = [f"fedlmd, clients_per_round=None, local_epochs=1, beta=0.{i}" for i in range(12)]
    charts = [
        Lines(f"l{n}", "curves", "beta", "accuracy %", [Line(name, [0, 1], [1, 2], style=i)
              for i, name in enumerate(names[:n])]) for n in (2, 12, 7, 6, 3)
    ]  # fmt: skip
    save_figure(Figure("f", "all", charts, 2), tmp_path / "f.png")


def test_of_names_that_would_lie_on_one_another_some_are_written(tmp_path: Path) -> None:
    names = [f"a class with a long name, {i:02d}" for i in range(20)]
    heat = Heat("h", "map", "class", "class", "%", names, names, [[1.0] * 20] * 20)
    save_figure(Figure("f", "all", [heat]), tmp_path / "f.svg")
    text = (tmp_path / "f.svg").read_text()
    slanted = set(re.findall(r"rotate\(-45[^>]*>(a class[^<]*)<", text))
    assert 3 <= len(slanted) <= 10
    assert all(text.count(name) >= 1 for name in names), "there is room for all beside the rows"


def test_a_legend_of_long_names_takes_more_lines(tmp_path: Path) -> None:
    series = [BarSeries(f"{i}: a name that is longer than a fifth of the page", [1.0], style=i) for i in range(5)]
    save_figure(Figure("f", "all", [Bars("b", "bars", "class", "%", ["x"], series)], wide=True), tmp_path / "f.svg")
    places = re.findall(r'translate\(([\d.-]+) [\d.-]+\)[^>]*>\d: a name|x="([\d.-]+)"[^>]*>\d: a name',
                        (tmp_path / "f.svg").read_text())  # fmt: skip
    lefts = {round(float(one or other)) for one, other in places}
    assert len(places) == 5
    assert len(lefts) < 4, "in columns that fit"
    assert min(lefts) > 0


@pytest.mark.filterwarnings("error")
def test_long_names_of_classes_leave_room_for_heat_maps(tmp_path: Path) -> None:
    """Matplotlib gave up the layout, so that panels and labels overlapped."""
    names = [f"immature granulocytes (myelocytes, metamyelocytes and promyelocytes) {i}" for i in range(10)]
    cells = [[1.0] * 10] * 10
    charts = [Heat(f"h{i}", "confusion", "true class", "predicted class", "%", names, names, cells) for i in range(9)]
    save_figure(Figure("f", "f", charts, 3), tmp_path / "f.svg")
    shown = set(re.findall(r">(immat[^<]*)<", (tmp_path / "f.svg").read_text(encoding="utf-8")))
    assert all("…" in name for name in shown)
    assert max(map(len, shown)) < 30
    assert {name[-1] for name in shown} == set("0123456789"), "the ends, which differ, are kept"
