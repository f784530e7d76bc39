"""SuperLink and SuperNodes as real processes on loopback, with TLS and node keys."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from monitored import get, health, values
from real_federation import MISBEHAVING, NAMES, PATIENCE, Real, plan, processes, until, worker_of
from safetensors.torch import load_file

from fedskew.cli import main
from fedskew.experiment.config import Config
from fedskew.experiment.preparation import prepare
from fedskew.experiment.run import run_prepared
from fedskew.flower.local_federation import LocalFederation
from fedskew.flower.processes import free_ports

BETWEEN_ATTEMPTS = 10.0
TOLERANCE = 1e-5
MEGABYTES_PER_SITE = 150
"""Of a site without work: its SuperNode and the SuperExec that was forked from it."""


def rounds(folder: Path) -> list[dict[str, Any]]:
    file = folder / "rounds.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


class Return:
    """Attempts of a site that was killed to come back: Flower refuses it for about a minute."""

    def __init__(self, local: LocalFederation, site: str) -> None:
        self._local, self._site = local, site
        self._next = 0.0

    def succeeded(self) -> bool:
        if not self._local.nodes[self._site].running and time.monotonic() > self._next:
            self._local.start_site(self._site)
            self._next = time.monotonic() + BETWEEN_ATTEMPTS
        return "SuperNode ID" in self._local.nodes[self._site].output()


def test_a_federation_comes_to_the_simulated_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For two methods, one after the other on the same sites; the workers stay warm, and end with their sites."""
    sites = NAMES[:2]
    real = Real(tmp_path, sites)
    workers: list[list[int]] = []
    with real.local as local:
        for name, value in local.environment.items():
            monkeypatch.setenv(name, value)
        local.start()
        for method in ("scaffold", "fedgr"):
            config = real.config(method)
            with monitoring() as (port, seen):
                assert main([*federate_run_command(real.app(method, config)), "--metrics-port", str(port)]) == 0
            assert any(numbers["fedskew_sites_present"] == len(sites) for numbers in seen)
            _assert_as_simulated(real, method, config)
            workers.append([pid for name in sites for pid in worker_of(local.site_file(name))])
        _assert_other_settings_are_refused(real, capsys)
        idle = [memory(*processes("fedskew.flower.node", str(local.site_file(name)))) for name in sites]
        assert max(idle) < MEGABYTES_PER_SITE
        assert len(workers[0]) == len(sites)
        assert all(same == workers[0] for same in workers)
    until(lambda: not any(worker_of(local.site_file(name)) for name in sites), "the workers' end", local)


@contextmanager
def monitoring() -> Iterator[tuple[int, list[dict[str, float]]]]:
    """A free port, and the metrics that were served there while the run was well."""
    (port,), seen, ended = free_ports(1), [], threading.Event()

    def watch() -> None:
        while not ended.wait(0.2):
            with suppress(OSError):
                if health(port)[0] == 200:
                    seen.append(values(get(port, "/metrics")[1]))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield port, seen
    finally:
        ended.set()
        thread.join()


def memory(*processes: int) -> float:
    """Megabytes of these processes, in which shared pages count once."""
    rolled_up = [Path(f"/proc/{process}/smaps_rollup").read_text() for process in processes]
    assert len(rolled_up) == 2
    return sum(int(re.findall(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)[0]) for text in rolled_up) / 1024


def federate_run_command(app: Path) -> list[str]:
    return ["federate", "run", str(app), "--connection", "federation"]


def _assert_other_settings_are_refused(real: Real, capsys: pytest.CaptureFixture[str]) -> None:
    """`federate run` shows the reason, and Flower marks the run as failed; the reason stays in the run's folder."""
    folder = real.run_folder("fedgr")
    command = federate_run_command(real.app("other", real.config("fedgr", lr=0.3), folder=str(folder)))
    capsys.readouterr()
    assert main(command) == 2
    reason = f"{folder} holds a run with another configuration (it differs in lr)"
    assert f"error: {reason}" in capsys.readouterr().err
    listed = subprocess.run(
        [str(Path(sys.executable).parent / "flwr"), "list", "federation", "--format", "json"],
        capture_output=True,
        text=True,
        check=True,
    )
    statuses = [run["status"] for run in json.loads(listed.stdout)["runs"]]
    assert sorted(statuses) == ["finished:completed", "finished:completed", "finished:failed"]
    status = json.loads((folder / "status.json").read_text())
    assert status["status"] == "stopped"
    assert reason in status["reason"]


def _assert_as_simulated(real: Real, method: str, config: Config) -> None:
    together = run_prepared(prepare(config, real.split))
    folder = real.run_folder(method)
    apart = load_file(folder / "model.safetensors")
    for name, tensor in together.model.state_dict().items():
        torch.testing.assert_close(apart[name], tensor, rtol=0, atol=TOLERANCE)
    assert json.loads((folder / "summary.json").read_text())["accuracy"] == together.accuracy
    assert rounds(folder)[-1]["clients"] == list(range(len(real.sites)))


@pytest.mark.slow
def test_a_command_that_was_killed_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its run goes on at the SuperLink and keeps the folder locked, until the next command stops and resumes it."""
    sites = NAMES[:2]
    real = Real(tmp_path, sites)
    app, folder = real.app("killed", real.config("fedavg", rounds=12)), real.run_folder("killed")
    with real.local as local:
        for name, value in local.environment.items():
            monkeypatch.setenv(name, value)
        local.start()
        command = [sys.executable, "-m", "fedskew", *federate_run_command(app)]
        killed = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        until(lambda: len(rounds(folder)) > 1, "the first round", local)
        killed.kill()
        killed.wait()
        again = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=PATIENCE, check=False)
    assert again.returncode == 0, again.stderr
    assert re.search(r"an earlier command left run \d+ at the SuperLink; it was stopped", again.stderr)
    assert [row["round"] for row in rounds(folder)] == list(range(13))


@pytest.mark.slow
def test_faults(tmp_path: Path) -> None:
    """One site after the other is killed, and then the server; the run goes on, and the model stays finite."""
    real = Real(tmp_path)
    local = real.local
    config = real.config("scaffold", rounds=4)
    folder = real.run_folder("faults")
    _, second, third = (local.site_file(name) for name in NAMES)
    plan(second, {2: "hang"})
    plan(third, {2: "nan", 3: "hang"})
    with local:
        local.start()
        run = local.start_run(real.app("faults", config, MISBEHAVING, minimum=1, begin_with=3, round_timeout=15))

        until((second.parent / "hanging").exists, "a ClientApp that hangs", local)
        worker = worker_of(second)
        os.kill(int((second.parent / "hanging").read_text()), signal.SIGKILL)

        until((third.parent / "hanging").exists, "a site that hangs", local)
        until(lambda: worker_of(second) == worker, "the worker whose ClientApp was killed", local)
        os.kill(local.nodes["site-3"].pid, signal.SIGKILL)
        until(lambda: not worker_of(third), "the end of the worker whose SuperNode was killed", local)

        until(lambda: len(rounds(folder)) >= 4, "the round without those sites", local)
        assert local.superlink is not None
        os.kill(local.superlink.pid, signal.SIGKILL)
        until(lambda: not run.running, "the end of the run whose server was killed", local)
        before = rounds(folder)

        (third.parent / "plan.json").unlink()
        local.start_superlink()
        until(Return(local, "site-3").succeeded, "the return of the site that was killed", local)
        again = local.start_run(real.app("again", config, minimum=3, round_timeout=PATIENCE, folder=str(folder)))
        until(lambda: not again.running, "the run that goes on", local)

    after = rounds(folder)
    assert after[: len(before) - 1] == before[: len(before) - 1]
    assert [row["round"] for row in after] == [0, 1, 2, 3, 4]
    assert after[2]["diverged"] == [2]
    assert after[2]["failed"].keys() == {"site-2"}
    assert "site-3" in after[3]["failed"]
    assert after[4]["failed"] == {}
    assert all(bool(t.isfinite().all()) for t in load_file(folder / "model.safetensors").values())
    assert list((third.parent / "state").rglob("global.round-4.safetensors"))
