"""Faults of real processes, each tied to an event of the run: the small form of `benchmarks/chaos`."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from in_process import small_data
from method_cases import slow

from fedskew.experiment.config import Config, with_values
from fedskew.experiment.preparation import build_federation
from fedskew.experiment.round.record import RoundRow
from fedskew.flower.audit import NAME
from fedskew.flower.chained_log import Entry, read_chain
from fedskew.flower.guardian import marked_processes
from fedskew.flower.local_federation import LocalFederation
from fedskew.flower.trial import plan_trial, run_folder, run_trial

CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos"
PATIENCE = 300.0
SITES = ("site-1", "site-2", "site-3")


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(CHAOS))


class Watched:
    """A trial that runs in a thread, and what its audit logs say."""

    def __init__(self, trial: LocalFederation) -> None:
        self._trial = trial
        self.logged: list[str] = []
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            run_trial(self._trial, self.logged.append)
        except BaseException as error:
            self._errors.append(error)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert not self._errors, self._errors
            assert time.monotonic() < end, f"waited {PATIENCE:g} s for {what}; the run logged {self.logged}"
            time.sleep(0.02)

    def until_end(self) -> None:
        self.until(lambda: not self._thread.is_alive(), "the end of the run")
        assert not self._errors, self._errors

    def replies(self, log: Path, round: int) -> list[Entry]:
        """The updates of a round in an audit log."""
        entries = read_chain(log).entries if log.exists() else ()
        return [e for e in entries if (e["event"], e.get("kind"), e.get("round")) == ("reply", "train", round)]


@pytest.mark.parametrize("kills_server", [False, *slow(True)])
def test_a_run_with_faults_ends_with_the_simulated_model(kills_server: bool, tmp_path: Path) -> None:
    """A worker, a link and a SuperNode fail, and then the SuperLink with the ServerApp, each at a point of the run."""
    from checks import TOLERANCE, account_for_updates, largest_difference, read_intact, simulate
    from faults import find_worker
    from links import Links

    rounds = 3 if kills_server else 2
    values = {"data": str(small_data(tmp_path)), "method": "scaffold", "rounds": rounds, "local_epochs": 1}
    config = with_values(Config(), {**values, "model": "dnn", "device": "cpu", "partition.clients": len(SITES)})
    patience = {"round_timeout": PATIENCE, "grace": 2, "grace_seconds": 20, "attempts": 5}
    trial = plan_trial(tmp_path / "trial", config, {"minimum": 2, "begin_with": len(SITES), **patience})
    run = run_folder(trial)
    own = {site: trial.site_file(site).parent / "state" / NAME for site in SITES}
    with Links(list(SITES), lambda: trial.port) as links, trial:
        trial.addresses = {site: f"127.0.0.1:{link.port}" for site, link in links.by_site.items()}
        trial.start()
        watched = Watched(trial)

        def replied(round: int) -> set[str]:
            return {str(entry["site"]) for entry in watched.replies(run.audit_path, round)}

        watched.until(lambda: "site-2" in replied(1), "the first update of site-2")
        worker = find_worker(trial.site_file("site-2"), trial.nodes["site-2"].pid)
        assert worker is not None
        os.kill(worker, signal.SIGKILL)

        watched.until(lambda: len(replied(1)) == len(SITES), "round 1")
        os.kill(trial.nodes["site-3"].pid, signal.SIGSTOP)
        watched.until(lambda: bool(watched.replies(own["site-1"], 2)), "the update that site-1 cannot send")
        links.by_site["site-1"].break_off()
        watched.until(lambda: "site-2" in replied(2), "the update of the site without a fault")
        links.by_site["site-1"].mend()
        os.kill(trial.nodes["site-3"].pid, signal.SIGCONT)
        known: set[str] = set()
        before = 0
        if kills_server:
            watched.until(lambda: len(replied(3)) >= 2, "two updates of round 3")
            assert trial.superlink is not None
            os.kill(trial.superlink.pid, signal.SIGKILL)
            before, known = len(read_chain(run.audit_path).entries), replied(3)
        watched.until_end()

    assert run.finished
    assert len(run.rounds()) == 1 + rounds
    assert not marked_processes(str(trial.folder))
    problems: list[str] = []
    server = read_intact(run.audit_path, problems)
    sites = {site: read_intact(log, problems) for site, log in own.items()}
    updates = account_for_updates(server, sites, run.rounds())
    assert [*problems, *updates.problems] == []
    asked_again = [e["sites"] for e in server[before:] if (e["event"], e.get("kind")) == ("request", "train")]
    assert not known & {site for sites in asked_again for site in sites}
    assert largest_difference(run, simulate(run, config, build_federation(config), SITES)) <= TOLERANCE


def test_the_faults_follow_from_the_seed() -> None:
    from faults import WEIGHTS, draw_faults

    def first(seed: int) -> list[object]:
        draw = draw_faults(SITES, seed, 2, 5)
        return [draw() for _ in range(2000)]

    assert first(0) == first(0) != first(1)
    assert {(fault.target, fault.kind) for fault in first(0)} == WEIGHTS.keys()  # type: ignore[attr-defined]


def test_an_acknowledged_update_that_is_in_no_round_is_found() -> None:
    from checks import account_for_updates

    def reply(site: str, round: int) -> Entry:
        tensors = {"digest": f"{site} {round}"}
        return {"event": "reply", "kind": "train", "site": site, "round": round, "tensors": tensors}

    server = [
        {"event": "request", "kind": "train", "round": 1, "sites": list(SITES)},
        *(reply(site, 1) for site in SITES),
        {"event": "discarded", "kind": "train", "round": 1, "site": "site-3"},
        {"event": "request", "kind": "train", "round": 2, "sites": list(SITES)},
        reply("site-1", 2),
        {"event": "start"},
        {"event": "request", "kind": "train", "round": 2, "sites": ["site-1"]},
        reply("site-1", 2),
    ]
    own = {site: [reply(site, 1), reply(site, 2)] for site in SITES}
    rows = [RoundRow(0), RoundRow(1, clients=[0, 1]), RoundRow(2, clients=[0])]
    found = account_for_updates(server, own, rows)
    assert (found.counted, found.discarded, found.superseded, found.problems) == (3, 1, 1, ())

    lost = account_for_updates(server, own, [*rows[:1], RoundRow(1, clients=[0]), RoundRow(2, clients=[0, 2])])
    assert lost.problems == (
        "the update of site-2 in round 1 was acknowledged, but is in no round",
        "round 2 counts site-3, but its update was never acknowledged",
    )
    assert account_for_updates(server, own | {"site-2": []}, rows).problems == (
        "the server has an update of site-2 in round 1 that site-2 never recorded",
    )


def test_the_page_is_what_was_measured() -> None:
    from page import render

    measured = json.loads(CHAOS.with_suffix(".json").read_text(encoding="utf-8"))
    assert measured["problems"] == []
    assert CHAOS.with_suffix(".md").read_text(encoding="utf-8") == render(measured)
