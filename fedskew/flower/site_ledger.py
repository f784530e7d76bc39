"""A site's ledger: the privacy that its updates have spent in all runs, and the time that it has worked for each run.

`ledger.jsonl` in the site's state folder is a chained log. An update's line is on disk before the update leaves, so a
crash can only make the sum too large. A reply that is lost, and a round that is repeated, count each time.

Every update with noise is a Gaussian mechanism with parameter μ = 2/z, for the noise multiplier z (see `privacy.py`).
Over rounds and runs, the squares of μ add up, which is exact for Gaussian mechanisms, even if each one depends on the
results of those before it. In the terms of zCDP, ρ = Σ μ²/2. ε follows from the sum at the policy's δ. No amplification
by sampling is counted. An update without noise makes ε infinite.

    local     the site adds the noise itself
    central   the server says that it adds the noise to the mean, and the site has to trust it
    none      there is no noise
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedskew.errors import UserError
from fedskew.flower.chained_log import ChainedLog, Entry, head_path, read_chain
from fedskew.flower.policy import Policy
from fedskew.flower.privacy import SENSITIVITY, gaussian_epsilon
from fedskew.flower.settings import FederationSettings
from fedskew.flower.site_state import StateUnusable
from fedskew.flower.wire import Facts, one_line

NAME = "ledger.jsonl"
_UPDATE, _WORK = "update", "work"


class BudgetExceeded(UserError):
    """An update would exceed the site's budget. The text names none of the site's files, so it may leave the site."""


@dataclass(frozen=True)
class Release:
    """An update that leaves the site."""

    run: str
    round: int
    privacy: str
    """Who adds noise: local, central or none."""
    noise: float | None
    """The noise multiplier. None without noise."""

    @property
    def mu_squared(self) -> float:
        return math.inf if self.noise is None else (SENSITIVITY[self.privacy] / self.noise) ** 2


def read_release(facts: Facts) -> Release:
    """Describe the update that a request would make leave the site. Refuse a clip or noise that is not positive."""
    kinds = {"local": facts["noise"], "central": facts.get("central_noise")}
    privacy = next((kind for kind, noise in kinds.items() if noise is not None), "none")
    multiplier = None
    if privacy != "none":
        values: Any = kinds[privacy]
        if not isinstance(values, list) or len(values) != 2 or not all(map(_is_positive, values)):
            raise UserError(
                f"the server sets clip and noise to {one_line(repr(values))}; expected two positive numbers"
            )
        multiplier = float(values[1])
    return Release(one_line(str(facts["run"])), facts["key"]["round"] + 1, privacy, multiplier)


def planned_release(settings: FederationSettings) -> Release:
    """Describe one update of a run that has not begun."""
    return Release("", 0, settings.privacy, None if settings.privacy == "none" else settings.noise)


class SiteLedger:
    """The ledger of one site."""

    def __init__(self, state_folder: Path, policy: Policy) -> None:
        self._log, self._policy = ChainedLog(state_folder / NAME), policy

    def spent(self) -> Facts:
        """The privacy that all updates so far have spent. `epsilon` is None if one of them had no noise."""
        entries = self._entries(_UPDATE)
        found = self._epsilon(entries)
        return {
            "epsilon": found if math.isfinite(found) else None,
            "delta": self._policy.delta,
            "updates": len(entries),
        }

    def require_budget(self, release: Release) -> None:
        """Refuse an update that would exceed the site's budget."""
        budget = self._policy.epsilon
        if budget is None:
            return
        limit = f"this site's budget is ε = {budget:g} at δ = {self._policy.delta:g} (policy.epsilon)"
        if release.noise is None:
            raise BudgetExceeded(f"{limit}, but the update would have no noise; expected federation.privacy = 'local'")
        before = self._entries(_UPDATE)
        bare = [entry for entry in before if entry["noise"] is None]
        if bare:
            raise BudgetExceeded(
                f"{limit}, but {len(bare)} earlier update{'s' if len(bare) > 1 else ''} left it without noise, the "
                f"last in run {bare[-1]['run']}, so no budget can hold for the same data"
            )
        after = self._epsilon(before, release)
        if after > budget:
            raise BudgetExceeded(
                f"{limit}; {len(before)} update{'s' if len(before) != 1 else ''} spent {self._epsilon(before):.3g}, "
                f"and round {release.round} would bring it to {after:.3g}"
            )

    def charge(self, release: Release) -> None:
        """Record an update before it leaves, or refuse it. Two processes cannot both spend what is left."""
        try:
            with self._log.locked():
                self.require_budget(release)
                self._log.append_locked({"event": _UPDATE, **asdict(release)})
        except (StateUnusable, BudgetExceeded):
            raise
        except UserError as error:
            raise StateUnusable(str(error)) from error

    def describe_plan(self, release: Release, rounds: int) -> str | None:
        """Describe what a planned run would leave of the budget. None if there is no budget."""
        budget = self._policy.epsilon
        if budget is None:
            return None
        if release.noise is None:
            return f"privacy budget: ε = {budget:g}, but the app adds no noise, so this site will refuse to train"
        enough = self.affordable_rounds(release, rounds)
        before, after = self._entries(_UPDATE), [release] * rounds
        line = (
            f"privacy budget: ε = {self._epsilon(before):.3g} of {budget:g} at δ = {self._policy.delta:g} is spent; "
            f"{rounds} rounds would bring it to {self._epsilon(before, *after):.3g}"
        )
        return line if enough == rounds else f"{line}, so this site will stop after round {enough}"

    def affordable_rounds(self, release: Release, rounds: int) -> int:
        """The number of rounds of a planned run, at most `rounds`, for which the budget suffices."""
        if self._policy.epsilon is None:
            return rounds
        before = self._entries(_UPDATE)
        return bisect.bisect_right(
            range(1, rounds + 1), self._policy.epsilon, key=lambda count: self._epsilon(before, *[release] * count)
        )

    def require_time(self, run: str) -> None:
        """Refuse a request of a run that has used up its time."""
        limit = self._policy.minutes
        if limit is None:
            return
        worked = math.fsum(entry["seconds"] for entry in self._entries(_WORK) if entry["run"] == run) / 60
        if worked >= limit:
            raise UserError(
                f"this site has worked {worked:.1f} minutes for this run; it allows {limit:g} (policy.minutes)"
            )

    def add_time(self, run: str, seconds: float) -> None:
        """Record the time that the site worked for a request, if the policy limits it."""
        if self._policy.minutes is None:
            return
        try:
            self._log.append({"event": _WORK, "run": run, "seconds": round(seconds, 3)})
        except UserError as error:
            raise StateUnusable(str(error)) from error

    def _epsilon(self, entries: Iterable[Entry], *more: Release) -> float:
        releases = [Release(e["run"], e["round"], e["privacy"], e["noise"]) for e in entries]
        mu_squared = math.fsum(release.mu_squared for release in (*releases, *more))
        return gaussian_epsilon(math.sqrt(mu_squared), self._policy.delta)

    def _entries(self, event: str) -> list[Entry]:
        """Read the entries of a kind. A ledger that was changed is refused."""
        path = self._log.path
        if not path.exists() and not head_path(path).exists():
            return []
        try:
            chain = read_chain(path)
        except UserError as error:
            raise StateUnusable(str(error)) from error
        if chain.problem is not None:
            raise StateUnusable(f"{path} was changed: {chain.problem}; restore it")
        return [entry for entry in chain.entries if entry["event"] == event]


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
