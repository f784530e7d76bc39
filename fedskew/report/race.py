"""The tables of a race, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fedskew.results.race import SPLITS, Finalist, RaceRecord, Repeats, Standing
from fedskew.results.ranking import find_metric
from fedskew.results.significance import INTERVAL_NOTE

_REVEALS = "reveals besides updates"
MAX_ROWS = 12
"""The maximum number of candidates in a table of standings."""


def final_table(race: RaceRecord) -> Table:
    """List the finalists, the best mean over all runs first.

    The gain over FedAvg is measured only on splits that were not used before the final. If the split is fixed, the
    gain is measured with new seeds instead.
    """
    title = f"final: {find_metric(race.rank_by).label} on validation data, and gain over FedAvg in points"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("method", "lr", "mean %", "gain", "interval", "compute", "traffic", _REVEALS):
        is_text = heading in ("method", _REVEALS)  # text may be wrapped, numbers may not
        width = len("nothing") if heading == _REVEALS else None  # `nothing` is never wrapped
        table.add_column(
            heading, no_wrap=not is_text, overflow="fold", min_width=width, justify="left" if is_text else "right"
        )
    for index, finalist in enumerate(race.final):
        style = "bold" if index == race.chosen else ""
        table.add_row(*(Text(cell, style=style) for cell in _cells(finalist)))
    if has_intervals(race.final):
        table.caption, table.caption_justify = INTERVAL_NOTE, "left"
    return table


def has_intervals(final: Sequence[Finalist]) -> bool:
    return any(finalist.difference is not None and finalist.difference.low is not None for finalist in final)


def _cells(finalist: Finalist) -> list[str]:
    standing, difference = finalist.standing, finalist.difference
    gain, interval = "", ""
    if difference is not None:
        gain = signed(difference.mean)
        if difference.low is not None and difference.high is not None:
            interval = f"{signed(difference.low)} to {signed(difference.high)}"
    costs = [f"×{ratio:.2f}" for ratio in (finalist.compute, finalist.traffic)]
    mean = f"{100 * finalist.overall:.1f}"
    return [standing.label, f"{standing.lr:g}", mean, gain, interval, *costs, finalist.reveals]


def standings_table(title: str, standings: Sequence[Standing], repeats: Repeats = SPLITS) -> Table:
    """List the best candidates so far, and always the best one of FedAvg, with their lead over it (`mean_lead`)."""
    table = Table(title=title, title_justify="left")
    for heading in ("", "method", "learning rate", repeats.many, "mean %", "over FedAvg"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    baseline = next((s for s in standings if s.method == "fedavg"), None)
    shown = list(standings[:MAX_ROWS])
    if baseline is not None and baseline not in shown:
        shown[-1] = baseline
    for standing in shown:
        rank = str(standings.index(standing) + 1)
        lead = "" if baseline is None else mean_lead(standing, baseline)
        cells = (rank, standing.label, f"{standing.lr:g}", str(len(standing.scores)), f"{100 * standing.mean:.1f}")
        table.add_row(*map(Text, (*cells, lead)), style="bold" if standing is baseline else "")
    return table


def mean_lead(standing: Standing, baseline: Standing) -> str:
    """Format the mean difference in points, over the seeds that both have. Empty if there is nothing to compare."""
    common = standing.scores.keys() & baseline.scores.keys()
    if not common or standing is baseline:
        return ""
    return signed(sum(standing.scores[s] - baseline.scores[s] for s in common) / len(common))


def signed(share: float) -> str:
    """Format a difference of shares as points, with its sign."""
    return f"{100 * share:+.1f}".replace("-", "−")
