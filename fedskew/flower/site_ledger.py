"""A site's ledger: the privacy that its updates have spent in all runs, and the time that it has worked for each run.

`ledger.jsonl` in the site's state folder is a chained log. An update's line is on disk before the update leaves, so the
ledger has every update that left, even after a crash. An update also counts if its reply is lost, and again if its
round is repeated. The time is recorded only if the policy limits it.

The ledger has two accounts: the privacy of the whole site, and that of one sample. `releases.py` says how much privacy
one update spends in each account.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from fedskew.errors import UserError, plural
from fedskew.flower.chained_log import ChainedLog, Entry, head_path, read_chain
from fedskew.flower.policy import Policy
from fedskew.flower.releases import ACCOUNTS, Account, Release
from fedskew.flower.site_state import StateUnusable
from fedskew.flower.wire import Facts
from fedskew.gaussian_privacy import gaussian_epsilon

NAME = "ledger.jsonl"
_UPDATE, _WORK = "update", "work"


class BudgetExceeded(UserError):
    """An update would exceed the site's budget. The text names none of the site's files, so it may leave the site."""


class SiteLedger:
    """The ledger of one site."""

    def __init__(self, state_folder: Path, policy: Policy) -> None:
        self._log, self._policy = ChainedLog(state_folder / NAME), policy

    def spent(self) -> Facts:
        """The privacy that all updates so far have spent, in both accounts. An infinite ε is None."""
        entries = self._entries(_UPDATE)
        found = {account.key: self._epsilon(account, entries) for account in ACCOUNTS}
        finite = {key: value if math.isfinite(value) else None for key, value in found.items()}
        return {**finite, "delta": self._policy.delta, "updates": len(entries)}

    def require_budget(self, release: Release) -> None:
        """Refuse an update that would exceed one of the site's budgets."""
        for account in ACCOUNTS:
            budget = self._budget(account)
            if budget is not None:
                self._require_budget(account, budget, release)

    def _budget(self, account: Account) -> float | None:
        budget: float | None = getattr(self._policy, account.key)
        return budget

    def _require_budget(self, account: Account, budget: float, release: Release) -> None:
        limit = f"{account.budget_name} is ε = {budget:g} at δ = {self._policy.delta:g} (policy.{account.key})"
        if math.isinf(release.mu_squared(account)):
            raise BudgetExceeded(f"{limit}, but {_why_infinite(account, release)}")
        before = self._entries(_UPDATE)
        infinite = [entry for entry in before if math.isinf(_from_entry(entry).mu_squared(account))]
        if infinite:
            raise BudgetExceeded(
                f"{limit}, but {plural(len(infinite), 'earlier update')} had no noise"
                f"{' that keeps this ε finite' if any(e['noise'] for e in infinite) else ''}, the last in run "
                f"{infinite[-1]['run']}, so no budget can hold for these data"
            )
        after = self._epsilon(account, before, release)
        if after > budget:
            raise BudgetExceeded(
                f"{limit}; {plural(len(before), 'update')} spent "
                f"{self._epsilon(account, before):.3g}, and round {release.round} would bring it to {after:.3g}"
            )

    def charge(self, release: Release) -> None:
        """Record an update before it leaves, or refuse it. The lock keeps two processes from exceeding the budget."""
        try:
            with self._log.locked():
                self.require_budget(release)
                self._log.append_locked(_to_entry(release))
        except (StateUnusable, BudgetExceeded):
            raise
        except UserError as error:
            raise StateUnusable(str(error)) from error

    def describe_plan(self, release: Release, rounds: int) -> list[str]:
        """Describe how much of each budget a planned run would spend, one line per budget.

        `release` is one update of the run, and `rounds` is the run's number of rounds. Rounds that the site has already
        trained do not count again.
        """
        lines = []
        for account in ACCOUNTS:
            budget = self._budget(account)
            if budget is not None:
                lines.append(self._describe_plan(account, budget, release, rounds))
        return lines

    def _describe_plan(self, account: Account, budget: float, release: Release, rounds: int) -> str:
        name = "privacy budget" if account.is_whole_site else "privacy budget of one sample"
        if math.isinf(release.mu_squared(account)):
            if release.noise is None:
                lacks = "the app adds no noise"
            elif _protects_samples_only(account, release):
                lacks = "the app's noise is on single samples"
            else:
                lacks = "the app's noise is too small"
            return f"{name}: ε = {budget:g}, but {lacks}, so this site will refuse to train"
        before = self._entries(_UPDATE)
        done = max((entry["round"] for entry in before if entry["run"] == release.run), default=0)
        left = max(0, rounds - done)
        line = f"{name}: ε = {self._epsilon(account, before):.3g} of {budget:g} at δ = {self._policy.delta:g} is spent"
        if not left:
            return f"{line}; the run has no more rounds"
        coming = plural(left, "more round" if done else "round")
        after = self._spent_after(account, before, release, left)
        line += f"; {coming} would bring it to {after:.3g}"
        affordable = self.affordable_rounds(account, release, left)
        if affordable == left:
            return line
        last = f"stop after round {done + affordable}" if affordable else "refuse to train"
        return f"{line}, so this site will {last}"

    def affordable_rounds(self, account: Account, release: Release, rounds: int) -> int:
        """How many of a planned run's `rounds` the budget of this account allows."""
        budget = self._budget(account)
        if budget is None:
            return rounds
        spent = partial(self._spent_after, account, self._entries(_UPDATE), release)
        return bisect.bisect_right(range(1, rounds + 1), budget, key=spent)

    def _spent_after(self, account: Account, before: Iterable[Entry], release: Release, rounds: int) -> float:
        return self._epsilon(account, before, *[release] * rounds)

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

    def _epsilon(self, account: Account, entries: Iterable[Entry], *more: Release) -> float:
        mu_squared = math.fsum(release.mu_squared(account) for release in (*map(_from_entry, entries), *more))
        return gaussian_epsilon(math.sqrt(mu_squared), self._policy.delta)

    def _entries(self, event: str) -> list[Entry]:
        """Read the entries of this kind. Refuse a ledger that was changed."""
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


def _to_entry(release: Release) -> Entry:
    """Make the entry of an update. In the file, the number of Gaussian mechanisms is called `releases`."""
    return {
        "event": _UPDATE,
        "run": release.run,
        "round": release.round,
        "privacy": release.privacy,
        "noise": release.noise,
        "releases": release.mechanisms,
    }


def _from_entry(entry: Entry) -> Release:
    """Read a release from its entry. Entries of older versions have no `releases`: their updates are one mechanism."""
    return Release(entry["run"], entry["round"], entry["privacy"], entry["noise"], entry.get("releases", 1))


def _protects_samples_only(account: Account, release: Release) -> bool:
    return account.is_whole_site and release.privacy == "example"


def _why_infinite(account: Account, release: Release) -> str:
    """Say why an update spends an infinite ε in an account, and what is expected instead."""
    if release.noise is None:
        return f"the update would have no noise; expected {account.expected}"
    if _protects_samples_only(account, release):
        return (
            "noise on the gradients of single samples gives the whole site no finite ε; expected "
            f"{account.expected}, or policy.example_epsilon in place of policy.epsilon"
        )
    return f"the noise multiplier {release.noise:g} is too small for a finite ε; expected a larger one"
