"""`fedskew federate status` shows what a run and its sites are doing, while it runs and after it ended."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from in_process import Case, answer_as_workers, case, small_data

from fedskew.cli import main
from fedskew.data import Dirichlet, federation
from fedskew.errors import UserError
from fedskew.experiment.config import Config, with_values
from fedskew.flower.chained_log import ChainedLog
from fedskew.flower.reply_times import ReplyTimes
from fedskew.flower.run_monitoring import RunMonitor
from fedskew.flower.run_status import RunHistory, RunStatus, SiteStatus, describe_age, read_status
from fedskew.flower.server_app import _record_start
from fedskew.flower.server_app import main as server_main
from fedskew.flower.settings import FederationSettings


def federated(folder: Path, more: dict[str, str] | None = None, **own: Any) -> Case:
    data = small_data(folder)
    split = federation(str(data), Dirichlet(beta=0.5, clients=3), seed=0)
    values = {"method": "fedavg", "rounds": 2, "local_epochs": 1, "device": "cpu", "partition.clients": 3}
    here = case(folder, split, data, with_values(Config(), values), **own)
    answer_as_workers(here, data, more)
    return here


def status(folder: Path) -> RunStatus:
    return read_status(folder, datetime.now(UTC))


def site(found: RunStatus, name: str) -> SiteStatus:
    return next(one for one in found.sites if one.name == name)


def test_a_finished_run_names_its_sites_and_who_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = federated(tmp_path, {"site-1": "policy: {noise: 1}\n"}, minimum=2)
    server_main(here.grid, here.context)
    found = status(tmp_path / "run")
    assert (found.status, found.round, found.reason, found.privacy) == ("finished", 2, "", None)
    assert [(one.name, one.state, one.round, one.updates) for one in found.sites] == [
        ("site-0", "connected", 2, 2),
        ("site-1", "refuses", None, 0),
        ("site-2", "connected", 2, 2),
    ]
    assert "this site demands local noise (policy.noise)" in site(found, "site-1").reason
    capsys.readouterr()
    assert main(["federate", "status", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert f"{tmp_path / 'run'}: finished; 2 rounds completed\n" in shown
    assert "refuses" in shown
    assert main(["federate", "status", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sites"][1]["state"] == "refuses"
    (tmp_path / "run/audit.head").unlink()
    assert main(["federate", "status", str(tmp_path / "run")]) == 0
    shown_without = capsys.readouterr()
    assert "audit log is damaged, so the status may be incomplete: audit.head is missing" in shown_without.err
    assert shown_without.out == shown, "no entry is left out"


def test_a_site_whose_key_belongs_to_another_name_is_not_connected(tmp_path: Path) -> None:
    """It is greeted again and again, and replies each time."""
    here = federated(tmp_path, minimum=2)
    here.grid.meddle = lambda name, asked, facts, payload: (
        (facts | {"site": "site-0"}, payload) if (name, asked["kind"]) == ("site-1", "hello") else (facts, payload)
    )
    server_main(here.grid, here.context)
    assert sum((message.site, message.kind) == ("site-1", "hello") for message in here.grid.sent) > 1
    found = site(status(tmp_path / "run"), "site-1")
    assert (found.state, found.updates) == ("not admitted", 0)
    assert found.reason == "its key belongs to 'site-1', but its site.yaml has the name 'site-0'"


def test_a_site_that_refuses_only_tests_is_connected(tmp_path: Path) -> None:
    declared = {"evaluation": "sites", "site_metrics": "total"}
    own = {"site-0": "metrics: total\n", "site-1": "metrics: none\n", "site-2": "policy: {noise: 1}\n"}
    here = federated(tmp_path, own, minimum=1, **declared)
    server_main(here.grid, here.context)
    found = status(tmp_path / "run")
    assert [(one.state, one.updates) for one in found.sites] == [("connected", 2), ("connected", 2), ("refuses", 0)]
    reason = "no tests: the server requests metrics 'total'; this site allows metrics: none (site.yaml)"
    assert [one.reason for one in found.sites][:2] == ["", reason]
    assert "this site demands local noise (policy.noise)" in found.sites[2].reason


def test_the_reason_of_every_end_is_shown(tmp_path: Path) -> None:
    """The first attempt has too few updates. The second one succeeds."""
    here = federated(tmp_path, {"site-1": "policy: {noise: 1}\n"}, attempts=1)
    with pytest.raises(UserError):
        server_main(here.grid, here.context)
    found = status(tmp_path / "run")
    assert (found.status, found.round) == ("stopped", 0)
    assert "had too few good updates" in found.reason
    file = tmp_path / "site-1" / "site.yaml"
    file.write_text(file.read_text().replace("policy: {noise: 1}\n", "policy: {rounds: 2}\n"))
    server_main(here.grid, here.context)
    found = status(tmp_path / "run")
    assert [attempt.status for attempt in found.attempts] == ["stopped", "finished"]
    assert site(found, "site-1").updates == 2


NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def after(seconds: float) -> str:
    return (NOON + timedelta(seconds=seconds)).isoformat()


def log_of_a_run(folder: Path, process: int) -> ChainedLog:
    """The log of a run in which site b took 10 seconds for round 1 and has not replied in round 2."""
    log = ChainedLog(folder / "audit.jsonl")
    machine = {"process": process, "machine": socket.gethostname()}
    for seconds, entry in (
        (0, {"event": "start", "federation": ["a", "b", "c"], **machine}),
        (0, {"event": "request", "kind": "train", "round": 1, "sites": ["a", "b"]}),
        (1, {"event": "reply", "site": "a", "kind": "train", "round": 1}),
        (10, {"event": "reply", "site": "b", "kind": "train", "round": 1}),
        (20, {"event": "request", "kind": "train", "round": 2, "sites": ["a", "b"]}),
        (21, {"event": "reply", "site": "a", "kind": "train", "round": 2}),
    ):
        log.append({**entry, "time": (NOON + timedelta(seconds=seconds)).isoformat()})
    return log


def test_a_site_is_late_after_a_minute_even_if_it_usually_needs_seconds(tmp_path: Path) -> None:
    log = log_of_a_run(tmp_path, os.getpid())
    for seconds, state in ((79, "working"), (81, "late")):
        found = read_status(tmp_path, NOON + timedelta(seconds=seconds))
        assert found.status == "running"
        assert [one.state for one in found.sites] == ["connected", state, "never seen"]
        assert [one.round for one in found.sites] == [2, 1, None]
        assert site(found, "b").waiting_since == (NOON + timedelta(seconds=20)).isoformat()
    log.append({"event": "late", "site": "b", "kind": "train", "round": 2, "reason": "it is late"})
    log.append({"event": "disconnected", "site": "a"})
    found = status(tmp_path)
    assert [(one.state, one.missed) for one in found.sites][:2] == [("disconnected", 0), ("late", 1)]


def test_a_site_is_late_after_three_times_what_it_usually_needs_for_the_same_work(tmp_path: Path) -> None:
    log = ChainedLog(tmp_path / "audit.jsonl")
    start = {"event": "start", "federation": ["a"], "process": os.getpid(), "machine": socket.gethostname()}
    log.append({**start, "time": after(0)})
    log.append({"event": "connected", "site": "a", "time": after(0)})
    for asked, replied, work in ((0, 100, "train, stage 0"), (100, 101, "evaluate, model global")):
        facts = {"kind": work.split(",")[0], "work": work, "round": 1}
        log.append({"event": "request", "sites": ["a"], **facts, "time": after(asked)})
        log.append({"event": "reply", "site": "a", **facts, "time": after(replied)})
    facts = {"kind": "train", "work": "train, stage 0", "round": 2}
    log.append({"event": "request", "sites": ["a"], **facts, "time": after(200)})
    for seconds, state in ((499, "working"), (501, "late")):
        assert read_status(tmp_path, NOON + timedelta(seconds=seconds)).sites[0].state == state


def test_only_a_missed_time_out_limits_the_next_wait_after_a_restart(tmp_path: Path) -> None:
    """A site that is late because others have replied may still be working, and its usual time stays unknown."""
    for timed_out, limit in (({}, math.inf), ({"timed_out": True}, 60.0)):
        times = ReplyTimes(grace=3.0, at_least=60.0)
        history = RunHistory(("a", "b"), times)
        history.add({"event": "start", "federation": ["a", "b"], "time": after(0)})
        history.add({"event": "request", "kind": "train", "round": 1, "sites": ["a", "b"], "time": after(0)})
        history.add({"event": "reply", "kind": "train", "round": 1, "site": "a", "time": after(2)})
        history.add({"event": "late", "kind": "train", "site": "b", "reason": "", "time": after(90), **timed_out})
        assert times.limit(1, "train") == limit


def test_a_reply_to_a_greeting_does_not_end_a_site_s_silence(tmp_path: Path) -> None:
    """As in the running server: a site that connects again may still hang when it works."""
    times = ReplyTimes(grace=3.0, at_least=60.0)
    history = RunHistory(("a", "b"), times)
    for seconds, entry in (
        (0, {"event": "request", "kind": "train", "work": "train", "sites": ["a", "b"]}),
        (2, {"event": "reply", "kind": "train", "round": 1, "site": "a"}),
        (900, {"event": "late", "kind": "train", "site": "b", "reason": "", "timed_out": True}),
        (1000, {"event": "request", "kind": "hello", "sites": ["b"]}),
        (1001, {"event": "reply", "kind": "hello", "site": "b"}),
        (1010, {"event": "request", "kind": "evaluate", "work": "evaluate", "sites": ["a", "b"]}),
        (1012, {"event": "reply", "kind": "evaluate", "site": "a"}),
    ):
        history.add({**entry, "time": after(seconds)})
    assert times.limit(1, "evaluate") == 60.0


def test_a_run_whose_process_is_gone_was_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    log = log_of_a_run(tmp_path, ended.pid)
    found = status(tmp_path)
    assert found.status == "killed"
    assert "start the run again to resume" in found.reason
    assert site(found, "b").state == "connected"  # nobody waits for it any more
    log.append({"event": "start", "federation": ["a", "b", "c"], "process": 1, "machine": "elsewhere"})
    found = status(tmp_path)
    assert [attempt.status for attempt in found.attempts] == ["killed", "unknown"]
    assert main(["federate", "status", str(tmp_path)]) == 0
    assert "ago: killed: its process ended without a reason" in capsys.readouterr().out


def test_a_run_whose_process_id_another_process_has_was_killed(tmp_path: Path) -> None:
    """After a restart of a machine or a container, the numbers of processes begin again."""
    process = {"process": os.getpid(), "process_start": "an earlier start", "machine": socket.gethostname()}
    ChainedLog(tmp_path / "audit.jsonl").append({"event": "start", "federation": ["a"], **process})
    assert status(tmp_path).status == "killed"
    problem = RunMonitor(tmp_path).problem()
    assert problem is not None
    assert problem.startswith("killed: ")


def test_a_run_goes_on_after_the_system_s_clock_was_corrected(tmp_path: Path) -> None:
    """For example, after the virtual machine was paused. Linux then also gives a later start of the process."""
    log, settings = ChainedLog(tmp_path / "audit.jsonl"), FederationSettings(sites=("a", "b"))
    _record_start(lambda entry: log.append({**entry, "time": after(-365 * 24 * 3600)}), settings)
    assert status(tmp_path).status == "running"


def test_other_folders_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["federate", "status", str(tmp_path)]) == 2
    assert "is not the folder of a federation's run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s ago"), (90, "90 s ago"), (600, "10 min ago"), (9000, "2 h ago"), (200_000, "2 d ago")],
)
def test_ages_are_readable(seconds: int, text: str) -> None:
    now = datetime.now(UTC)
    assert describe_age((now - timedelta(seconds=seconds)).isoformat(), now) == text
    assert describe_age(None, now) == "–"
