"""The section with the learning curves explains its bands if there are any."""

from __future__ import annotations

import pytest
from made_up_runs import made_up

from fedskew.report.charts.chart import Lines
from fedskew.report.sections.curves import curves
from fedskew.results import comparisons


@pytest.mark.parametrize("finished", [(True, True), (True, False), (False, False), (True,)])
def test_the_note_on_bands_is_there_if_and_only_if_a_band_is(finished: tuple[bool, ...]) -> None:
    """A mean is over the finished runs, or over all runs if none is finished."""
    runs = [made_up("fedavg", seed, [0.5 + seed / 10] * 2, is_finished) for seed, is_finished in enumerate(finished)]
    (comparison,) = comparisons(runs)
    section = curves(comparison)
    charts = [chart for figure in section.figures for chart in figure.charts if isinstance(chart, Lines)]
    has_band = any(line.low for chart in charts for line in chart.lines)
    assert any("a band spans" in paragraph for paragraph in section.paragraphs) == has_band
    assert has_band == (finished in ((True, True), (False, False)))
