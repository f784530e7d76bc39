"""Methods that helped in similar settings, and what they reveal and cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedskew.errors import UserError
from fedskew.lab.diagnosis.known import KnownSetting, Neighbour, Score
from fedskew.methods.catalogue import Entry, find

Evidence = tuple[KnownSetting, Score]


@dataclass(frozen=True)
class Candidate:
    """A method that was tested in similar settings."""

    method: str
    evidence: tuple[Evidence, ...]

    @property
    def rerun(self) -> bool:
        """Whether fedskew measured any of it; otherwise it is only printed in papers."""
        return any(score.seeds is not None for _, score in self.evidence)

    @property
    def gain(self) -> float:
        """Mean gain over FedAvg in points. Each setting counts once; if it has reruns, only they count."""
        by_setting: dict[KnownSetting, list[Score]] = {}
        for setting, score in self.evidence:
            by_setting.setdefault(setting, []).append(score)
        gains = []
        for scores in by_setting.values():
            measured = [s for s in scores if s.seeds is not None] or scores
            gains.append(sum(s.gain for s in measured) / len(measured))
        return sum(gains) / len(gains)

    @property
    def settings(self) -> int:
        return len({setting for setting, _ in self.evidence})

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


def _joined(said: Sequence[str], nothing: str) -> str:
    kept = [text for text in dict.fromkeys(said) if text != nothing]
    return ", ".join(kept) or nothing


def candidates(neighbours: Sequence[Neighbour]) -> list[Candidate]:
    """The methods of similar settings, largest gain first; within a point, more settings win."""
    found: dict[str, list[Evidence]] = {}
    for neighbour in neighbours:
        if neighbour.near:
            for score in neighbour.setting.scores:
                if _known(score.method):
                    found.setdefault(score.method, []).append((neighbour.setting, score))
    made = [Candidate(method, tuple(evidence)) for method, evidence in found.items()]
    return sorted(made, key=lambda c: (-round(c.gain), -c.settings, -c.gain))


def _known(method: str) -> bool:
    try:
        return all(find(part) for part in method.split("+"))
    except UserError:
        return False


def recommended(ranked: Sequence[Candidate]) -> str:
    """The best candidate among those tested in at least half as many settings as the most tested one, or FedAvg."""
    most = max((c.settings for c in ranked), default=0)
    tried = [c for c in ranked if 2 * c.settings >= most and c.gain > 0]
    return tried[0].method if tried else "fedavg"
