"""The section with the accuracy by class describes the chart that it has."""

from __future__ import annotations

import pytest
from made_up_runs import made_up

from fedskew.report.charts.chart import Bars, Heat
from fedskew.report.sections import classes as section
from fedskew.report.sections.classes import MAX_BARS, classes
from fedskew.results import comparisons


@pytest.mark.parametrize("seeds", [1, 2])
@pytest.mark.parametrize("number", [MAX_BARS, MAX_BARS + 1])
def test_the_caption_names_deviations_if_and_only_if_they_are_drawn(number: int, seeds: int) -> None:
    """A heat map, for many classes, has only means."""
    runs = [made_up(method, s, [0.5 + s / 10] * number) for method in ("fedavg", "fedvls") for s in range(seeds)]
    (comparison,) = comparisons(runs)
    figure = classes(comparison).figures[0]
    assert isinstance(figure.charts[0], Bars if number <= MAX_BARS else Heat)
    assert ("±" in figure.caption) == (seeds > 1 and number <= MAX_BARS)


def test_a_method_without_a_panel_over_the_rounds_is_not_in_the_caption(monkeypatch: pytest.MonkeyPatch) -> None:
    (comparison,) = comparisons([made_up(method, 0, [0.5, 0.5]) for method in ("fedavg", "fedvls", "fedlmd")])
    assert classes(comparison).figures[-1].caption.endswith("one seed of each method")
    monkeypatch.setattr(section, "MAX_PANELS", 2)
    figure = classes(comparison).figures[-1]
    assert len(figure.charts) == 2
    assert figure.caption.endswith("one seed of each of the first 2 methods")


def test_the_change_compared_with_fedavg_is_on_the_seeds_that_both_have() -> None:
    """Seeds have different splits, so a method with an easier seed would seem better."""
    runs = [made_up("fedavg", 0, [0.5, 0.5]), made_up("fedavg", 1, [0.3, 0.1])]
    runs += [made_up("fedvls", 0, [0.6, 0.4]), made_up("fedvls", 2, [0.9, 0.9]), made_up("fedlmd", 5, [0.9, 0.9])]
    (comparison,) = comparisons(runs)
    (figure,) = [figure for figure in classes(comparison).figures if figure.key == "gains"]
    (chart,) = figure.charts
    assert isinstance(chart, Heat)
    found = dict(zip(chart.rows, chart.values, strict=True))
    assert found == {"fedvls": [pytest.approx(10), pytest.approx(-10)], "fedlmd": [None, None]}
    assert figure.caption == "Change compared with fedavg, in points, on the seeds that both methods have"
