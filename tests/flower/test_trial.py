"""`fedskew federate up` as a real process: killed, taken over, and refused with other settings."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from in_process import small_data
from real_federation import NAMES, Real, processes, worker_of
from real_federation import until as wait_until

from fedskew.errors import UserError
from fedskew.experiment.config import Config, with_values
from fedskew.experiment.storage.run_folder import RunFolder
from fedskew.flower.guardian import marked_processes
from fedskew.flower.planning import read_app, resolve_config
from fedskew.flower.processes import Process
from fedskew.flower.run_record import RunRecord
from fedskew.flower.supervised_run import read_progress
from fedskew.flower.trial import plan_trial

PATIENCE = 300.0
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00 ")


def until(condition: bool | object, what: str, process: subprocess.Popen[str] | None = None) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, f"waited {PATIENCE:g} s for {what}"
        assert process is None or process.poll() is None, f"it ended before {what}"
        time.sleep(0.2)


def test_the_same_folder_with_other_settings_is_refused(tmp_path: Path) -> None:
    """Otherwise, the result of the old run would pass for that of the new settings."""
    values = {"data": str(small_data(tmp_path)), "method": "fedavg", "rounds": 2, "device": "cpu"}
    config = with_values(Config(), {**values, "partition.clients": 2})
    settings, contract, resolved = read_app(plan_trial(tmp_path / "trial", config, {}).app)
    with RunFolder(settings.folder).open(resolve_config(resolved, contract, settings.sites)):
        RunRecord(Path(settings.folder), settings, contract).begin()
    plan_trial(tmp_path / "trial", config, {})
    with pytest.raises(UserError, match="trial holds a run that differs in lr; expected the command that started it"):
        plan_trial(tmp_path / "trial", with_values(config, {"lr": 0.3}), {})
    with pytest.raises(UserError, match=r"trial/run holds a run with federation\.share_loss = true, not false"):
        plan_trial(tmp_path / "trial", config, {"share_loss": False})


def test_the_data_folder_of_a_trial_may_be_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(variable, str(tmp_path))
    (tmp_path / "datasets").mkdir()
    config = with_values(Config(), {"data": "digits", "data_dir": "~/datasets", "partition.clients": 2})
    trial = plan_trial(tmp_path / "trial", config, {})
    settings, _, _ = read_app(trial.app)
    assert f'"data_dir": "{tmp_path / "datasets"}"' in str(settings.test_data)
    site = yaml.safe_load(trial.site_file(settings.sites[0]).read_text())
    assert site["data_dir"] == str(tmp_path / "datasets")


def test_the_files_of_a_process_are_private_and_its_log_has_times_and_no_colours(tmp_path: Path) -> None:
    log, written = tmp_path / "logs" / "a.log", tmp_path / "superlink.db"
    program = f"open({str(written)!r}, 'w').close(); print('\\x1b[92mINFO \\x1b[0m: one\\ntwo')"
    process = Process("a", [sys.executable, "-c", program], log, {})
    assert process.wait(PATIENCE) == 0
    lines = process.output().splitlines()
    assert [TIME.sub("", line) for line in lines if TIME.match(line)] == ["INFO : one", "two"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in (log.parent, log, written)] == [0o700, 0o600, 0o600]


@pytest.mark.slow
def test_a_killed_trial_leaves_no_process_and_the_same_command_takes_over(tmp_path: Path) -> None:
    folder = tmp_path / "trial"
    command = [sys.executable, "-m", "fedskew", "federate", "up", str(folder), "--data", str(small_data(tmp_path))]
    command += ["--sites", "2", "--method", "fedavg", "--rounds", "2", "--local-epochs", "1"]
    with subprocess.Popen(command, text=True) as killed:
        until((folder / "run" / "rounds.jsonl").exists, "the first row", killed)
        (server_app,) = set(processes("flwr-serverapp")) & set(marked_processes(str(folder)))
        os.kill(server_app, signal.SIGSTOP)  # so that the run is not finished before it is killed
        beside = subprocess.run(command, capture_output=True, text=True, check=False)
        killed.kill()
    assert beside.returncode == 2
    assert f"is being written by another process ({killed.pid} on" in beside.stderr
    until(lambda: not marked_processes(str(folder)), "the end of all processes")

    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    line = r"fedavg: accuracy [\d.]+ % after 2 rounds, all 2 sites in every round; run saved in .*\n"
    assert re.fullmatch(line, again.stdout)
    assert not marked_processes(str(folder))

    other = subprocess.run([*command, "--lr", "0.3"], capture_output=True, text=True, check=False)
    assert (other.returncode, other.stdout) == (2, "")
    assert f"error: {folder} holds a run that differs in lr" in other.stderr

    private = [folder / "superlink.db", folder / "run" / "model.safetensors", *(folder / "logs").iterdir()]
    assert [path.name for path in private if stat.S_IMODE(path.stat().st_mode) & 0o077] == []
    lines = (folder / "logs" / "site-1.log").read_text(encoding="utf-8").splitlines()
    assert lines
    assert [line for line in lines if not TIME.match(line) or "\x1b" in line] == []


@pytest.mark.slow
def test_nothing_is_left_of_a_killed_superlink_or_of_a_killed_site(tmp_path: Path) -> None:
    """Outside a trial, no guardian ends them. A ServerApp that lived on would keep the run's folder locked."""
    real = Real(tmp_path, NAMES[:2])
    with real.local as local:
        local.start()
        run = local.start_run(real.app("app", real.config("fedavg", rounds=50)))
        wait_until(lambda: read_progress(real.run_folder("app")).rounds >= 1, "the first round", local)
        site_file = str(local.site_file("site-1"))
        supernode, worker = processes("fedskew.flower.node", site_file), worker_of(local.site_file("site-1"))
        assert (len(supernode), len(worker)) == (2, 1)
        (server_app,) = set(processes("flwr-serverapp")) & set(marked_processes(str(local.folder)))
        assert local.superlink is not None
        os.kill(local.superlink.pid, signal.SIGKILL)
        wait_until(lambda: not is_running(server_app), "the ServerApp's end", local)
        assert set(processes("fedskew.flower.node", site_file)) == set(supernode)  # it waits for its server

        os.kill(local.nodes["site-1"].pid, signal.SIGKILL)
        local.nodes["site-1"].wait()
        wait_until(lambda: not any(map(is_running, (*supernode, *worker))), "the end of the site", local)
        run.kill()


def is_running(process: int) -> bool:
    """Whether a process runs and is no zombie, which only its parent can remove."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_a_site_ends_with_the_command_that_connected_it(tmp_path: Path) -> None:
    """`kill -9` of `fedskew federate site` ends its SuperNode, too, so that the site can be started again."""
    real = Real(tmp_path, NAMES[:1])
    site = real.local.site_file("site-1")
    app, keys = real.app("app", real.config("fedavg")), real.local.keys.node("site-1").folder
    with real.local as local:
        local.start_superlink()
        local.register()
        command = [sys.executable, "-m", "fedskew", "federate", "site", str(site), "--check", str(app), "--keys"]
        command += [str(keys), "--superlink", f"localhost:{local.port}"]
        log = tmp_path / "site.log"
        with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file) as killed:
            wait_until(lambda: "SuperNode ID" in log.read_text(), "the connection", local)
            supernode = processes("fedskew.flower.node", str(site))
            assert len(supernode) == 2
            killed.kill()
        wait_until(lambda: not any(map(is_running, supernode)), "the SuperNode's end", local)


@pytest.mark.slow
def test_a_trial_goes_on_after_its_serverapp_and_its_superlink_are_killed(tmp_path: Path) -> None:
    folder = tmp_path / "trial"
    command = [sys.executable, "-m", "fedskew", "federate", "up", str(folder), "--data", str(small_data(tmp_path))]
    command += ["--sites", "2", "--method", "fedavg", "--rounds", "6", "--local-epochs", "1"]

    def rounds() -> int:
        return read_progress(folder / "run").rounds

    with subprocess.Popen(command, text=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as trial:
        until(lambda: rounds() >= 1, "the first round", trial)
        (server_app,) = set(processes("flwr-serverapp")) & set(marked_processes(str(folder)))
        os.kill(server_app, signal.SIGKILL)
        until(lambda: rounds() >= 3, "a round of the second ServerApp", trial)
        (superlink,) = processes("fedskew.flower.superlink", str(folder / "superlink.db"))
        os.kill(superlink, signal.SIGKILL)
        output, errors = trial.communicate(timeout=PATIENCE)
    assert trial.returncode == 0, errors
    assert "after 6 rounds, all 2 sites in every round" in output
    assert len(re.findall(r"the run failed .*; restart 1 of 6 resumes after round \d", errors)) == 2
    assert "the SuperLink ended; starting it again" in errors
    assert not marked_processes(str(folder))


@pytest.mark.slow
def test_thirty_sites_take_part_in_every_round(tmp_path: Path) -> None:
    """With Flower's own programs, more than a dozen sites lost messages to a locked database."""
    folder = tmp_path / "trial"
    command = [sys.executable, "-m", "fedskew", "federate", "up", str(folder), "--data", "digits", "--model", "dnn"]
    command += ["--sites", "30", "--method", "fedavg", "--rounds", "2", "--local-epochs", "1"]
    trial = subprocess.run(command, capture_output=True, text=True, check=False)
    assert trial.returncode == 0, trial.stderr
    assert "after 2 rounds, all 30 sites in every round" in trial.stdout
    assert "the SuperLink failed" not in trial.stderr
    assert "database is locked" not in (folder / "logs" / "superlink.log").read_text()
    assert not marked_processes(str(folder))
