"""A site's ledger counts every update before it leaves, and stops the site at its budget."""

from __future__ import annotations

import json
import math
import random
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from in_process import Case, answer_as_workers, case, small_data

from fedskew.cli import main
from fedskew.data import Dirichlet, federation
from fedskew.errors import UserError
from fedskew.experiment.config import Config, with_values
from fedskew.flower.frames import receive_frame, send_frame
from fedskew.flower.policy import COLUMN_SUMS, Policy, read_policy
from fedskew.flower.releases import SITE, Release, read_release
from fedskew.flower.server_app import run_federation
from fedskew.flower.site_ledger import NAME, BudgetExceeded, SiteLedger
from fedskew.flower.site_state import StateUnusable
from fedskew.flower.socket_paths import socket_path
from fedskew.flower.tensors import from_bytes, to_bytes
from fedskew.gaussian_privacy import epsilon, gaussian_epsilon
from fedskew.methods import make_method

LOCAL = {"privacy": "local", "clip": 1.0, "noise": 4.0, "share_loss": False, "attempts": 1}


def local(round: int = 1, noise: float = 4.0, run: str = "a") -> Release:
    return Release(run, round, "local", noise)


def budgeted(place: Path, policies: dict[str, str], rounds: int = 3, seed: int = 0, **own: Any) -> Case:
    """A federation whose sites answer as their workers do, each with its policy in site.yaml."""
    place.mkdir(exist_ok=True)
    data = small_data(place)
    split = federation(str(data), Dirichlet(beta=0.5, clients=3), seed=0)
    values = {"method": "fedavg", "rounds": rounds, "local_epochs": 1, "device": "cpu", "average": "uniform"}
    config = with_values(Config(), {**values, "partition.clients": 3, "seed": seed})
    here = case(place, split, data, config, **{"minimum": 2, **own})
    answer_as_workers(here, data, policies)
    return here


@pytest.mark.parametrize("seed", range(5))
def test_epsilon_over_runs_is_that_of_dp_accounting(seed: int) -> None:
    """Google's accountant composes the same Gaussian mechanisms, each with another noise, as loss distributions."""
    pld = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    draw = random.Random(seed)
    noises = [draw.uniform(8.0, 40.0) for _ in range(draw.randint(2, 12))]
    total = None
    for noise in noises:
        one = pld.from_gaussian_mechanism(noise, sensitivity=2.0, value_discretization_interval=1e-4)
        total = one if total is None else total.compose(one)
    assert total is not None
    mu = math.sqrt(sum((2 / noise) ** 2 for noise in noises))
    assert gaussian_epsilon(mu, 1e-5) == pytest.approx(total.get_epsilon_for_delta(1e-5), rel=2e-3)


def test_the_ledger_adds_up_runs_with_different_noise(tmp_path: Path) -> None:
    ledger = SiteLedger(tmp_path, Policy(delta=1e-6))
    for round in (1, 2, 3):
        ledger.charge(local(round))
    ledger.charge(Release("b", 1, "central", 10.0))
    mu = math.sqrt(3 * (2 / 4) ** 2 + (2 / 10) ** 2)
    spent = SiteLedger(tmp_path, Policy(delta=1e-6)).spent()  # read from disk
    both = dict.fromkeys(("epsilon", "example_epsilon"), gaussian_epsilon(mu, 1e-6))  # it also protects single samples
    assert spent == {**both, "delta": 1e-6, "updates": 4}
    ledger.charge(Release("c", 1, "none", None))
    assert ledger.spent()["epsilon"] is None


def test_a_budget_allows_exactly_what_it_covers(tmp_path: Path) -> None:
    three = epsilon(3, 4.0, 1e-5, sensitivity=2.0)
    ledger = SiteLedger(tmp_path, Policy(epsilon=three * (1 + 1e-9)))
    assert ledger.affordable_rounds(SITE, local(), 10) == 3
    for round in (1, 2, 3):
        ledger.charge(local(round))
    with pytest.raises(BudgetExceeded, match=r"3 updates spent .*, and round 4 would bring it to"):
        ledger.charge(local(4))
    assert ledger.spent()["updates"] == 3
    assert ledger.affordable_rounds(SITE, local(), 10) == 0


def test_each_budget_names_its_own_last_round(tmp_path: Path) -> None:
    """The budget of one sample covers three rounds, and that of the site is large enough for all ten."""
    three = epsilon(3, 4.0, 1e-5, sensitivity=2.0) * (1 + 1e-9)
    of_site, of_sample = SiteLedger(tmp_path, Policy(epsilon=100.0, example_epsilon=three)).describe_plan(local(), 10)
    assert of_site.endswith(f"10 rounds would bring it to {epsilon(10, 4.0, 1e-5, sensitivity=2.0):.3g}")
    assert of_sample.endswith(", so this site will stop after round 3")


def test_rounds_that_the_site_has_trained_are_not_planned_again(tmp_path: Path) -> None:
    """A site that starts again during a run says how much the rest of the run would spend."""
    six = epsilon(6, 4.0, 1e-5, sensitivity=2.0) * (1 + 1e-9)
    ledger = SiteLedger(tmp_path, Policy(epsilon=six))
    for round in (1, 2, 3, 3):  # round 3 was repeated
        ledger.charge(local(round))
    (line,) = ledger.describe_plan(local(), 10)
    whole = f"{epsilon(11, 4.0, 1e-5, sensitivity=2.0):.3g}"
    assert line.endswith(f"; 7 more rounds would bring it to {whole}, so this site will stop after round 5")
    assert ledger.describe_plan(local(), 3)[0].endswith(" is spent; the run has no more rounds")
    assert "; 2 rounds would bring it to " in ledger.describe_plan(Release("other", 0, "local", 4.0), 2)[0]


def test_a_budget_that_covers_no_round_stops_the_site_before_the_first(tmp_path: Path) -> None:
    (line,) = SiteLedger(tmp_path, Policy(epsilon=0.1)).describe_plan(local(), 1)
    spent = f"{epsilon(1, 4.0, 1e-5, sensitivity=2.0):.3g}"
    assert line.endswith(f"; 1 round would bring it to {spent}, so this site will refuse to train")


def test_updates_without_noise_do_not_fit_any_budget(tmp_path: Path) -> None:
    bare = Release("old", 1, "none", None)
    with pytest.raises(BudgetExceeded, match="the update would have no noise"):
        SiteLedger(tmp_path, Policy(epsilon=100.0)).charge(bare)
    assert "will refuse to train" in str(SiteLedger(tmp_path, Policy(epsilon=100.0)).describe_plan(bare, 3))
    assert SiteLedger(tmp_path, Policy()).describe_plan(bare, 3) == []
    SiteLedger(tmp_path, Policy()).charge(bare)
    with pytest.raises(BudgetExceeded, match="1 earlier update had no noise, the last in run old"):
        SiteLedger(tmp_path, Policy(epsilon=100.0)).charge(local())


@pytest.mark.parametrize(
    ("kind", "key"), [("local", "epsilon"), ("local", "example_epsilon"), ("example", "example_epsilon")]
)
def test_noise_that_is_too_small_for_a_finite_epsilon_is_named(kind: str, key: str, tmp_path: Path) -> None:
    ledger, tiny = SiteLedger(tmp_path, Policy(**{key: 100.0})), Release("a", 1, kind, 1e-200)
    with pytest.raises(BudgetExceeded, match="the noise multiplier 1e-200 is too small for a finite ε"):
        ledger.charge(tiny)
    assert "the app's noise is too small" in str(ledger.describe_plan(tiny, 3))


@pytest.mark.parametrize("noise", [[1.0, 0.0], [1.0, -1.0], [0, 1.0], [1.0, math.inf], [math.nan, 1.0], [1.0], 3, "ab"])
def test_noise_that_is_none_is_refused(noise: Any) -> None:
    with pytest.raises(UserError, match="expected two positive numbers"):
        read_release({"run": "a", "key": {"round": 0}, "noise": noise, "local": {}}, make_method("fedavg"))


def test_a_site_stops_at_its_budget_in_the_second_run_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """The budget covers four rounds. The first run takes three of them."""
    four = epsilon(4, 4.0, 1e-5, sensitivity=2.0) * (1 + 1e-9)
    policies = {"site-1": f"policy: {{epsilon: {four!r}}}\n"}
    first = budgeted(tmp_path, policies, **LOCAL)
    assert run_federation(first.grid, first.context).site_rounds == {"site-0": 3, "site-1": 3, "site-2": 3}
    (tmp_path / "run").rename(tmp_path / "first")
    second = budgeted(tmp_path, policies, seed=1, **LOCAL)
    with caplog.at_level("INFO", logger="flwr"):
        result = run_federation(second.grid, second.context)
    assert result.site_rounds == {"site-0": 3, "site-1": 1, "site-2": 3}
    lines = [line for line in caplog.messages if "no update of site-1 is used" in line]
    assert len(lines) == 2
    assert all("(policy.epsilon); 4 updates spent" in line for line in lines)
    assert "would bring it to" in capsys.readouterr().err
    log = [json.loads(line) for line in (tmp_path / "site-1" / "state" / "audit.jsonl").read_text().splitlines()]
    spent = [entry["epsilon"]["epsilon"] for entry in log if "epsilon" in entry]
    assert spent == [epsilon(rounds, 4.0, 1e-5, sensitivity=2.0) for rounds in (1, 2, 3, 4)]


def test_central_noise_counts_on_the_server_s_word_if_the_site_allows_it(tmp_path: Path) -> None:
    two = epsilon(2, 4.0, 1e-5, sensitivity=2.0) * (1 + 1e-9)
    trusting = {"site-1": f"policy: {{epsilon: {two!r}, reveals: [updates]}}\n", "site-2": "policy: {epsilon: 100}\n"}
    here = budgeted(tmp_path, trusting, privacy="central", noise=4.0, share_loss=False, minimum=1)
    result = run_federation(here.grid, here.context)
    assert result.site_rounds == {"site-0": 3, "site-1": 2, "site-2": 0}
    assert "the server adds it after the updates have left" in result.history[1].failed["site-2"]
    without = budgeted(tmp_path / "without", trusting, minimum=1, share_loss=False)
    assert run_federation(without.grid, without.context).site_rounds == {"site-0": 3, "site-1": 0, "site-2": 0}


@pytest.mark.parametrize("policy", ["epsilon: 100", "noise: 1.0"])
def test_a_site_that_demands_noise_reports_nothing_without_noise(policy: str, tmp_path: Path) -> None:
    """A server that is not fedskew's may ask for it. The site answers only what its policy allows by name."""
    policies = {
        "site-1": f"policy: {{{policy}}}\n",
        "site-2": f"metrics: total\npolicy: {{{policy}, reveals: [losses]}}\n",
    }
    here = budgeted(tmp_path, policies, rounds=1, **LOCAL)
    strict, lenient = (here.grid._sites[1000 + client][1] for client in (1, 2))
    replies: list[dict[str, Any]] = []
    test = {"labels": None, "detail": "total", "frozen": [], "model": "global", "round": 0, "notes": {}}

    def ask(site: str, asked: dict[str, Any], facts: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        if (site, asked["kind"]) == ("site-0", "train") and not replies:
            sent = to_bytes({name.replace("trained", "sent"): t for name, t in from_bytes(payload).items()})
            for client, handler in ((1, strict), (2, lenient)):
                replies.append(handler.answer(asked | {"client": client, "share_loss": True}, sent)[0])
                replies.append(handler.answer({"kind": "evaluate", "terms": asked["terms"], **test}, sent)[0])
            replies.append(strict.answer(asked | {"client": 1, "tests": test}, sent)[0]["tests"])
        return facts, payload

    here.grid.meddle = ask
    run_federation(here.grid, here.context)
    assert "demands noise" in replies[0]["refused"]
    assert "training losses have none" in replies[0]["refused"]
    assert all("this site allows metrics: none" in replies[place]["refused"] for place in (1, 4))
    assert "loss" in replies[2]
    assert "right" in replies[3]


@pytest.mark.parametrize("policy", [Policy(epsilon=8.0), Policy(noise=1.0)])
def test_a_site_that_demands_noise_reveals_no_labels_by_default(policy: Policy) -> None:
    counting = with_values(Config(), {"method": "logit-adjustment"})
    with pytest.raises(UserError, match=r"reveals label counts; this site allows nothing \(policy.reveals\)"):
        policy.require_run(counting)
    replace(policy, reveals=("label counts",)).require_run(counting)
    Policy().require_run(counting)
    assert not policy.allows(COLUMN_SUMS)


def test_a_run_has_only_its_minutes_even_after_a_restart(tmp_path: Path) -> None:
    policy = Policy(minutes=2.0)
    SiteLedger(tmp_path, policy).add_time("a", 100.0)
    SiteLedger(tmp_path, policy).require_time("a")
    SiteLedger(tmp_path, policy).add_time("a", 20.0)
    SiteLedger(tmp_path, policy).require_time("b")
    with pytest.raises(UserError, match=r"has worked 2.0 minutes for this run; it allows 2 \(policy.minutes\)"):
        SiteLedger(tmp_path, policy).require_time("a")
    SiteLedger(tmp_path, Policy()).require_time("a")


def test_a_site_whose_time_is_used_up_leaves_the_run_and_the_others_go_on(tmp_path: Path) -> None:
    """The least time is over after the greeting."""
    here = budgeted(tmp_path, {"site-1": "policy: {minutes: 1.0e-9}\n"}, rounds=1)
    result = run_federation(here.grid, here.context)
    assert result.site_rounds == {"site-0": 1, "site-1": 0, "site-2": 1}
    assert "(policy.minutes)" in str(result.history[-1].failed)


def test_a_ledger_that_was_changed_stops_the_site_without_a_word_about_its_files(tmp_path: Path) -> None:
    ledger = SiteLedger(tmp_path, Policy(epsilon=10.0))
    for round in (1, 2, 3):
        ledger.charge(local(round))
    path = tmp_path / NAME
    path.write_text(path.read_text().replace('"noise":4.0', '"noise":400.0', 1))
    with pytest.raises(StateUnusable, match="line 1 was changed"):
        ledger.charge(local(4))
    path.unlink()
    with pytest.raises(StateUnusable):
        ledger.charge(local(4))


KILLED = """
import os, signal, sys
from pathlib import Path
from fedskew.flower import worker

def kill(connection, *reply):
    os.kill(os.getpid(), signal.SIGKILL)

worker.send_frame = kill
worker.main(sys.argv[1], int(sys.argv[2]))
"""


def test_an_update_that_a_killed_worker_could_not_send_is_counted(tmp_path: Path) -> None:
    """A real worker, killed between its ledger and its reply."""
    here = budgeted(tmp_path, {}, rounds=1, **LOCAL)
    asked: list[tuple[dict[str, Any], bytes]] = []
    handler = here.grid._sites[1000][1]
    answer = handler.answer

    def keep(facts: dict[str, Any], payload: bytes) -> Any:
        asked.append((dict(facts), payload))
        return answer(facts, payload)

    handler.answer = keep  # type: ignore[method-assign]
    run_federation(here.grid, here.context)
    site = tmp_path / "site-0" / "site.yaml"
    state = site.parent / "state"
    assert SiteLedger(state, Policy()).spent()["updates"] == 1
    request = next((facts, payload) for facts, payload in asked if facts["kind"] == "train")
    guardian = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    worker = subprocess.Popen([sys.executable, "-c", KILLED, str(site), str(guardian.pid)])
    try:
        place = socket_path(site, guardian.pid)
        with _connect(place, worker) as connection:
            send_frame(connection, {**request[0], "paths": []}, request[1])
            with pytest.raises((EOFError, ConnectionError)):
                receive_frame(connection)
        assert worker.wait(60) == -signal.SIGKILL
    finally:
        for process in (guardian, worker):
            process.kill()
            process.wait()
    assert SiteLedger(state, Policy()).spent()["updates"] == 2


def _connect(place: Path, worker: subprocess.Popen[bytes]) -> Any:
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(place))
        except OSError:
            connection.close()
            assert worker.poll() is None
            time.sleep(0.05)
        else:
            return connection


def test_the_budget_is_in_the_policy_and_the_check_shows_what_a_run_would_spend(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read_policy({"epsilon": 8, "delta": 1e-6, "minutes": 90}) == Policy(epsilon=8.0, delta=1e-6, minutes=90.0)
    with pytest.raises(UserError, match=r"policy\.delta is 1; expected a number between 0 and 1"):
        read_policy({"delta": 1})
    with pytest.raises(UserError, match=r"policy\.epsilon is -1; expected a positive number"):
        read_policy({"epsilon": -1})
    data = str(small_data(tmp_path))
    site, app = tmp_path / "site.yaml", str(tmp_path / "app")
    site.write_text(f"name: north\ndata: {data}\nmetrics: none\npolicy: {{epsilon: 5}}\n")
    federation_settings = ["privacy=local", "noise=4", "share_loss=false", "attempts=1", "site_metrics=none"]
    federation_settings += ["evaluation=server", f"test_data={data}"]
    options = [word for value in federation_settings for word in ("--federation", value)]
    command = ["federate", "init", app, "--sites", "north,south", "--data", data, "--method", "fedavg"]
    assert main([*command, "--rounds", "10", "--set", "average=uniform", *options]) == 0
    capsys.readouterr()
    assert main(["federate", "site", str(site), "--check", app]) == 0
    enough = sum(epsilon(count, 4.0, 1e-5, sensitivity=2.0) <= 5 for count in range(1, 11))
    whole = epsilon(10, 4.0, 1e-5, sensitivity=2.0)
    line = f"ε = 0 of 5 at δ = 1e-05 is spent; 10 rounds would bring it to {whole:.3g}, so this site will stop after"
    assert f"{line} round {enough}" in capsys.readouterr().out
