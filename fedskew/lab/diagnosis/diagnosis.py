"""The diagnosis of a federation: measures, similar settings, candidates; as words, tables, charts, JSON and a page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedskew.data.label_counts import LabelCounts
from fedskew.errors import UserError
from fedskew.lab.diagnosis.advice import Candidate, candidates, recommended
from fedskew.lab.diagnosis.known import NEAR, Neighbour, known_settings, nearest
from fedskew.lab.diagnosis.skew import BETAS, Skew
from fedskew.lab.diagnosis.start import usual_per_round
from fedskew.report.charts.chart import Bars, BarSeries, Figure
from fedskew.report.charts.table import Cell, Table, number
from fedskew.report.document import Chapter, Document
from fedskew.report.sections.federation import class_groups, partition_map
from fedskew.report.sections.section import Section


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """Everything we can say about a federation before training."""

    counts: LabelCounts
    neighbours: list[Neighbour]
    per_round: int | None = None
    """Clients per round; None: all."""

    @classmethod
    def from_counts(
        cls, counts: LabelCounts, results: str | Path | None = None, per_round: int | None = None
    ) -> Diagnosis:
        """Compare the federation with the published settings and with the reruns recorded in `results`."""
        clients = len(counts.clients)
        if per_round is not None and per_round > clients:
            raise UserError(f"clients_per_round is {per_round}; expected at most {clients}, the number of clients")
        per_round = per_round or usual_per_round(clients)
        share = min(per_round or clients, clients) / clients
        return cls(counts, nearest(Skew(counts.counts), known_settings(results), share), per_round)

    @cached_property
    def skew(self) -> Skew:
        return Skew(self.counts.counts)

    @cached_property
    def candidates(self) -> list[Candidate]:
        return candidates(self.neighbours)

    @property
    def method(self) -> str:
        """The method to start with."""
        return recommended(self.candidates)

    @property
    def beta(self) -> str:
        beta = self.skew.beta
        if beta is None:
            return "not defined for one client"
        if beta < BETAS[0] * 10:
            return f"below {BETAS[0] * 10:g}: clients share hardly any class"
        if beta > BETAS[1] / 10:
            return f"above {BETAS[1] / 10:g}: practically no skew"
        return f"{beta:.3g}"

    def words(self) -> Iterator[str]:
        """The diagnosis in sentences."""
        skew, n = self.skew, len(self.counts.clients)
        yield (
            f"{n} client{'s' if n > 1 else ''}, {skew.classes} classes, {skew.samples} samples. {_strength(skew)}: a "
            f"client lacks {100 * skew.vacant.mean():.0f} % of the classes on average and has few samples of another "
            f"{100 * skew.minority.mean():.0f} %; the effective Dirichlet β is {self.beta}."
        )
        if skew.size_ratio > 3:
            yield f"Clients differ in size: the largest has {skew.size_ratio:.0f} times the samples of the smallest."
        missing = [name for name, c in zip(self.counts.classes, self.counts.counts.sum(axis=0), strict=True) if c == 0]
        if missing:
            yield f"No client has samples of {', '.join(missing[:5])}; no method can learn that."
        elif skew.class_ratio > 3:
            yield f"Classes differ overall: the largest has {skew.class_ratio:.0f} times the samples of the smallest."
        alone = self._held_by_one()
        if alone:
            more = f" and {len(alone) - 5} more" if len(alone) > 5 else ""
            yield f"Only one client has {', '.join(alone[:5])}{more}; rounds without that client may forget this."
        yield from self._neighbourhood()

    def _held_by_one(self) -> list[str]:
        holders = (self.counts.counts > 0).sum(axis=0)
        return [
            name
            for name, k in zip(self.counts.classes, holders, strict=True)
            if k == 1 and len(self.counts.clients) > 1
        ]

    @property
    def _participants(self) -> str:
        clients = len(self.counts.clients)
        every = self.per_round is None or self.per_round >= clients
        return "all clients" if every else f"{self.per_round} of {clients} clients"

    def _neighbourhood(self) -> Iterator[str]:
        if not self.neighbours:
            yield "There is no published setting to compare with."
            return
        closest = self.neighbours[0]
        if not closest.near:
            yield (
                f"No published setting is similar (with {self._participants} per round, the nearest, "
                f"{closest.setting.label}, has distance {closest.distance:.2f}; similar is up to {NEAR}): published "
                "results do not transfer to this federation. Compare methods yourself."
            )
            return
        yield (
            f"With {self._participants} per round, the nearest published setting is {closest.setting.label} (distance "
            f"{closest.distance:.2f}). Settings with a much smaller or larger share of clients per round do not count."
        )
        best = next((c for c in self.candidates if c.method == self.method), None)
        if best is None or best.gain <= 0:
            yield "In similar settings no method beat FedAvg."
            return
        measured = "measured by fedskew" if best.rerun else "as printed in papers, not rerun by fedskew"
        yield (
            f"Among methods tested in most similar settings, {best.method} improved most over FedAvg: {best.gain:+.1f} "
            f"points on average over {best.settings} setting{'s' if best.settings > 1 else ''}, {measured}."
        )

    # -- tables ------------------------------------------------------------------------------------------

    def measures(self) -> Table:
        skew = self.skew
        rows: list[list[Cell]] = [
            ["vacant classes per client, %", number(100 * skew.vacant.mean(), 1), _range(100 * skew.vacant)],
            ["minority classes per client, %", number(100 * skew.minority.mean(), 1), _range(100 * skew.minority)],
            ["KL(client ‖ all), nats", number(float(skew.divergence.mean()), 3), _range(skew.divergence)],
            ["Hellinger distance to all", number(float(skew.hellinger.mean()), 3), _range(skew.hellinger)],
            ["effective Dirichlet β", self.beta, None],
            ["client sizes, spread / mean", number(skew.size_spread, 3), f"{skew.sizes.min()} to {skew.sizes.max()}"],
            ["largest / smallest class", number(skew.class_ratio, 2) if np.isfinite(skew.class_ratio) else "∞", None],
            ["Hellinger distance of all to uniform", number(skew.global_imbalance, 3), None],
        ]
        return Table("measures", "Measures of skew", ["measure", "mean", "from, to"], rows)

    def clients(self) -> Table:
        skew = self.skew
        rows: list[list[Cell]] = [
            [name, int(skew.sizes[k]), number(100 * skew.vacant[k], 1), number(100 * skew.minority[k], 1),
             number(float(skew.divergence[k]), 3), number(float(skew.hellinger[k]), 3)]
            for k, name in enumerate(self.counts.clients)
        ]  # fmt: skip
        columns = ["client", "samples", "vacant %", "minority %", "KL", "Hellinger"]
        return Table("clients", "Clients", columns, rows)

    def settings(self) -> Table:
        rows: list[list[Cell]] = [
            [n.setting.label, n.distance, "similar" if n.near else "far",
             ", ".join(sorted({source for s in n.setting.scores for source in s.source.split(", ")}))]
            for n in self.neighbours
        ]  # fmt: skip
        columns = ["setting", "distance", "", "numbers from"]
        return Table("settings", "Most similar published settings", columns, rows)

    def methods(self) -> Table:
        rows: list[list[Cell]] = [
            [c.method, number(c.gain, 1), c.settings, "yes" if c.rerun else "no", c.reveals, c.sends, c.extra_compute]
            for c in self.candidates
        ]
        columns = ["method", "gain over FedAvg", "settings", "rerun here", "labels revealed", "sends",
                   "extra compute"]  # fmt: skip
        return Table("methods", "Methods in similar settings, what they reveal and cost", columns, rows)

    def evidence(self, method: str | None = None) -> Table:
        """The evidence for one method, or for all."""
        rows: list[list[Cell]] = [
            [setting.label, score.source, c.method, number(score.accuracy), number(score.baseline),
             number(score.gain), score.seeds]
            for c in self.candidates if method in (None, c.method) for setting, score in c.evidence
        ]  # fmt: skip
        columns = ["setting", "source", "method", "accuracy %", "FedAvg %", "gain", "seeds rerun"]
        return Table("evidence", "The numbers behind this" + (f": {method}" if method else ""), columns, rows)

    def to_json(self) -> dict[str, Any]:
        tables = (self.measures(), self.clients(), self.settings(), self.methods(), self.evidence())
        return {
            "words": list(self.words()),
            "beta": self.skew.beta,
            "method": self.method,
            **{t.key: [dict(zip(t.columns, row, strict=True)) for row in t.rows] for t in tables},
        }


def _strength(skew: Skew) -> str:
    far = float(skew.hellinger.mean())
    words = ((0.1, "Hardly any label skew"), (0.3, "Mild label skew"), (0.6, "Strong label skew"))
    return next((text for limit, text in words if far < limit), "Extreme label skew")


def _range(values: np.ndarray[Any, np.dtype[np.float64]]) -> str:
    return f"{values.min():.3g} to {values.max():.3g}"


START = (
    "For your data. fedskew diagnose COUNTS --save start.yaml writes it to a file; without --data, it uses a built-in "
    "dataset with as many classes as a stand-in."
)


def diagnosis_document(found: Diagnosis, title: str, config: str) -> Document:
    counts = found.counts
    chart = partition_map("map", "samples", counts.counts, counts.classes, counts.clients)
    groups = class_groups(counts.counts)
    kinds = [BarSeries(name, [int(v) for v in groups[name]], style=i)
             for i, name in enumerate(("majority", "minority", "vacant"))]  # fmt: skip
    bars = Bars("kinds", "classes by kind", "client", "classes", counts.clients, kinds, stacked=True)
    sections = [
        Section("map", "The federation",
                figures=[Figure("map", "Samples by client and class", [chart], wide=True),
                         Figure("kinds", "Classes of each client that are majority, minority, vacant", [bars])]),
        Section("measures", "Measures of skew", tables=[found.measures(), found.clients()]),
        Section("settings", "Similar settings", tables=[found.settings()]),
        Section("methods", "What helped there", tables=[found.methods(), found.evidence()]),
        Section("start", "A configuration to start from", [START], listing=config),
    ]  # fmt: skip
    return Document(title, [Chapter(title, list(found.words()), [], sections)], None, [])
