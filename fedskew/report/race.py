"""The tables of a race for terminals."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fedskew.results.race import Finalist, RaceRecord, Standing
from fedskew.results.ranking import find_metric
from fedskew.results.significance import INTERVAL_NOTE

MAX_ROWS = 12


def final_table(race: RaceRecord) -> Table:
    """The finalists, the best mean over all splits first; they are compared with FedAvg on the fresh splits."""
    title = f"final: {find_metric(race.rank_by).label} on validation data, and gain over FedAvg in points"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("method", "lr", "mean %", "gain", "interval", "compute", "traffic", "reveals"):
        words = heading in ("method", "reveals")  # these may take several lines; numbers may not
        width = len("nothing") if heading == "reveals" else None
        table.add_column(
            heading, no_wrap=not words, overflow="fold", min_width=width, justify="left" if words else "right"
        )
    for place, one in enumerate(race.final):
        style = "bold" if place == race.chosen else ""
        table.add_row(*(Text(cell, style=style) for cell in _cells(one)))
    if has_intervals(race.final):
        table.caption, table.caption_justify = INTERVAL_NOTE, "left"
    return table


def has_intervals(final: Sequence[Finalist]) -> bool:
    return any(one.difference is not None and one.difference.low is not None for one in final)


def _cells(one: Finalist) -> list[str]:
    standing, difference = one.standing, one.difference
    lead, interval = "", ""
    if difference is not None:
        lead = signed(difference.mean)
        if difference.low is not None and difference.high is not None:
            interval = f"{signed(difference.low)} to {signed(difference.high)}"
    costs = [f"×{ratio:.2f}" for ratio in (one.compute, one.traffic)]
    return [standing.label, f"{standing.lr:g}", f"{100 * one.overall:.1f}", lead, interval, *costs, one.reveals]


def standings_table(title: str, standings: Sequence[Standing]) -> Table:
    """The best candidates so far, with the difference from the best FedAvg on the same splits."""
    table = Table(title=title, title_justify="left")
    for heading in ("", "method", "learning rate", "splits", "mean %", "over FedAvg"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    baseline = next((s for s in standings if s.method == "fedavg"), None)
    shown = list(standings[:MAX_ROWS])
    if baseline is not None and baseline not in shown:
        shown[-1] = baseline
    for standing in shown:
        place = str(standings.index(standing) + 1)
        lead = "" if baseline is None else mean_lead(standing, baseline)
        cells = (place, standing.label, f"{standing.lr:g}", str(len(standing.scores)), f"{100 * standing.mean:.1f}")
        table.add_row(*map(Text, (*cells, lead)), style="bold" if standing is baseline else "")
    return table


def mean_lead(standing: Standing, baseline: Standing) -> str:
    """The mean difference in points over the splits that both have."""
    common = standing.scores.keys() & baseline.scores.keys()
    if not common or standing is baseline:
        return ""
    return signed(sum(standing.scores[s] - baseline.scores[s] for s in common) / len(common))


def signed(share: float) -> str:
    """A difference in points."""
    return f"{100 * share:+.1f}".replace("-", "−")
