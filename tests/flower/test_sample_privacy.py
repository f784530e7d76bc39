"""Example-level privacy across machines: noise at the sites, an account of its own, and what people are told."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Case, answer_as_workers, case, small_data
from secure_sites import secure_case

import fedskew as fs
from fedskew.cli import main
from fedskew.data import Dirichlet, Federation, federation
from fedskew.errors import UserError
from fedskew.experiment.config import Config, with_values
from fedskew.export.card_disclosures import describe_disclosures
from fedskew.flower.contract import Contract
from fedskew.flower.planning import resolve_config
from fedskew.flower.policy import Policy
from fedskew.flower.releases import Release, planned_release, read_release, run_epsilon
from fedskew.flower.request_checks import require_covered, require_shared_scaling
from fedskew.flower.run_monitoring import RunMonitor
from fedskew.flower.server_app import run_federation
from fedskew.flower.settings import FederationSettings, require_example_settings
from fedskew.flower.site_ledger import BudgetExceeded, SiteLedger
from fedskew.flower.site_monitoring import SiteMonitor
from fedskew.flower.supernode import Connection
from fedskew.gaussian_privacy import epsilon
from fedskew.methods import make_method

CLIP, NOISE = 0.5, 4.0
PRIVATE = {"privacy": "example", "share_loss": False, "attempts": 1}


def example(round: int = 1, run: str = "a", releases: int = 2) -> Release:
    return Release(run, round, "example", NOISE, releases)


def split(folder: Path) -> tuple[Federation, Path]:
    folder.mkdir(exist_ok=True)
    data = small_data(folder)
    return federation(str(data), Dirichlet(beta=0.5, clients=3), seed=0), data


def config(rounds: int = 3, **changed: Any) -> Config:
    values = {"method": "fedavg", "rounds": rounds, "local_epochs": 2, "device": "cpu", "batch_size": 20}
    private = {"example_clip": CLIP, "example_noise": NOISE}
    return with_values(Config(), {**values, **private, "partition.clients": 3, "partition.beta": 0.5, **changed})


def private_case(folder: Path, policies: dict[str, str] | None = None, changed: Any = None, **own: Any) -> Case:
    """Sites that answer as their workers do, each with its policy."""
    held, data = split(folder)
    here = case(folder, held, data, config(**(changed or {})), **{**PRIVATE, "minimum": 2, **own})
    answer_as_workers(here, data, policies)
    return here


def one_sample(rounds: int, noise: float = NOISE) -> float:
    """The ε of so many rounds of two epochs each."""
    return epsilon(2 * rounds, noise, 1e-5, sensitivity=2.0)


def test_sites_train_as_the_simulation_does_but_with_secret_noise(tmp_path: Path) -> None:
    held, data = split(tmp_path)

    def distance(clip: float, noise: float) -> float:
        private = {"example_clip": clip, "example_noise": noise}
        here = case(tmp_path / str(noise), held, data, config(rounds=1, **private), **PRIVATE)
        at_sites = run_federation(here.grid, here.context).model.state_dict()
        usual = {"rounds": 1, "local_epochs": 2, "batch_size": 20, "device": "cpu", "engine": "plain"}
        simulated = fs.run(held, "fedavg", **usual, **private).model.state_dict()
        return float(torch.cat([(at_sites[name] - simulated[name]).flatten() for name in at_sites]).norm())

    assert distance(1e3, 1e-12) < 1e-4
    assert distance(CLIP, NOISE) > 0.1  # nobody can compute the noise from the run's seed


def test_the_ledger_has_every_epoch_before_the_update_leaves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """The budget of site-1 covers two rounds. In the third, it refuses, and the others go on."""
    budget = one_sample(2) * (1 + 1e-9)
    here = private_case(tmp_path, {"site-1": f"policy: {{example_epsilon: {budget!r}}}\n"})
    with caplog.at_level("INFO", logger="flwr"):
        result = run_federation(here.grid, here.context)
    assert result.site_rounds == {"site-0": 3, "site-1": 2, "site-2": 3}
    assert "this site's budget of one sample is" in result.history[3].failed["site-1"]
    assert "(policy.example_epsilon); 2 updates spent" in result.history[3].failed["site-1"]
    assert [row.privacy for row in result.history[1:]] == [
        {"kind": "example", "epsilon": one_sample(rounds), "delta": 1e-5} for rounds in (1, 2, 3)
    ]
    assert f"example privacy of one sample of a site so far: ε = {one_sample(1):.3g} at δ = 1e-05" in caplog.text
    state = tmp_path / "site-1" / "state"
    lines = [json.loads(line) for line in (state / "ledger.jsonl").read_text().splitlines()]
    entries = [{key: line[key] for key in ("event", "privacy", "noise", "releases")} for line in lines]
    assert entries == 2 * [{"event": "update", "privacy": "example", "noise": NOISE, "releases": 2}]
    spent = {"epsilon": None, "example_epsilon": one_sample(2), "delta": 1e-5, "updates": 2}
    assert SiteLedger(state, Policy()).spent() == spent
    site = {m.name: m.value for m in SiteMonitor(state.parent / "site.yaml", Connection()).metrics()}
    assert (site["fedskew_privacy_epsilon"], site["fedskew_privacy_example_epsilon"]) == (math.inf, one_sample(2))
    run = {metric.name: metric.value for metric in RunMonitor(tmp_path / "run").metrics()}
    assert "fedskew_privacy_epsilon" not in run
    assert run["fedskew_privacy_example_epsilon"] == one_sample(3)
    capsys.readouterr()
    assert main(["federate", "audit", "show", str(state / "audit.jsonl")]) == 0
    assert f"ε {one_sample(2):.3g} at δ 1e-05 for one sample, unbounded for the site" in capsys.readouterr().out
    assert main(["federate", "status", str(tmp_path / "run")]) == 0
    shown = f"example privacy so far: ε = {one_sample(3):.3g} at δ = 1e-05 for one sample of a site that took part in"
    assert shown in capsys.readouterr().out
    card = " ".join(describe_disclosures(fs.load_run(tmp_path / "run")).split())
    assert f"ε = {one_sample(3):.3g} at δ = 1e-05 for one sample of a site" in card
    assert "a whole site has no finite one" in card
    assert "protects nobody" not in card


def test_the_card_of_a_simulation_says_that_its_noise_is_no_secret(tmp_path: Path) -> None:
    held, _ = split(tmp_path)
    result = fs.run(held, "fedavg", rounds=1, local_epochs=1, example_clip=1.0, example_noise=2.0, device="cpu")
    assert "The noise of this simulation follows from its seed, so it protects nobody" in describe_disclosures(result)


def test_the_two_accounts_are_kept_apart(tmp_path: Path) -> None:
    """Noise on single samples gives the site no finite ε. Noise on the whole update also protects single samples."""
    site_level, sample_level = Policy(epsilon=100.0), Policy(example_epsilon=100.0)
    with pytest.raises(BudgetExceeded, match=r"no finite ε; expected federation.privacy = 'local'"):
        SiteLedger(tmp_path, site_level).charge(example())
    local = Release("a", 1, "local", 10.0)
    SiteLedger(tmp_path, site_level).charge(local)
    SiteLedger(tmp_path, sample_level).charge(example(2))
    spent = SiteLedger(tmp_path, Policy()).spent()
    mu = math.sqrt((2 / 10) ** 2 + 2 * (2 / NOISE) ** 2)
    assert spent["epsilon"] is None
    assert spent["example_epsilon"] == pytest.approx(epsilon(1, 1 / mu, 1e-5))
    with pytest.raises(BudgetExceeded, match="1 earlier update had no noise that keeps this ε finite, "):
        SiteLedger(tmp_path, site_level).charge(local)
    SiteLedger(tmp_path, sample_level).charge(local)
    with pytest.raises(BudgetExceeded, match=r"have no noise; expected federation.privacy = 'example'"):
        SiteLedger(tmp_path, sample_level).charge(Release("a", 3, "none", None))
    both = SiteLedger(tmp_path / "both", Policy(epsilon=100.0, example_epsilon=one_sample(1)))
    assert "single samples, so this site will refuse to train" in both.describe_plan(example(), 3)[0]
    assert "so this site will stop after round" in both.describe_plan(Release("", 0, "local", 1.0), 30)[0]


def test_a_line_of_an_earlier_version_counts_once(tmp_path: Path) -> None:
    ledger = SiteLedger(tmp_path, Policy())
    ledger._log.append({"event": "update", "run": "old", "round": 1, "privacy": "local", "noise": 4.0})
    assert ledger.spent()["epsilon"] == epsilon(1, 4.0, 1e-5, sensitivity=2.0)


def test_a_server_cannot_change_the_noise_or_the_method_of_a_round(tmp_path: Path) -> None:
    """A dishonest server skips its own checks. Nothing leaves the site, so nothing is added to its ledger."""
    here = private_case(tmp_path, changed={"rounds": 1})
    handler, asked = here.grid._sites[1000][1], []
    answer = handler.answer

    def keep(facts: dict[str, Any], payload: bytes) -> Any:
        asked.append((dict(facts), payload))
        return answer(facts, payload)

    handler.answer = keep  # type: ignore[method-assign]
    run_federation(here.grid, here.context)
    facts, payload = next((facts, payload) for facts, payload in asked if facts["kind"] == "train")
    before = SiteLedger(tmp_path / "site-0" / "state", Policy()).spent()
    assert before["updates"] == 1
    for changed, reason in (
        ({"example_noise": 0.1}, "the server sets example_noise to 0.1 in this round; expected 4.0"),
        ({"example_clip": None, "example_noise": None}, "the server sets example_clip to None in this round"),
        ({"batches": "balanced"}, "the server sets batches to 'balanced' in this round; expected 'shuffled'"),
        ({"epochs": 0.5}, "the server sets epochs to 0.5 in this round; expected 2"),
    ):
        assert reason in answer({**facts, "local": facts["local"] | changed}, payload)[0]["refused"]
    other = {**facts["terms"], "config": facts["terms"]["config"] | {"method": {"name": "fedlc"}}}
    refused = answer({**facts, "terms": other}, payload)[0]["refused"]
    assert "method 'fedlc' makes the loss depend on label counts" in refused
    assert SiteLedger(tmp_path / "site-0" / "state", Policy()).spent() == before


def test_more_epochs_than_planned_are_counted() -> None:
    facts = {"run": "a", "key": {"round": 0}, "noise": None}
    local = {"example_clip": 1.0, "example_noise": 2.0, "epochs": 7}
    assert read_release({**facts, "local": local}, make_method("fedsam")) == Release("a", 1, "example", 2.0, 14)
    for wrong in ({"example_noise": 0.0}, {"example_noise": math.inf}, {"example_clip": None}):
        with pytest.raises(UserError, match="expected two positive numbers"):
            read_release({**facts, "local": local | wrong}, make_method("fedavg"))


def test_settings_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    silent = {"evaluation": "server", "site_metrics": "none", "test_data": "digits", "share_loss": False, "attempts": 1}
    settings = FederationSettings(sites=("a", "b"), privacy="example", **silent)
    with pytest.raises(UserError, match="'example' without example_clip and example_noise"):
        require_example_settings(settings, Config())
    with pytest.raises(UserError, match=r"example_noise is set, but federation.privacy is 'none'"):
        require_example_settings(FederationSettings(sites=("a", "b")), config())
    for changed in ({"share_loss": True}, {"site_metrics": "total"}, {"attempts": 2}):
        with pytest.raises(UserError, match=r"federation.privacy is 'example', but losses .*; expected [^,]*$"):
            FederationSettings(sites=("a", "b"), **{**silent, "privacy": "example", **changed})
    held, _ = split(tmp_path)
    with pytest.raises(UserError, match="method 'fedvls' makes the loss depend on label counts"):
        resolve_config(config(method="fedvls"), Contract.from_dataset(held.dataset), ("a", "b"))
    assert run_epsilon(settings, config(), 3) == one_sample(3)
    assert planned_release(settings, config()) == Release("", 0, "example", NOISE, 2)
    for method, reason in (("fedvls", "makes the loss depend on label counts"), ("fedsol+fedper", "one more gradient")):
        with pytest.raises(UserError, match=reason):  # `federate site --check` asks for the planned release
            planned_release(settings, config(method=method))


def test_a_site_that_demands_noise_accepts_noise_on_samples_only_if_its_budget_is_of_samples(tmp_path: Path) -> None:
    policies = {
        "site-0": "policy: {example_epsilon: 1000}\n",
        "site-1": "policy: {epsilon: 1000}\n",
        "site-2": "policy: {noise: 0.1}\n",
    }
    here = private_case(tmp_path, policies, {"rounds": 1}, minimum=1)
    result = run_federation(here.grid, here.context)
    assert result.site_rounds == {"site-0": 1, "site-1": 0, "site-2": 0}
    assert "or policy.example_epsilon in place of policy.epsilon" in result.history[1].failed["site-1"]
    assert "expected federation.privacy = 'local'" in result.history[1].failed["site-2"]


def test_it_combines_with_secure_aggregation(tmp_path: Path) -> None:
    held, data = split(tmp_path)
    here = secure_case(tmp_path, held, data, config(rounds=1), **PRIVATE)
    result = run_federation(here.grid, here.context)
    assert result.privacy == {"kind": "example", "epsilon": one_sample(1), "delta": 1e-5}
    assert SiteLedger(tmp_path / "site-0" / "state", Policy()).spent()["example_epsilon"] == one_sample(1)


@pytest.mark.parametrize("kind", ["local", "example"])
@pytest.mark.parametrize("noise", [1e-200, 1e-320, sys.float_info.max])
def test_any_noise_has_an_epsilon(tmp_path: Path, kind: str, noise: float) -> None:
    """A site without a budget accepts any noise. Its ledger must stay readable."""
    ledger = SiteLedger(tmp_path, Policy())
    ledger.charge(Release("a", 1, kind, noise, 3))
    assert ledger.spent()["example_epsilon"] == (None if noise < 1 else 0.0)


def test_two_kinds_of_noise_are_refused() -> None:
    """The ledger would count only one of them, and the server could choose which."""
    local = {"example_clip": 1.0, "example_noise": 2.0, "epochs": 1}
    facts = {"run": "a", "key": {"round": 0}, "local": local, "noise": None, "central_noise": [1.0, 1e9]}
    with pytest.raises(UserError, match="the server sets central and example noise; expected one kind"):
        read_release(facts, make_method("fedavg"))


def test_a_state_is_kept_only_after_its_update_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later updates depend on the state. If the site fails before it counts the update, the state must not exist."""
    here = private_case(tmp_path, changed={"rounds": 1, "method": "scaffold"}, minimum=1)
    charge = SiteLedger.charge

    def fail_once(ledger: SiteLedger, release: Release) -> None:
        monkeypatch.setattr(SiteLedger, "charge", charge)
        raise OSError("the disk is gone")

    monkeypatch.setattr(SiteLedger, "charge", fail_once)
    result = run_federation(here.grid, here.context)
    assert list(result.history[1].failed) == ["site-0"]
    kept = {site: list((tmp_path / site / "state").rglob("*.safetensors")) for site in here.names}
    assert [len(kept[site]) for site in here.names] == [0, 1, 1]


def test_a_site_sends_no_loss_and_needs_the_scaling_of_the_contract(tmp_path: Path) -> None:
    """Means of the site's own data depend on every sample. An extreme one would change all others by rounding."""
    held, _ = split(tmp_path)
    facts = {"share_loss": True}
    method = make_method("fedavg")
    with pytest.raises(UserError, match="training losses have no noise"):
        require_covered(facts, example(), method, config(), {}, Policy(reveals=("losses",)))
    require_covered({"share_loss": False}, example(), method, config(), {}, Policy())
    contract = Contract.from_dataset(held.dataset)
    require_shared_scaling(held.dataset.scaling, contract)
    with pytest.raises(UserError, match="scaled with the site's own means"):
        require_shared_scaling(((0.5, 2.0),), contract)
