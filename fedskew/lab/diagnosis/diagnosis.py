"""The diagnosis of a federation (skew, similar settings, methods to try) as sentences, as tables or as a page."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedskew.data.label_counts import LabelCounts
from fedskew.errors import UserError
from fedskew.experiment.config import Config
from fedskew.lab.diagnosis.advice import (
    MARGIN,
    Candidate,
    PrintedGain,
    RerunOutcome,
    candidates,
    printed_gains,
    recommend,
    required_settings,
)
from fedskew.lab.diagnosis.known import NEARNESS, Neighbour, known_settings, nearest
from fedskew.lab.diagnosis.reruns import config_setting
from fedskew.lab.diagnosis.skew import BETAS, UNEQUAL, Skew
from fedskew.lab.diagnosis.start import usual_per_round
from fedskew.report.charts.chart import Bars, BarSeries, Figure
from fedskew.report.charts.table import Cell, Table, number
from fedskew.report.document import Chapter, Document
from fedskew.report.sections.federation import class_groups, partition_map
from fedskew.report.sections.section import Section


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """Everything that fedskew can say about a federation before training."""

    counts: LabelCounts
    neighbours: list[Neighbour]
    """Known settings with a similar share of clients per round, the nearest first."""
    per_round: int | None = None
    """Clients per round. None means all."""

    @classmethod
    def from_counts(
        cls,
        counts: LabelCounts,
        results: str | Path | None = None,
        per_round: int | None = None,
        config: Config | None = None,
    ) -> Diagnosis:
        """Compare the federation with the papers' settings and with the reruns that ship with fedskew.

        `results` is a folder of further records, which count like the reruns. Without `per_round`, the usual number of
        clients per round is assumed. With `config`, a known setting with the same data and split is recognised, and
        its distance is 0.
        """
        clients = len(counts.clients)
        if per_round is not None and per_round > clients:
            raise UserError(f"clients_per_round is {per_round}; expected at most {clients}, the number of clients")
        per_round = per_round or usual_per_round(clients)
        share = min(per_round or clients, clients) / clients
        own_setting = None if config is None else config_setting(config)
        return cls(counts, nearest(Skew(counts.counts), known_settings(results), share, own_setting), per_round)

    @cached_property
    def skew(self) -> Skew:
        return Skew(self.counts.counts)

    @cached_property
    def candidates(self) -> list[Candidate]:
        return candidates(self.neighbours, self.counts.several_labels)

    @cached_property
    def printed(self) -> list[PrintedGain]:
        return printed_gains(self.neighbours)

    @property
    def near_reruns(self) -> list[Neighbour]:
        return [n for n in self.neighbours if n.is_near and n.setting.was_rerun]

    @property
    def method(self) -> str:
        """The method to start with."""
        return recommend(self.candidates)

    @property
    def command_that_measures(self) -> str:
        """The fedskew command that measures which method helps. `choose` needs one class per sample."""
        return "compare" if self.counts.several_labels else "choose"

    @property
    def beta_words(self) -> str:
        """The effective β in words. Near the ends of the range in which β is searched, only a bound is given."""
        beta = self.skew.beta
        if beta is None:
            return "not defined for one client"
        if beta < BETAS[0] * 10:
            return f"below {BETAS[0] * 10:g}: clients share hardly any class"
        if beta > BETAS[1] / 10:
            return f"above {BETAS[1] / 10:g}: practically no skew"
        return f"{beta:.3g}"

    def sentences(self) -> Iterator[str]:
        """Yield the diagnosis in sentences."""
        skew, n = self.skew, len(self.counts.clients)
        missing = [name for name, c in zip(self.counts.classes, self.counts.counts.sum(axis=0), strict=True) if c == 0]
        counted = "classes with samples" if missing else "classes"
        yield from self.counts.notes
        yield (
            f"{n} client{'s' if n > 1 else ''}, {skew.classes} class{'es' if skew.classes > 1 else ''}, "
            f"{skew.samples} samples. {_strength(skew)}: on "
            f"average, a client lacks {100 * skew.vacant.mean():.0f} % of the {counted} and has few samples of another "
            f"{100 * skew.minority.mean():.0f} %; the effective Dirichlet β is {self.beta_words}."
        )
        if skew.size_ratio > UNEQUAL:
            yield f"Clients differ in size: the largest has {skew.size_ratio:.0f} times the samples of the smallest."
        if missing:
            yield f"No client has samples of {_first_few(missing)}; no method can learn a class without samples."
        elif skew.class_ratio > UNEQUAL:
            yield (
                f"Classes differ in size: the largest has {skew.class_ratio:.0f} times the samples of the smallest, so "
                "accuracy hides the small ones. Also look at macro F1."
            )
        held_by_one = self._held_by_one()
        if held_by_one:
            alone = f"Classes that only one client has: {_first_few(held_by_one)}."
            yield (
                alone if self._everyone else f"{alone} Rounds without that client may make the model forget the class."
            )
        yield from self._neighbourhood()

    def _held_by_one(self) -> list[str]:
        holders = (self.counts.counts > 0).sum(axis=0)
        return [
            name
            for name, k in zip(self.counts.classes, holders, strict=True)
            if k == 1 and len(self.counts.clients) > 1
        ]

    @property
    def _everyone(self) -> bool:
        """Whether all clients take part in every round."""
        return self.per_round is None or self.per_round >= len(self.counts.clients)

    @property
    def _participants(self) -> str:
        return "all clients" if self._everyone else f"{self.per_round} of {len(self.counts.clients)} clients"

    def _neighbourhood(self) -> Iterator[str]:
        near = self.near_reruns
        if not near:
            yield self._nothing_near()
        else:
            yield (
                f"With {self._participants} per round, fedskew reran {len(near)} near "
                f"setting{'s' if len(near) > 1 else ''}; the nearest is {near[0].setting.label} (distance "
                f"{near[0].distance:.2f})."
            )
            if self.counts.several_labels:
                yield "Samples have one class there, so only methods that also take several labels count."
            yield self._best_rerun()
        refuted = [one for one in self.printed if one.outcome == "refuted"]
        if refuted:
            first = refuted[0]
            more = f"; {len(refuted) - 1} more in the table" if len(refuted) > 1 else ""
            sources = first.score.sources
            yield (
                f"Not every printed gain was confirmed: {' and '.join(sources)} print{'s' * (len(sources) == 1)} "
                f"{first.score.gain:+.1f} for {first.score.method} on {first.setting.label}, and the rerun gave "
                f"{first.rerun:+.1f}{more}. The rerun counts."
            )
        yield NEARNESS

    def _nothing_near(self) -> str:
        reruns = [n for n in self.neighbours if n.setting.was_rerun]
        closest = (
            f" The nearest rerun is {reruns[0].setting.label} (distance {reruns[0].distance:.2f})." if reruns else ""
        )
        prints = (
            f" Papers print {len(self.printed)} gain{'s' if len(self.printed) > 1 else ''} for near settings, but "
            "fedskew reran none."
            if self.printed
            else ""
        )
        return (
            f"With {self._participants} per round, fedskew reran nothing near this federation, so it cannot say which "
            f"method helps.{closest}{prints} To measure which method helps, use fedskew {self.command_that_measures}."
        )

    def _best_rerun(self) -> str:
        best = self.candidates[0] if self.candidates else None
        if best is None:
            suitable = "takes several labels" if self.counts.several_labels else "is in this version of fedskew"
            return f"None of the methods that were rerun there {suitable}."
        if best.gain <= 0:
            return "No method beat FedAvg there on average."
        required = required_settings(self.candidates)
        chosen = next((c for c in self.candidates if c.method == self.method), None)
        if chosen is None:
            leading = next(c for c in self.candidates if c.settings >= required)
            rerun_often = f" that was rerun in {required} or more of them" if leading is not best else ""
            return (
                f"No method{rerun_often} gained more than {MARGIN:g} points over FedAvg there on average (the most: "
                f"{leading.method}, {leading.gain:+.1f}). Another split of the same data changes a gain by about "
                f"{MARGIN:g} points."
            )
        gains = chosen.gains
        spread = f", from {min(gains):+.1f} to {max(gains):+.1f}" if len(gains) > 1 else ""
        among = f" among methods rerun in {required} or more of them" if chosen is not best else ""
        return (
            f"{chosen.method} gained most over FedAvg{among}: {chosen.gain:+.1f} points on average over "
            f"{chosen.settings} setting{'s' if chosen.settings > 1 else ''}{spread}, measured by fedskew."
        )

    # -- tables ------------------------------------------------------------------------------------------

    def measures(self) -> Table:
        skew, sizes = self.skew, self.skew.sizes
        rows: list[list[Cell]] = [
            ["vacant classes per client, %", number(100 * skew.vacant.mean(), 1), _range(100 * skew.vacant)],
            ["minority classes per client, %", number(100 * skew.minority.mean(), 1), _range(100 * skew.minority)],
            ["KL(client ‖ all), nats", number(float(skew.divergence.mean()), 3), _range(skew.divergence)],
            ["Hellinger distance to all", number(float(skew.hellinger.mean()), 3), _range(skew.hellinger)],
            ["effective Dirichlet β", self.beta_words, None],
            ["client sizes, deviation / mean", number(skew.size_spread, 3), f"{sizes.min()} to {sizes.max()}"],
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
        """List the near settings. If there are none, list the nearest few."""
        shown = [n for n in self.neighbours if n.is_near] or self.neighbours[:5]
        rows: list[list[Cell]] = [
            [n.setting.label, n.distance, "near" if n.is_near else "far",
             "rerun" if n.setting.was_rerun else "printed only",
             ", ".join(sorted({source for score in n.setting.scores for source in score.sources}))]
            for n in shown
        ]  # fmt: skip
        columns = ["setting", "distance", "", "evidence", "numbers from"]
        return Table("settings", "Settings by distance", columns, rows)

    def methods(self) -> Table:
        rows: list[list[Cell]] = [
            [c.method, number(c.gain, 1), f"{min(c.gains):+.1f} to {max(c.gains):+.1f}", c.settings, c.reveals, c.sends,
             c.extra_compute]
            for c in self.candidates
        ]  # fmt: skip
        columns = ["method", "gain over FedAvg", "from, to", "settings", "reveals besides updates", "sends",
                   "extra compute"]  # fmt: skip
        return Table("methods", "Rerun in near settings: mean gain in points, and what a method reveals and costs",
                     columns, rows)  # fmt: skip

    def evidence(self, method: str | None = None) -> Table:
        """List the reruns of one method, or of all."""
        rows: list[list[Cell]] = [
            [setting.label, score.source, c.method, number(score.accuracy), number(score.baseline),
             number(score.gain), score.seeds]
            for c in self.candidates if method in (None, c.method) for setting, score in c.evidence
        ]  # fmt: skip
        columns = ["setting", "source", "method", "accuracy %", "FedAvg %", "gain", "seeds"]
        return Table("evidence", "Reruns in near settings" + (f": {method}" if method else ""), columns, rows)

    def printed_table(self, outcomes: Collection[RerunOutcome] = ()) -> Table:
        """List the gains that papers print for near settings. `outcomes` selects some of them; empty means all."""
        rows: list[list[Cell]] = [
            [one.score.method, number(one.score.gain, 1), None if one.rerun is None else number(one.rerun, 1),
             one.outcome, one.setting.label, one.score.source]
            for one in self.printed
            if not outcomes or one.outcome in outcomes
        ]  # fmt: skip
        columns = ["method", "printed gain", "rerun", "outcome", "setting", "paper"]
        caption = "Gains printed in papers for near settings, in points; only reruns count"
        return Table("printed", caption, columns, rows)

    def to_json(self) -> dict[str, Any]:
        tables = (
            self.measures(), self.clients(), self.settings(), self.methods(), self.evidence(), self.printed_table()
        )  # fmt: skip
        return {
            "words": list(self.sentences()),
            "beta": self.skew.beta,
            "method": self.method,
            **{t.key: [dict(zip(t.columns, row, strict=True)) for row in t.rows] for t in tables},
        }


def _first_few(names: list[str]) -> str:
    """List the first five names, and say how many more there are."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _strength(skew: Skew) -> str:
    """Put the mean Hellinger distance into words. It is between 0 and 1."""
    distance = float(skew.hellinger.mean())
    words = ((0.1, "Hardly any label skew"), (0.3, "Mild label skew"), (0.6, "Strong label skew"))
    return next((text for limit, text in words if distance < limit), "Extreme label skew")


def _range(values: np.ndarray[Any, np.dtype[np.float64]]) -> str:
    return f"{values.min():.3g} to {values.max():.3g}"


START = (
    "To write this configuration to a file, repeat the command with --save start.yaml. If you gave counts without "
    "data, the saved configuration uses synthetic data with the same classes in place of yours."
)
"""The text of the section with the configuration to start from."""


def diagnosis_document(diagnosis: Diagnosis, title: str, config: str) -> Document:
    """Make a page. `config` is the text of the configuration to start from."""
    counts = diagnosis.counts
    chart = partition_map("map", "samples", counts.counts, counts.classes, counts.clients)
    groups = class_groups(counts.counts)
    kinds = [BarSeries(name, [int(v) for v in groups[name]], style=i)
             for i, name in enumerate(("majority", "minority", "vacant"))]  # fmt: skip
    bars = Bars("kinds", "classes by kind", "client", "classes", counts.clients, kinds, stacked=True)
    sections = [
        Section("map", "The federation",
                figures=[Figure("map", "Samples by client and class", [chart], wide=True),
                         Figure("kinds", "Majority, minority and vacant classes per client", [bars])]),
        Section("measures", "Measures of skew", tables=[diagnosis.measures(), diagnosis.clients()]),
        Section("settings", "Similar settings", tables=[diagnosis.settings()]),
        Section("methods", "What helped there",
                tables=[diagnosis.methods(), diagnosis.evidence(), diagnosis.printed_table()]),
        Section("start", "A configuration to start from", [START], listing=config),
    ]  # fmt: skip
    return Document(title, [Chapter(title, list(diagnosis.sentences()), [], sections)], None, [])
