"""A site limits what a curious server can learn by asking again: the attacks are performed here."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from in_process import Case, case, small_data

from fedskew.data import Dirichlet, Federation, federation
from fedskew.errors import UserError
from fedskew.experiment.config import Config, config_hash, with_values
from fedskew.experiment.preparation import data_shape
from fedskew.flower.planning import resolve_config
from fedskew.flower.policy import EvaluationRules, Policy
from fedskew.flower.request_checks import planned_tests
from fedskew.flower.server_app import run_federation
from fedskew.flower.settings import read_settings
from fedskew.flower.site import Site
from fedskew.flower.site_answers import FOLDER, AlreadyAnswered, SiteAnswers
from fedskew.flower.site_state import StateUnusable
from fedskew.flower.supervised_run import WAIT_SECONDS
from fedskew.flower.tensors import from_bytes, to_bytes
from fedskew.methods import make_method
from fedskew.models import make_model

TEST = {"kind": "evaluate", "labels": None, "detail": "total", "frozen": [], "model": "global", "notes": {}}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def split(data: Path) -> Federation:
    return federation(str(data), Dirichlet(beta=0.5, clients=3), seed=0)


def totals(place: Path, data: Path, split: Federation, rounds: int = 2, **changed: Any) -> Case:
    """A federation whose sites report the totals of their tests."""
    values = {"method": "fedavg", "rounds": rounds, "local_epochs": 1, "device": "cpu", "partition.clients": 3}
    config = with_values(Config(), values | changed)
    return case(place, split, data, config, evaluation="sites", site_metrics="total", test_data=None)


def first_site(here: Case) -> Site:
    """The first site, as a new process would make it."""
    return Site(here.grid._sites[1000][1].config)


def server_config(here: Case) -> Config:
    """The configuration that the server resolves and sends."""
    _, contract, config = read_settings(dict(here.context.run_config))
    return resolve_config(config, contract, here.names)


def terms(here: Case) -> dict[str, Any]:
    contract = read_settings(dict(here.context.run_config))[1]
    return {"contract": contract.to_json(), "config": server_config(here).to_mapping()}


def one_class_models(here: Case, split: Federation) -> Iterator[bytes]:
    """Models that always predict the same class, one for each class."""
    model = make_model(here.config.model, data_shape(split.dataset), 0, here.config.head)
    *_, (last, bias) = model.named_parameters()
    assert bias.shape == (10,)
    for label in range(10):
        changed = torch.zeros(10)
        changed[label] = 1e6
        params = {f"sent:params/{name}": t for name, t in model.named_parameters()} | {f"sent:params/{last}": changed}
        yield to_bytes(params | {f"sent:buffers/{name}": t for name, t in model.named_buffers()})


def answered(site: Site, request: dict[str, Any], payload: bytes) -> int | None:
    try:
        return int(site.answer(dict(request), payload)[0]["right"])
    except AlreadyAnswered:
        return None


def test_models_of_one_class_give_few_label_counts_even_after_a_restart(
    data: Path, split: Federation, tmp_path: Path
) -> None:
    """A run of two rounds has three planned tests, and two models for each of them."""
    here = totals(tmp_path, data, split)
    models, counts = list(one_class_models(here, split)), np.bincount(split.dataset.test.y, minlength=10)
    learned: dict[int, int] = {}
    for round in (0, 1, 2):
        request, restarted = TEST | {"terms": terms(here), "round": round}, first_site(here)
        for label, model in enumerate(models):
            found = answered(restarted, request, model)
            if found is not None:
                learned[label] = found
    assert learned == {0: counts[0], 1: counts[1]}  # the same two models in every round
    request = TEST | {"terms": terms(here), "round": 3}
    with pytest.raises(UserError, match="after round 3, which the run's configuration does not plan"):
        first_site(here).answer(request, models[2])
    assert answered(first_site(here), TEST | {"terms": terms(here), "round": 1}, models[1]) == counts[1]


def test_a_dishonest_server_learns_no_more_than_its_planned_tests(
    data: Path, split: Federation, tmp_path: Path
) -> None:
    """What remains: another model in each round. The policy can allow one model per round."""
    here = totals(tmp_path, data, split, eval_every=2)
    here.grid._sites[1000][1].config = replace(first_site(here).config, policy=Policy(tests_per_round=1))
    models = iter(one_class_models(here, split))
    asked = [(round, next(models)) for round in (0, 1, 2) for _ in range(3)]
    found = []
    for round, model in asked:
        try:
            found.append(answered(first_site(here), TEST | {"terms": terms(here), "round": round}, model))
        except UserError:
            found.append(None)
    assert sum(value is not None for value in found) == 2  # of rounds 0 and 2


def test_score_histograms_are_those_of_the_final_model(data: Path, split: Federation, tmp_path: Path) -> None:
    values = {"method": "fedavg", "rounds": 2, "local_epochs": 1, "device": "cpu", "partition.clients": 3}
    own = {"evaluation": "sites", "site_metrics": "class", "test_data": None}
    here = case(tmp_path, split, data, with_values(Config(), values), **own)
    request = TEST | {"detail": "class", "scores": True, "terms": terms(here), "round": 2}
    for changed in ({"round": 1}, {"round": 3}, {"model": "expert"}):
        with pytest.raises(UserError, match="which the run's configuration does not plan"):
            first_site(here).answer(request | changed, next(one_class_models(here, split)))
    assert from_bytes(first_site(here).answer(request, next(one_class_models(here, split)))[1]).keys() >= {"own"}


def test_label_counts_stay_the_same_after_the_data_have_changed(data: Path, split: Federation, tmp_path: Path) -> None:
    """Otherwise a server that counts again and again would learn the label of each new row."""
    here, own = totals(tmp_path, data, split, method="pkd"), tmp_path / "own.npz"
    models, known = one_class_models(here, split), terms(here)
    arrays = dict(np.load(data))
    counts = np.bincount(arrays["y_train"], minlength=10).tolist()
    for removed in (0, 40):
        np.savez(own, **arrays | {"x_train": arrays["x_train"][removed:], "y_train": arrays["y_train"][removed:]})
        site = Site(replace(first_site(here).config, data=str(own), split=None))
        hello, _ = site.answer({"kind": "hello", "terms": known}, b"")
        assert hello["samples"] == 180 - removed
        for labels in ([3], [3, 3, 5], list(range(10))):
            reply, _ = site.answer({"kind": "census", "terms": known, "labels": labels}, b"")
            assert reply["samples"] == sum(counts[label] for label in set(labels))
        survey = {"kind": "survey", "terms": known, "predictions": True}
        assert from_bytes(site.answer(survey, next(models))[1])["label_counts"].tolist() == counts
        with pytest.raises(UserError, match="label is 10; expected 0 to 9"):
            site.answer({"kind": "census", "terms": known, "labels": [10]}, b"")


def test_another_spelling_of_the_contract_is_not_another_contract(
    data: Path, split: Federation, tmp_path: Path
) -> None:
    """Otherwise a server could have any number of finished models tested."""
    here = totals(tmp_path, data, split)
    here.grid._sites[1000][1].config = replace(first_site(here).config, policy=Policy(evaluate=EvaluationRules()))
    known, (model, other, *_) = terms(here), one_class_models(here, split)
    first_site(here).answer({"kind": "score", "terms": known}, model)
    for changed in ({"comment": 1}, {"mean": [str(m) for m in known["contract"]["mean"]]}, {"vocabulary": None}):
        spelled = known | {"contract": known["contract"] | changed}
        with pytest.raises(AlreadyAnswered):
            first_site(here).answer({"kind": "score", "terms": spelled}, other)


def test_another_spelling_of_the_configuration_has_no_minutes_of_its_own(
    data: Path, split: Federation, tmp_path: Path
) -> None:
    here = totals(tmp_path, data, split)
    here.grid._sites[1000][1].config = replace(first_site(here).config, policy=Policy(minutes=1e-9))
    known = terms(here)
    first_site(here).answer({"kind": "hello", "terms": known}, b"")
    for changed in ({}, {"data_dir": "elsewhere"}, {"local_epochs": 1.0}):
        with pytest.raises(UserError, match=r"\(policy\.minutes\)"):
            first_site(here).answer({"kind": "hello", "terms": known | {"config": known["config"] | changed}}, b"")


@pytest.mark.parametrize(
    ("method", "notes", "models"),
    [
        ("fedconcat", {"clusters": [[0], [1, 2]]}, {"encoder.0", "encoder.1"}),
        ("fedconcat", {"clusters": [[0], [0], [1, 2]]}, None),
        ("fedconcat", {"clusters": [[0], [], [1, 2]]}, None),
        ("fedconcat", {"clusters": [[number] for number in range(4)]}, None),
        ("pkd", {"groups": [[0, 1]] * 50}, {f"expert.{number}" for number in range(10)}),
    ],
)
def test_notes_of_the_server_plan_only_few_models(
    method: str, notes: dict[str, Any], models: set[str] | None, data: Path, split: Federation, tmp_path: Path
) -> None:
    """Each model of a run is tested. A server could note any number of clusters or groups."""
    config = server_config(totals(tmp_path, data, split, rounds=4, method=method))
    parts = make_method(config.method, config.method_params)
    if models is None:
        with pytest.raises(UserError, match="the server's notes have empty clusters"):
            planned_tests(parts, config, notes)
    else:
        assert {name for name, _ in planned_tests(parts, config, notes)} == {"global"} | models


def test_a_run_goes_on_without_an_evaluation_if_its_tests_are_used_up(
    data: Path, split: Federation, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = totals(tmp_path, data, split, rounds=1)
    for _, site in here.grid._sites.values():
        for model in list(one_class_models(here, split))[:2]:
            answered(site, TEST | {"terms": terms(here), "round": 1}, model)
    with caplog.at_level("INFO", logger="flwr"):
        result = run_federation(here.grid, here.context)
    assert [row.evaluation is not None for row in result.history] == [True, False]
    assert "round 1 has no evaluation: no site replied with its tests" in caplog.text
    assert "% after round 0, the last one with an evaluation" in caplog.text


@pytest.mark.slow
def test_the_same_run_in_another_folder_gets_the_recorded_answers(
    data: Path, split: Federation, tmp_path: Path
) -> None:
    first = totals(tmp_path, data, split)
    before = run_federation(first.grid, first.context)
    (tmp_path / "run").rename(tmp_path / "first")
    files = {path: path.read_bytes() for path in (tmp_path / "site-0" / "state" / FOLDER).glob("*.json")}
    again = totals(tmp_path, data, split)
    after = run_federation(again.grid, again.context)
    assert [row.evaluation for row in after.history] == [row.evaluation for row in before.history]
    assert files == {path: path.read_bytes() for path in (tmp_path / "site-0" / "state" / FOLDER).glob("*.json")}
    assert len(files) == 3


def test_a_request_cannot_write_into_the_state_of_another_run(data: Path, split: Federation, tmp_path: Path) -> None:
    """A server of one run names another run. SCAFFOLD's control variate would be replaced."""
    own = totals(tmp_path, data, split, rounds=1, method="scaffold", seed=1)
    other = config_hash(with_values(server_config(own), {"seed": 2}))
    refused: list[str] = []

    def attack(site: str, asked: dict[str, Any], facts: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        if asked["kind"] == "train" and site == "site-0" and not refused:
            for changed in ({"run": other}, {"terms": _other_contract(asked["terms"])}):
                with pytest.raises(UserError) as error:
                    first_site(own).answer(asked | changed, to_bytes({}))
                refused.append(str(error.value))
        return facts, payload

    own.grid.meddle = attack
    run_federation(own.grid, own.context)
    assert refused[0].startswith(f"the server's request names the run {other!r}, but its terms are those of ")
    assert "has another contract at this site" in refused[1]
    assert not (tmp_path / "site-0" / "state" / other).exists()
    assert (tmp_path / "site-0" / "state" / config_hash(server_config(own))).is_dir()


def test_a_site_trains_only_the_rounds_that_the_run_plans(data: Path, split: Federation, tmp_path: Path) -> None:
    """Each update of a crafted model reveals something, so approved rounds must not be followed by others."""
    here = totals(tmp_path, data, split, rounds=1)
    refused: list[str] = []

    def attack(site: str, asked: dict[str, Any], facts: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        if asked["kind"] == "train" and not refused:
            for changed in ({"key": {**asked["key"], "round": 1}}, {"stage": 1}, {"stage": -1}):
                with pytest.raises(UserError) as error:
                    first_site(here).answer(asked | changed, to_bytes({}))
                refused.append(str(error.value))
        return facts, payload

    here.grid.meddle = attack
    run_federation(here.grid, here.context)
    assert refused[0] == (
        "the server requests round 2 of stage 0, which the run's configuration does not plan (rounds)"
    )
    assert len(refused) == 3


def captured_training(here: Case) -> tuple[dict[str, Any], bytes]:
    """Run a federation, and return the first site's request for its first round."""
    asked: list[tuple[dict[str, Any], bytes]] = []
    answer = Site.answer

    def listen(site: Site, facts: dict[str, Any], payload: bytes) -> Any:
        if facts["kind"] == "train" and site.config.name == "site-0" and not asked:
            asked.append((dict(facts), payload))
        return answer(site, facts, payload)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Site, "answer", listen)
        run_federation(here.grid, here.context)
    return asked[0]


def moved(payload: bytes, step: int) -> bytes:
    """Another model of the same form."""
    return to_bytes({name: t + step if t.is_floating_point() else t for name, t in from_bytes(payload).items()})


def test_a_site_trains_a_round_for_few_models_even_after_a_restart(
    data: Path, split: Federation, tmp_path: Path
) -> None:
    """Without a budget, a server could otherwise have any number of crafted models trained in an approved round."""
    here = totals(tmp_path, data, split, rounds=1)
    here.grid._sites[1000][1].config = replace(first_site(here).config, policy=Policy(trainings_per_round=3))
    request, payload = captured_training(here)
    for step in (1, 2):
        first_site(here).answer(request, moved(payload, step))
    refusal = r"has trained round 1 of stage 0 in run \w+ as often as policy\.trainings_per_round allows \(3\)"
    for changed in (moved(payload, 3), payload):
        kept = {} if changed != payload else {"kept": 1}
        with pytest.raises(AlreadyAnswered, match=refusal):
            first_site(here).answer(request | kept, changed)
    again = first_site(here).answer(request, payload)[1]
    assert again == first_site(here).answer(request, payload)[1], "the same request is trained as often as it comes"


def test_a_training_from_another_state_counts_though_the_request_is_the_same(
    data: Path, split: Federation, tmp_path: Path
) -> None:
    """Each training replaces the state of the round from which the server lets the site continue."""
    here = totals(tmp_path, data, split, rounds=1, method="moon")
    here.grid._sites[1000][1].config = replace(first_site(here).config, policy=Policy(trainings_per_round=3))
    request, payload = captured_training(here)
    updates = {first_site(here).answer(request | {"kept": 1}, payload)[1] for _ in range(2)}
    assert len(updates) == 2
    with pytest.raises(AlreadyAnswered, match=r"as often as policy\.trainings_per_round allows \(3\)"):
        first_site(here).answer(request | {"kept": 1}, payload)


def test_with_noise_every_training_of_a_round_counts(data: Path, split: Federation, tmp_path: Path) -> None:
    """The mean of many updates with new noise would have hardly any."""
    values = {"rounds": 1, "local_epochs": 1, "device": "cpu", "partition.clients": 3, "average": "uniform"}
    noise = {"privacy": "local", "clip": 1.0, "noise": 1.0, "share_loss": False, "attempts": 1}
    here = case(tmp_path, split, data, with_values(Config(), values), **noise)
    request, payload = captured_training(here)
    for _ in range(Policy.trainings_per_round - 1):
        first_site(here).answer(request, payload)
    with pytest.raises(AlreadyAnswered, match=rf"allows \({Policy.trainings_per_round}\)"):
        first_site(here).answer(request, payload)


def test_a_site_trains_a_round_as_often_as_a_server_restarts() -> None:
    """`fedskew federate run` and `up` give up after these restarts without a new update."""
    assert Policy.trainings_per_round == 1 + len(WAIT_SECONDS)


def test_a_site_trains_only_with_the_settings_that_the_run_plans(data: Path, split: Federation, tmp_path: Path) -> None:
    """With another learning rate or batch size, an update could reveal far more about single samples."""
    here = totals(tmp_path, data, split, lr_decay=0.9)
    refused: dict[str, str] = {}
    changes: dict[str, dict[str, Any]] = {
        "lr": {"local": {"lr": 1000.0}},
        "batch_size": {"local": {"batch_size": 1}},
        "epochs": {"local": {"epochs": 100}},
        "batches": {"local": {"batches": "balanced"}},
        "seed": {"key": {"seed": 7}},
        "model": {"key": {"model": 7}},
        "momentum": {"key": {"momentum": 0.0}},
        "weight_decay": {"local": {"weight_decay": False}},
        "clip_norm": {"local": {"clip_norm": 10**400}},
        "optimizer": {"local": {"optimizer": math.nan}},
    }

    def attack(site: str, asked: dict[str, Any], facts: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        if asked["kind"] == "train" and asked["key"]["round"] == 1 and not refused:
            for name, changed in changes.items():
                request = asked | {part: {**asked[part], **values} for part, values in changed.items()}
                with pytest.raises(UserError) as error:
                    first_site(here).answer(request, to_bytes({}))
                refused[name] = str(error.value)
        return facts, payload

    here.grid.meddle = attack
    run_federation(here.grid, here.context)
    assert refused.keys() == changes.keys()
    assert all(message.startswith(f"the server sets {name} to") for name, message in refused.items())
    assert refused["lr"] == (
        "the server sets lr to 1000.0 in this round; expected 0.045000000000000005, as the run's configuration plans"
    )


def test_a_request_of_another_form_is_refused_in_one_line(data: Path, split: Federation, tmp_path: Path) -> None:
    """A server that is broken or dishonest may send anything. The site says what is wrong, without a traceback."""
    here = totals(tmp_path, data, split, rounds=1)
    refused: list[str] = []
    wrong: dict[str, tuple[Any, ...]] = {
        "run": (None, 7),
        "client": (-1, 1, True, "0", 10**400),
        "stage": (0.0, None),
        "notes": (None, []),
        "companions": (None, [1], "teacher"),
        "local": (None, [], {}),
        "key": (None, {}, {"round": None}, {"round": 0.5}, {"round": 10**400}),
        "kept": ("../x", 1.5, -1),
        "oldest": (None, "0"),
        "share_loss": (None, 1),
        "noise": (1.0, [1.0], ["1", "2"], [1.0, 10**400], [math.nan, 1.0]),
        "central_noise": ({}, [0, 1]),
        "tests": ([], {}, {"detail": []}),
        "local_tests": ("yes",),
    }

    def attack(site: str, asked: dict[str, Any], facts: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        if asked["kind"] == "train" and not refused:
            requests = [asked | {key: value} for key, values in wrong.items() for value in values]
            requests += [{k: v for k, v in asked.items() if k != key} for key in asked.keys() & wrong.keys()]
            for request in requests:
                with pytest.raises(UserError) as error:
                    first_site(here).answer(request, to_bytes({}))
                refused.append(str(error.value))
        return facts, payload

    here.grid.meddle = attack
    run_federation(here.grid, here.context)
    assert len(refused) > 40
    assert all(message.startswith("the server") and "\n" not in message for message in refused)


def test_a_site_trains_only_the_model_of_the_run(data: Path, split: Federation, tmp_path: Path) -> None:
    """With another shape, a layer could hold single samples."""
    here = totals(tmp_path, data, split, rounds=1)
    refused: list[str] = []

    def attack(site: str, asked: dict[str, Any], facts: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        if asked["kind"] == "train" and not refused:
            network = make_model(server_config(here).model, data_shape(split.dataset), 0)
            sent = {f"sent:params/{name}": p.detach() for name, p in network.named_parameters()}
            name = max(sent, key=lambda each: sent[each].numel())
            for changed in ({name: torch.cat([sent[name]] * 2)}, {"sent:params/more": torch.zeros(3)}):
                with pytest.raises(UserError) as error:
                    first_site(here).answer(asked, to_bytes(sent | changed))
                refused.append(str(error.value))
        return facts, payload

    here.grid.meddle = attack
    run_federation(here.grid, here.context)
    assert len(refused) == 2
    assert all(message.startswith("the server's model is not that of the run: ") for message in refused)


def _other_contract(known: dict[str, Any]) -> dict[str, Any]:
    contract: dict[str, Any] = json.loads(json.dumps(known["contract"]))
    contract["mean"] = [0.25]
    return known | {"contract": contract}


def test_a_refusal_counts_the_answers_from_before_the_limit_was_lowered(tmp_path: Path) -> None:
    answers = SiteAnswers(tmp_path)
    for number in range(3):
        answers.answer_once("tests", {"model": number}, lambda: ({}, b""), most=3)
    with pytest.raises(AlreadyAnswered, match="has answered 3 other requests for tests, which is its limit"):
        answers.answer_once("tests", {"model": 3}, lambda: ({}, b""), most=3)
    with pytest.raises(AlreadyAnswered, match="has answered 3 other requests for tests, and its limit is 1"):
        answers.answer_once("tests", {"model": 3}, lambda: ({}, b""), most=1)


def test_a_damaged_record_stops_the_answers_without_a_word_about_the_files(tmp_path: Path) -> None:
    answers = SiteAnswers(tmp_path)
    assert answers.answer_once("sums", {}, lambda: ({"a": [1.5]}, b"xyz")) == ({"a": [1.5]}, b"xyz")
    assert answers.answer_once("sums", {}, lambda: ({"a": [9.0]}, b"")) == ({"a": [1.5]}, b"xyz")
    with pytest.raises(AlreadyAnswered, match="this site has answered another request for sums, which is its limit"):
        answers.answer_once("sums", {"other": 1}, lambda: ({}, b""))
    (file,) = (tmp_path / FOLDER).glob("*.json")
    file.write_text("{")
    with pytest.raises(StateUnusable):
        answers.answer_once("sums", {}, lambda: ({}, b""))
