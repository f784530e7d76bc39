"""The map of where which method helps: accuracy over FedAvg's, by participation and skew, under one protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from fedskew.lab.papers.cells import Choice, table_cells
from fedskew.lab.papers.protocol import conditions, protocol
from fedskew.lab.papers.rerun import BASELINE, Rerun, columns, rerun
from fedskew.lab.sweep.records_file import Records

PAPER, TABLE = "fedskew", "map"
CLOSE = 1.0
"""Points of accuracy within which two methods count as equally good."""


@dataclass(frozen=True)
class Spot:
    """One federation: a dataset, a skew, a share of clients that take part in a round."""

    dataset: str
    beta: float
    share: float
    accuracy: dict[str, float]
    """By method, in percent."""

    def gain(self, method: str) -> float | None:
        """Points over FedAvg."""
        if method not in self.accuracy or BASELINE not in self.accuracy:
            return None
        return self.accuracy[method] - self.accuracy[BASELINE]

    @property
    def ranking(self) -> list[str]:
        return sorted(self.accuracy, key=lambda method: -self.accuracy[method])

    @property
    def best(self) -> list[str]:
        """The best method, and those that come close."""
        top = self.accuracy[self.ranking[0]]
        return [method for method in self.ranking if top - self.accuracy[method] <= CLOSE]


def seeds_of(records: Records) -> list[int]:
    return sorted({record.config.seed for record in records})


def spots(records: Records, seeds: Sequence[int]) -> list[Spot]:
    """Of all federations with every method that any of them has, more than one: of others the best is not known."""
    clients = int(protocol(PAPER).settings["partition.clients"])
    cells = table_cells(PAPER, TABLE)
    by_seed = [columns([rerun(cell, [seed], records, Choice()) for cell in cells]) for seed in seeds]
    found = []
    for place in dict.fromkeys(place for one in by_seed for place in one):
        dataset, split, condition, _ = place
        share = int(conditions(condition)["participants"]) / clients
        accuracy = _accuracy([_of_one_seed(one[place]) for one in by_seed])
        found.append(Spot(dataset, float(split.partition(":")[2]), share, accuracy))
    everyone = {method for spot in found for method in spot.accuracy}
    return [spot for spot in found if spot.accuracy.keys() == everyone and len(everyone) > 1]


def _of_one_seed(column: Sequence[Rerun]) -> dict[str, float]:
    """The accuracy of each method whose run is complete."""
    return {one.cell.method: one.mean.mean for one in column if one.mean is not None and one.shortened is None}


def _accuracy(by_seed: Sequence[dict[str, float]]) -> dict[str, float]:
    """Each method's mean over the seeds that all methods have: another seed means another split, so a mean over other
    seeds would compare splits instead of methods."""
    methods = dict.fromkeys(method for one in by_seed for method in one)
    shared = [one for one in by_seed if one.keys() == methods.keys()]
    return {method: fmean(one[method] for one in shared) for method in methods} if shared else {}


def guide(found: Sequence[Spot]) -> str:
    """Which method for my federation: a table, straight from the numbers."""
    lines = ["| dataset | Dirichlet β | clients a round | FedAvg | best, and within a point of it | gain |",
             "| --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for spot in found:
        baseline = spot.accuracy.get(BASELINE)
        gain = spot.gain(spot.ranking[0])
        lines.append(
            f"| {spot.dataset} | {spot.beta:g} | {spot.share:.0%} | {'' if baseline is None else f'{baseline:.1f}'} "
            f"| {', '.join(spot.best)} | {'' if gain is None else f'{gain:+.1f}'} |"
        )
    return "\n".join(lines) + "\n"
