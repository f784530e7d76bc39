"""A site refuses what its policy does not allow, and the other sites go on."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from in_process import case, small_data

from fedskew.cli import main
from fedskew.data import Dirichlet, federation
from fedskew.errors import UserError
from fedskew.experiment.config import Config, with_values
from fedskew.flower.policy import Policy, policy_warnings, read_policy
from fedskew.flower.server_app import run_federation
from fedskew.flower.site_config import load_site
from fedskew.methods import METHODS


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (Policy(methods=("fedavg",), reveals=(), rounds=2), None),
        (Policy(methods=("fedprox", "fedvls")), "does not allow the method 'fedavg' (policy.methods: fedprox, fedvls)"),
        (Policy(rounds=1), "the run has 2 rounds; this site allows at most 1 (policy.rounds)"),
        (Policy(noise=1.0), "this site demands local noise (policy.noise); expected federation.privacy = 'local'"),
    ],
)
def test_a_run_that_a_site_does_not_allow_goes_on_without_it(
    policy: Policy, reason: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = small_data(tmp_path)
    split = federation(str(data), Dirichlet(beta=0.5, clients=3), seed=0)
    config = with_values(
        Config(), {"method": "fedavg", "partition.clients": 3, "rounds": 2, "local_epochs": 1, "device": "cpu"}
    )
    made = case(tmp_path, split, data, config, minimum=2)
    (careful,) = (site for name, site in made.grid._sites.values() if name == "site-1")
    careful.config = replace(careful.config, policy=policy)
    with caplog.at_level("INFO", logger="flwr"):
        result = run_federation(made.grid, made.context)
    assert reason is None or reason in caplog.text
    assert result.site_rounds == {"site-0": 2, "site-1": 2 if reason is None else 0, "site-2": 2}


def _config(method: str) -> Config:
    return with_values(Config(), {"method": method})


def test_what_class_weights_reveal_is_limited() -> None:
    config = with_values(Config(), {"method": "fedavg", "class_weights": "counts"})
    Policy(reveals=("label counts",)).require_run(config)
    Policy(reveals=()).require_run(replace(config, class_weights="balanced"))
    with pytest.raises(UserError, match=r"fedavg\+class_weights=counts reveals label counts; this site allows nothing"):
        Policy(reveals=()).require_run(config)


def test_what_a_method_reveals_is_limited() -> None:
    Policy(reveals=()).require_run(_config("fedvls"))
    Policy(reveals=("label counts",)).require_run(_config("pkd"))
    with pytest.raises(UserError, match=r"pkd reveals label counts; this site allows nothing \(policy.reveals\)"):
        Policy(reveals=()).require_run(_config("pkd"))
    with pytest.raises(UserError, match=r"this site allows label presence \(policy.reveals\)"):
        Policy(reveals=("label presence",)).require_run(_config("pkd"))


@pytest.mark.parametrize(
    ("hours", "allowed"), [((20, 6), {20, 23, 0, 1, 5}), ((8, 18), {8, 17}), ((0, 1), {0}), (None, set(range(24)))]
)
def test_a_site_works_at_its_hours(hours: tuple[int, int] | None, allowed: set[int]) -> None:
    for hour in (0, 1, 5, 6, 7, 8, 17, 18, 19, 20, 23):
        now = datetime(2026, 1, 1, hour, 59)
        if hour in allowed:
            Policy(hours=hours).require_request({"kind": "hello"}, now)
        else:
            with pytest.raises(UserError, match="o'clock only"):
                Policy(hours=hours).require_request({"kind": "hello"}, now)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"noise": [1.0, 1.5]}, None),
        ({"noise": [1.0, 0.5]}, "the noise multiplier is 0.5; this site needs at least 1 (policy.noise)"),
        ({"noise": [3.0, 1.5]}, "updates are clipped at 3; this site allows at most 2 (policy.clip)"),
        (
            {"noise": [1.0, 1.5], "key": {"round": 10}},
            "round 11 is requested; this site allows at most 10 rounds (policy.rounds)",
        ),
    ],
)
def test_every_request_is_checked(facts: dict[str, Any], reason: str | None) -> None:
    policy, now = Policy(noise=1.0, clip=2.0, rounds=10), datetime(2026, 1, 1)
    request = {"kind": "train", "key": {"round": 0}, **facts}
    if reason is None:
        policy.require_request(request, now)
    else:
        with pytest.raises(UserError, match=re.escape(reason)):
            policy.require_request(request, now)


@pytest.mark.parametrize(
    ("policy", "kinds"),
    [
        (Policy(example_epsilon=8.0), "'example' or 'local'"),
        (Policy(epsilon=8.0), "'local'"),
        (Policy(epsilon=8.0, example_epsilon=8.0), "'local'"),
        (Policy(example_epsilon=8.0, noise=1.0), "'local'"),
    ],
)
def test_the_refusal_of_central_noise_names_every_kind_that_the_site_accepts(policy: Policy, kinds: str) -> None:
    with pytest.raises(UserError, match=rf"expected federation\.privacy = {kinds}, or policy\.reveals: \[updates\]"):
        policy.refuse_items_without_noise("central", share_loss=False)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"method": []}, "unknown policy 'method'"),
        ({"methods": "fedavg"}, "policy.methods is 'fedavg'; expected a list of names"),
        ({"rounds": 0}, "policy.rounds is 0; expected a positive whole number"),
        ({"noise": True}, "policy.noise is True; expected a positive number"),
        ({"survey": {"epsilon": float("inf")}}, "policy.survey.epsilon is inf; expected a positive number"),
        ({"minutes": 10**400}, "policy.minutes is 10{400}; expected a positive number"),
        ({"clip": 2}, "policy.clip is 2 without policy.noise; expected both, because clip limits only updates"),
        ({"clip": 2.0, "epsilon": 8}, "policy.clip is 2.0 without policy.noise; expected both"),
        ({"hours": "20-25"}, "policy.hours is '20-25'; expected two different hours"),
        ({"hours": 7}, "policy.hours is 7; expected two different hours"),
        ([], r"policy is \[\]; expected keys"),
    ],
)
def test_mistakes_in_a_policy_are_named(values: Any, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        read_policy(values)


@pytest.mark.parametrize(
    ("values", "warning"),
    [
        ({"reveals": ["column_sums"]}, "policy.reveals lists 'column_sums', .*; did you mean 'column sums'"),
        ({"reveals": ["label count"]}, "policy.reveals lists 'label count', .*; did you mean 'label counts'"),
        ({"reveals": ["xyz"]}, "policy.reveals lists 'xyz', .*; known: all labels, column sums, feature cov"),
        ({"methods": ["fedavgg"]}, "policy.methods lists 'fedavgg', .*; did you mean 'fedavg'"),
        ({"methods": ["feded"]}, "policy.methods lists 'feded', .*; did you mean 'fedvls'"),  # an alias
        ({"methods": ["FedProx"]}, "did you mean 'fedprox'"),
        ({"methods": ["fedprox:mu=1"]}, "did you mean 'fedprox'"),
        ({"methods": ["fedlmd+fedprox"]}, "policy.methods lists 'fedlmd.fedprox', .*; list the parts .* one by one"),
    ],
)
def test_a_word_that_is_not_known_gets_a_warning(values: dict[str, list[str]], warning: str) -> None:
    (found,) = policy_warnings(read_policy(values))
    assert re.search(warning, found), found


def test_every_method_and_every_word_of_a_method_may_be_in_a_policy() -> None:
    words = [word for entry in METHODS.values() for word in entry.reveals.split(", ")]
    items = ["column sums", "local tests", "losses", "updates"]
    values = {"methods": [*METHODS, "hospital.methods:Mine", "federation_app.mine:mine"], "reveals": [*words, *items]}
    assert policy_warnings(read_policy(values)) == policy_warnings(Policy()) == []


def test_the_check_of_a_site_warns_about_a_misspelt_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_data(tmp_path)
    site = tmp_path / "site.yaml"
    site.write_text("name: north\ndata: digits.npz\npolicy: {reveals: [column_sums]}\n")
    assert main(["federate", "site", str(site)]) == 0
    assert "warning: policy.reveals lists 'column_sums', which nothing in this version rev" in capsys.readouterr().err


def test_the_policy_is_in_site_yaml_and_the_check_names_what_it_forbids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_data(tmp_path)
    site = tmp_path / "site.yaml"
    site.write_text("name: north\ndata: digits.npz\npolicy: {methods: [fedavg], reveals: [], noise: 1, hours: 20-6}\n")
    assert load_site(site).policy == Policy(methods=("fedavg",), reveals=(), noise=1.0, hours=(20, 6))
    app, data = str(tmp_path / "app"), str(tmp_path / "digits.npz")
    assert main(["federate", "init", app, "--sites", "north,south", "--data", data, "--method", "fedvls"]) == 0
    assert main(["federate", "site", str(site), "--check", app]) == 2
    assert "error: this site does not allow the method 'fedvls' (policy.methods: fedavg)" in capsys.readouterr().err
