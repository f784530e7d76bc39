"""Whatever the method: sites that are asked by messages come to the model that the simulation comes to."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from in_process import case, small_data
from method_cases import by_kind, slow
from toy_runs import finished

from fedskew.data import Dirichlet, Federation, federation, load
from fedskew.errors import UserError
from fedskew.experiment.config import Config, with_values
from fedskew.experiment.preparation import prepare
from fedskew.experiment.result import Result
from fedskew.experiment.round.server import Server
from fedskew.experiment.run import run_prepared
from fedskew.flower.app_folder import write_app
from fedskew.flower.contract import Contract
from fedskew.flower.server_app import run_federation
from fedskew.flower.site_replies import Failure, Reply
from fedskew.flower.sites import Sites
from fedskew.flower.tensors import from_bytes
from fedskew.methods import METHODS, Personal, make_method
from fedskew.methods.personal import personal_names

SIMULATED = ("centralised", "local-only", "fedlaw")
"""Methods that need samples in one place."""
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def split(data: Path) -> Federation:
    return federation(str(data), Dirichlet(beta=0.3, clients=3), seed=0)


def settings(method: str, **changed: object) -> Config:
    values = {"method": method, "rounds": 2, "local_epochs": 1, "engine": "plain", "device": "cpu", **changed}
    return with_values(Config(), {"partition.clients": 3, "batch_size": 20, **values})


def assert_same_model(some: Result, other: Result) -> None:
    tensors, others = some.model.state_dict(), other.model.state_dict()
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, others[name], rtol=0, atol=TOLERANCE)


TESTED_BY_SITES: dict[str, object] = {"evaluation": "sites", "site_metrics": "class", "test_data": None}


@pytest.mark.parametrize("method", by_kind(name for name in METHODS if name not in SIMULATED))
def test_sites_come_to_the_simulated_model(method: str, data: Path, split: Federation, tmp_path: Path) -> None:
    config = settings(method, **({"model": "resnet8"} if method == "fedbn" else {}))
    personal = make_method(method).personal
    tests = {} if personal is None or personal.has_global_model else TESTED_BY_SITES
    here = case(tmp_path, split, data, config, **tests)
    apart = run_federation(here.grid, here.context)
    together = run_prepared(prepare(config, split))
    assert_same_model(apart, together)
    assert (apart.evaluation.confusion == together.evaluation.confusion).all()
    assert apart.evaluation.log_loss == pytest.approx(together.evaluation.log_loss, rel=1e-12)
    assert [row.loss for row in apart.history] == [row.loss for row in together.history]


@pytest.mark.parametrize(
    "changed",
    [
        {"augment": ["flip"]},
        {"clients_per_round": 2},
        {"model": "resnet8"},
        {"optimizer": "adam", "lr": 0.003},
        {"class_weights": "balanced"},
        {"class_weights": "counts", "clients_per_round": 2},
        {"class_weights": {str(c): 1.0 + c for c in range(10)}, "batches": "balanced"},
    ],
)
def test_so_do_runs_with_other_settings(
    changed: dict[str, object], data: Path, split: Federation, tmp_path: Path
) -> None:
    config = settings("fedvls", **changed)
    here = case(tmp_path, split, data, config)
    assert_same_model(run_federation(here.grid, here.context), run_prepared(prepare(config, split)))


def test_the_sites_get_the_weights_that_the_server_starts_from(data: Path, split: Federation, tmp_path: Path) -> None:
    first = run_prepared(prepare(settings("fedavg", seed=7), split), tmp_path / "first")
    config = settings("fedavg", init=str(tmp_path / "first" / "model.safetensors"))
    here = case(tmp_path, split, data, config)
    apart = run_federation(here.grid, here.context)
    assert apart.history[0].evaluation == first.evaluation
    assert_same_model(apart, run_prepared(prepare(config, split)))


@pytest.mark.parametrize("changed", [{}, {"clients_per_round": 2, "rounds": 4, "eval_every": 2}])
@pytest.mark.parametrize("method", ["fedper+scaffold", "fedbn"])
def test_personal_tensors_stay_at_their_sites(
    method: str, changed: dict[str, object], data: Path, split: Federation, tmp_path: Path
) -> None:
    config = settings(method, model="resnet8" if method == "fedbn" else "cnn", **changed)
    here = case(tmp_path, split, data, config, **TESTED_BY_SITES)
    apart = run_federation(here.grid, here.context)
    together = run_prepared(prepare(config, split))
    assert_same_model(apart, together)
    for some, other in zip(apart.history[1:], together.history[1:], strict=True):
        assert some.bytes == other.bytes
        if some.evaluation is not None:  # every site of this trial tests its own model on the whole test set
            assert some.accuracy == other.accuracy
    kept = personal_names(make_method(method).personal or Personal(), apart.model)
    assert kept
    travelled = [name for message in here.grid.sent if message.payload for name in from_bytes(message.payload)]
    assert travelled
    assert not [name for name in travelled if name.rpartition("/")[2] in kept]


@pytest.mark.parametrize(("method", "detail"), [("ditto", "class"), ("ditto", "total"), ("fedrod", "total")])
def test_sites_test_their_own_model_beside_the_global_one(
    method: str, detail: str, data: Path, split: Federation, tmp_path: Path
) -> None:
    config = settings(method, rounds=3, clients_per_round=2)
    here = case(tmp_path, split, data, config, **TESTED_BY_SITES | {"site_metrics": detail, "local_tests": True})
    apart = run_federation(here.grid, here.context)
    prepared = prepare(config, split)
    server = Server(split, prepared.method, prepared.model, prepared.config)
    state, rows = finished(server)
    assert server.personal is not None
    models = server.evaluation.personal_tests(server.personal).models(server._base_runtime, state, state.model)
    expected = [server._base_runtime.test_set.evaluate(models(client)).accuracy for client in range(3)]
    found = apart.history[-1].client_tests
    assert found is not None
    assert found["personal"] == expected
    assert len(set(expected)) > 1
    assert apart.accuracy == rows[-1].accuracy


def test_privacy_covers_a_model_whose_statistics_stay(data: Path, split: Federation, tmp_path: Path) -> None:
    private = {**TESTED_BY_SITES, "privacy": "central", "noise": 0.1, "clip": 1.0, "share_loss": False}
    for method, message in (("fedavg", "is averaged without a bound"), ("fedbn", "")):
        config = settings(method, model="resnet8", average="uniform", rounds=1)
        here = case(tmp_path / method, split, data, config, **private)
        if message:
            with pytest.raises(UserError, match=message):
                run_federation(here.grid, here.context)
        else:
            run = run_federation(here.grid, here.context)
            assert run.history[-1].privacy is not None


def test_a_server_cannot_test_a_method_without_a_global_model(data: Path, split: Federation, tmp_path: Path) -> None:
    here = case(tmp_path, split, data, settings("fedper"))
    refusal = "no global model that the server could test; expected 'sites'"
    with pytest.raises(UserError, match=refusal):
        run_federation(here.grid, here.context)
    with pytest.raises(UserError, match=refusal):
        write_app(tmp_path / "app", here.settings, Contract.from_dataset(split.dataset), here.config)
    assert not (tmp_path / "app").exists()


@pytest.mark.parametrize("method", SIMULATED)
def test_what_runs_on_one_machine_is_refused_with_the_reason(
    method: str, data: Path, split: Federation, tmp_path: Path
) -> None:
    reason = "pools all samples|has no common model|needs samples at the server, which only a simulation has"
    with pytest.raises(UserError, match=f"method '{method}' ({reason})"):
        case(tmp_path, split, data, settings(method))


@pytest.mark.parametrize(("setting", "value"), [("server_data", 0.2), ("client_test", 0.2), ("eval_local", True)])
def test_settings_of_simulations_are_refused(
    setting: str, value: float, data: Path, split: Federation, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"{setting} is for simulations"):
        case(tmp_path, split, data, settings("fedavg", **{setting: value}))


@pytest.mark.parametrize("changed", [{}, {"clients_per_round": 2}, {"eval_every": 2}, {"method": "fedconcat"}])
def test_sites_tests_add_up(changed: dict[str, object], data: Path, split: Federation, tmp_path: Path) -> None:
    config = settings(**{"method": "scaffold", "rounds": 3, **changed})  # type: ignore[arg-type]
    here = case(tmp_path, split, data, config, evaluation="sites", site_metrics="class", test_data=None)
    apart = run_federation(here.grid, here.context)
    together = run_prepared(prepare(config, split))
    # Every site of this trial tests on the whole test set: the simulation's accuracies, of three times its counts.
    for some, other in zip(apart.history, together.history, strict=True):
        assert (some.evaluation is None) == (other.evaluation is None)
        assert some.evaluation is None or some.accuracy == other.accuracy
    assert (apart.evaluation.confusion == 3 * together.evaluation.confusion).all()
    assert apart.evaluation.log_loss == pytest.approx(together.evaluation.log_loss, rel=1e-5)
    assert abs(apart.auroc - together.auroc) <= apart.scores.auroc_error + 1e-6
    assert 0 < apart.scores.auroc_error < 0.02
    assert apart.scores.brier == pytest.approx(together.scores.brier, rel=1e-5)
    assert apart.scores.calibration_error == pytest.approx(together.scores.calibration_error, abs=1e-5)
    assert apart.history[-1].sites.keys() == set(here.names)
    for name, score in apart.site_scores.items():
        assert score.accuracy == pytest.approx(apart.history[-1].sites[name]["accuracy"])
        assert score.samples == len(split.dataset.test)
        assert abs(score.auroc - together.auroc) <= apart.scores.auroc_error + 1e-6
    assert apart.site_scores.keys() == set(here.names)
    assert_same_model(apart, together)


def test_training_and_tests_are_one_message(data: Path, split: Federation, tmp_path: Path) -> None:
    config = settings("fedavg", rounds=4)
    here = case(tmp_path, split, data, config, evaluation="sites", site_metrics="class", test_data=None)
    run_federation(here.grid, here.context)
    kinds = [message.kind for message in here.grid.sent if message.site == "site-0"]
    assert kinds == ["hello", "evaluate", "train", "train", "train", "train", "evaluate", "evaluate"], (
        "the last model is tested by itself, and then scored"
    )


def test_the_updates_of_a_round_are_freed_before_those_of_the_next_one_come(
    data: Path, split: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, seen, held = Sites.request, [], []

    def watched(sites: Sites, kind: str, *request: Any, **options: Any) -> Mapping[int, Reply | Failure]:
        if kind == "train":
            held.append(sum(reply() is not None for reply in seen))
        answers = send(sites, kind, *request, **options)
        seen.extend(weakref.ref(answer) for answer in answers.values() if kind == "train")
        return answers

    monkeypatch.setattr(Sites, "request", watched)
    here = case(tmp_path, split, data, settings("fedavg", rounds=4), site_metrics="total")
    run_federation(here.grid, here.context)
    assert held == [0, 0, 0, 0]
    assert len(seen) == 12


def test_a_run_that_was_stopped_goes_on_with_the_sites_states(data: Path, split: Federation, tmp_path: Path) -> None:
    config = settings("scaffold", rounds=4)

    class Killed(Exception):
        pass

    def die(site: str, asked: dict, facts: dict, answer: bytes) -> tuple[dict, bytes]:
        if asked["kind"] == "train" and asked["key"]["round"] == 2 and site == "site-2":
            raise Killed
        return facts, answer

    first = case(tmp_path, split, data, config, die)
    with pytest.raises(Killed):  # two sites have their states of round 3 already, the server has not heard of them
        run_federation(first.grid, first.context)
    again = case(tmp_path, split, data, config)
    resumed = run_federation(again.grid, again.context)
    assert {message.facts["round"] for message in again.grid.sent if message.kind == "train"} == {2, 3}
    assert_same_model(resumed, run_prepared(prepare(config, split)))


@pytest.mark.parametrize("tests", [{}, TESTED_BY_SITES])  # round 3 is requested alone, or with the tests of round 2
def test_updates_that_arrived_before_the_server_was_killed_are_used(
    tests: dict[str, object], data: Path, split: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three updates have arrived. Then only the third site is asked, even if another one is not back yet."""
    config = settings("scaffold", rounds=4, checkpoint_every=1)
    record = Sites._record_answer

    class Killed(Exception):
        pass

    def die(sites: Sites, kind: str, client: int, sent: Any, group: str, answer: Any) -> None:
        record(sites, kind, client, sent, group, answer)
        if (kind, group, client) == ("train", "3", 1):
            raise Killed

    first = case(tmp_path, split, data, config, minimum=2, begin_with=3, **tests)
    with monkeypatch.context() as patch:
        patch.setattr(Sites, "_record_answer", die)
        with pytest.raises(Killed):
            run_federation(first.grid, first.context)

    def return_after(site: str, asked: dict, facts: dict, answer: bytes) -> tuple[dict, bytes]:
        if asked["kind"] == "train":
            again.grid.offline.clear()
        return facts, answer

    again = case(tmp_path, split, data, config, return_after, minimum=2, begin_with=3, **tests)
    again.grid.offline = {"site-0"}
    resumed = run_federation(again.grid, again.context)
    asked = [(message.facts["round"], message.site) for message in again.grid.sent if message.kind == "train"]
    assert asked == [(2, "site-2"), (3, "site-0"), (3, "site-1"), (3, "site-2")]
    assert [row.failed for row in resumed.history[1:]] == [{}, {}, {}, {}]
    assert_same_model(resumed, run_prepared(prepare(config, split)))
    assert not (tmp_path / "run" / "received").exists()


@pytest.mark.parametrize("tests", [{}, TESTED_BY_SITES])
def test_an_update_that_is_discarded_is_requested_again_but_not_the_others(
    tests: dict[str, object], data: Path, split: Federation, tmp_path: Path
) -> None:
    config = settings("fedavg", rounds=2)
    spoilt: list[str] = []

    def spoil_once(site: str, asked: dict, facts: dict, answer: bytes) -> tuple[dict, bytes]:
        if asked["kind"] == "train" and asked["key"]["round"] == 1 and site == "site-1" and not spoilt:
            spoilt.append(site)
            return facts | {"round": 7}, answer
        return facts, answer

    here = case(tmp_path, split, data, config, spoil_once, **tests)
    apart = run_federation(here.grid, here.context)
    assert [message.site for message in here.grid.sent if message.kind == "train"] == [
        "site-0", "site-1", "site-2", "site-0", "site-1", "site-2", "site-1",
    ]  # fmt: skip
    assert_same_model(apart, run_prepared(prepare(config, split)))


@pytest.mark.parametrize(("model", "rounds_before"), [("global", 0), ("expert.0", 3)])
def test_a_site_keeps_the_state_that_the_server_knows_of_while_its_replies_are_lost(
    model: str, rounds_before: int, data: Path, split: Federation, tmp_path: Path
) -> None:
    """The replies of one site are lost in four rounds, although it trained and wrote its state in each of them.

    An expert of PKD is trained after the warm-up, so its rounds are counted from 0 when the run has done three rounds.
    """
    stages = {"groups": [list(range(10))], "warmup_rounds": rounds_before, "expert_rounds": 6}
    method: Any = "scaffold" if model == "global" else {"name": "pkd+scaffold", **stages}
    config = settings(method, rounds=6)
    named: dict[int, bool] = {}

    def lose(site: str, asked: dict, facts: dict, answer: bytes) -> tuple[dict, bytes]:
        if asked["kind"] != "train" or site != "site-2" or asked["stage"] != (model != "global"):
            return facts, answer
        round, kept = asked["key"]["round"], asked["kept"]
        files = [path.name for path in (tmp_path / site / "state").rglob("*.safetensors")]
        named[round] = kept is None or f"{model}.round-{kept}.safetensors" in files
        return ({"garbage": True}, b"") if 1 <= round <= 4 else (facts, answer)

    here = case(tmp_path, split, data, config, lose, minimum=2)
    apart = run_federation(here.grid, here.context)
    assert [row.round - rounds_before for row in apart.history if row.failed] == [2, 3, 4, 5]
    assert named == dict.fromkeys(range(6), True)


@pytest.mark.parametrize(("sites", "rounds"), [(12, 4), *slow((50, 20))])
def test_many_sites_hold_many_rounds(sites: int, rounds: int, tmp_path: Path) -> None:
    digits = tmp_path / "all.npz"
    dataset = load("digits")
    np.savez(digits, x_train=dataset.train.x, y_train=dataset.train.y, x_test=dataset.test.x, y_test=dataset.test.y)
    split = federation(str(digits), Dirichlet(beta=0.3, clients=sites, min_size=2), seed=0)
    config = settings("fedvls", rounds=rounds, clients_per_round=sites // 4, **{"partition.clients": sites})
    here = case(tmp_path, split, digits, config, minimum=sites - 2)
    apart = run_federation(here.grid, here.context)
    assert_same_model(apart, run_prepared(prepare(config, split)))
    assert len(apart.history) == rounds + 1
