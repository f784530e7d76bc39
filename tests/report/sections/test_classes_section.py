"""The section with the accuracy by class describes the chart that it has."""

from __future__ import annotations

import pytest
from made_up_runs import made_up

from fedskew.report.charts.chart import Bars, Heat
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
