"""Methods to try: their gains in reruns of near settings, what they reveal and cost, and the gains that papers print.

A near setting is a setting that resembles the user's federation (see `known.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedskew.errors import UserError
from fedskew.lab.diagnosis.known import Neighbour
from fedskew.lab.diagnosis.setting import KnownSetting, Score
from fedskew.methods.catalogue import Entry, find

RerunOutcome = Literal["confirmed", "smaller", "refuted", "not rerun"]

MARGIN = 2.0
"""A method must gain more points than this over FedAvg to be suggested. Another split of the same data changes a gain
by about this much. A test checks this on the reruns that have several seeds."""
CONFIRMING_SHARE = 0.5
"""A rerun with at least this share of a printed gain confirms it."""


@dataclass(frozen=True)
class Candidate:
    """A method that was rerun in near settings. Numbers that papers print do not count."""

    method: str
    evidence: tuple[tuple[KnownSetting, Score], ...]
    """The method's reruns, those in the nearest setting first."""

    @property
    def gains(self) -> list[float]:
        """The mean gain over FedAvg in each setting."""
        by_setting: dict[KnownSetting, list[float]] = {}
        for setting, score in self.evidence:
            by_setting.setdefault(setting, []).append(score.gain)
        return [sum(gains) / len(gains) for gains in by_setting.values()]

    @property
    def gain(self) -> float:
        """Mean gain over FedAvg in points. Each setting counts once."""
        return sum(self.gains) / len(self.gains)

    @property
    def settings(self) -> int:
        """The number of near settings in which the method was rerun."""
        return len(self.gains)

    @property
    def entries(self) -> list[Entry]:
        return [find(part) for part in self.method.split("+")]

    @property
    def reveals(self) -> str:
        return _joined([e.reveals for e in self.entries], "nothing")

    @property
    def sends(self) -> str:
        return _joined([e.sends for e in self.entries], "")

    @property
    def extra_compute(self) -> str:
        return _joined([e.extra_compute for e in self.entries], "none")


def _joined(parts: Sequence[str], nothing: str) -> str:
    """Join the distinct texts, except those that equal `nothing`. Return `nothing` if none is left."""
    kept = [text for text in dict.fromkeys(parts) if text != nothing]
    return ", ".join(kept) or nothing


def candidates(neighbours: Sequence[Neighbour], several_labels: bool = False) -> list[Candidate]:
    """The methods that were rerun in near settings, largest gain first.

    Methods that this version of fedskew lacks are left out. With `several_labels` per sample, so are methods that need
    exactly one.
    """
    found: dict[str, list[tuple[KnownSetting, Score]]] = {}
    for neighbour in neighbours:
        for score in neighbour.setting.scores if neighbour.is_near else ():
            if score.is_rerun and _is_known(score.method, several_labels):
                found.setdefault(score.method, []).append((neighbour.setting, score))
    all_candidates = [Candidate(method, tuple(evidence)) for method, evidence in found.items()]
    return sorted(all_candidates, key=lambda c: (-c.gain, -c.settings))


def _is_known(method: str, several_labels: bool = False) -> bool:
    """Whether this version of fedskew has the method. With `several_labels`, the method must also take several labels
    per sample."""
    try:
        entries = [find(part) for part in method.split("+")]
    except UserError:
        return False
    return not several_labels or all(part.multi_label for entry in entries for part in entry.parts)


def recommend(ranked: Sequence[Candidate]) -> str:
    """Return the best candidate that was rerun in enough settings and gains enough, or else FedAvg."""
    good = [c for c in ranked if c.settings >= required_settings(ranked) and c.gain > MARGIN]
    return good[0].method if good else "fedavg"


def required_settings(ranked: Sequence[Candidate]) -> int:
    """Return in how many settings a suggested method must have been rerun.

    That is half of the settings of the method that was rerun most, rounded up.
    """
    return math.ceil(max((c.settings for c in ranked), default=0) / 2)


@dataclass(frozen=True)
class PrintedGain:
    """A gain that a paper prints for a near setting, and the gain in fedskew's rerun."""

    setting: KnownSetting
    score: Score
    rerun: float | None
    """Points over FedAvg in the rerun. None if the method was not rerun in the setting."""

    @property
    def outcome(self) -> RerunOutcome:
        if self.rerun is None:
            return "not rerun"
        if self.score.gain <= 0:
            return "confirmed" if self.rerun <= 0 else "refuted"
        if self.rerun <= 0:
            return "refuted"
        return "confirmed" if self.rerun >= CONFIRMING_SHARE * self.score.gain else "smaller"


def printed_gains(neighbours: Sequence[Neighbour]) -> list[PrintedGain]:
    """Collect the gains that papers print for near settings, largest gain first."""
    found = [
        PrintedGain(neighbour.setting, score, neighbour.setting.rerun_gain(score))
        for neighbour in neighbours
        if neighbour.is_near
        for score in neighbour.setting.scores
        if not score.is_rerun and _is_known(score.method)
    ]
    return sorted(found, key=lambda one: -one.score.gain)
