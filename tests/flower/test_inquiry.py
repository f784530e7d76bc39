"""A survey and a test of a finished model: what leaves a site, what its policy decides, and what the server writes."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, PropertyMock, call

import numpy as np
import pytest
import torch
from in_process import Case, case, small_data
from safetensors.torch import load_file, save_file

from fedskew.cli import main
from fedskew.cli.federate_inquiries import show_evaluation, show_survey
from fedskew.data import Dirichlet, Federation, federation
from fedskew.data.label_counts import read_counts
from fedskew.data.table_encoding import RawTable, Strings, TableEncoding
from fedskew.engine import ModelState
from fedskew.errors import UserError
from fedskew.experiment.config import Config, with_values
from fedskew.export import export_run
from fedskew.flower.app_folder import write_app
from fedskew.flower.app_review import make_approval
from fedskew.flower.approved_apps import add_approval
from fedskew.flower.chained_log import read_chain
from fedskew.flower.contract import Contract
from fedskew.flower.planning import make_settings, resolve_config
from fedskew.flower.policy import COLUMN_SUMS, EvaluationRules, Policy, read_policy
from fedskew.flower.remote_encoding import fit_at_sites
from fedskew.flower.remote_scoring import EVALUATION, _sites_to_list, score_at_sites, weights_file
from fedskew.flower.remote_survey import COUNTS, SURVEY, read_description, survey_sites
from fedskew.flower.server_app import ask_sites, run_federation
from fedskew.flower.settings import read_settings
from fedskew.flower.site import Site
from fedskew.flower.site_answers import AlreadyAnswered
from fedskew.flower.site_config import SiteConfig
from fedskew.flower.site_replies import Reply
from fedskew.flower.site_survey import SurveyRules, describe_columns, describe_site, hide_counts_given_total
from fedskew.flower.trial import plan_trial
from fedskew.flower.wire import Garbled


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def split(data: Path) -> Federation:
    return federation(str(data), Dirichlet(beta=0.3, clients=3), seed=0)


def asked(place: Path, data: Path, split: Federation, purpose: str, policies: list[Policy], **own: Any) -> Case:
    """A federation whose sites have these policies, with a server that asks them."""
    values = {"method": "fedavg", "rounds": 1, "local_epochs": 1, "device": "cpu", "partition.clients": 3}
    declared = {"survey": True, "evaluate_only": True, "minimum": 1, "begin_with": 3, **own}
    here = case(place, split, data, with_values(Config(), values), **declared)
    for (_, site), policy in zip(here.grid._sites.values(), policies, strict=True):
        site.config = replace(site.config, policy=policy)
    here.context.run_config["federation.purpose"] = purpose
    return here


def test_a_survey_gives_counts_without_small_groups_that_can_be_read(
    data: Path, split: Federation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = SurveyRules(hide_below=4, round_to=5)
    here = asked(tmp_path, data, split, "survey", [Policy(survey=rules), Policy(), Policy(survey=rules, epsilon=1.0)])
    ask_sites(here.grid, here.context)
    folder = tmp_path / "run-survey"
    found = json.loads((folder / SURVEY).read_text())
    for client in (0, 2):
        exact = split.label_counts[client].tolist()
        expected = [0 if count < 4 else round(count / 5 + 1e-9) * 5 for count in exact]
        reported, largest = found["sites"][f"site-{client}"]["label_counts"], exact.index(max(exact))
        left = sum(exact) - sum(expected) + expected[largest]
        expected[largest] = round(left / 5 + 1e-9) * 5
        assert reported == expected
        assert reported != exact
    assert list(found["declined"]) == ["site-1"]
    assert "expected policy.survey" in found["declined"]["site-1"]
    assert {message.kind for message in here.grid.sent} == {"hello", "describe"}
    assert all(message.payload == b"" for message in here.grid.sent)
    show_survey(found)
    assert "site-1 gave no usable answer" in capsys.readouterr().out
    assert read_counts(folder / COUNTS).clients == ("site-0", "site-2")
    assert read_chain(folder / "audit.jsonl").problem is None


def test_a_survey_waits_for_a_site_that_is_greeted_and_names_one_that_is_not_connected(
    data: Path, split: Federation, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Site 1 replies to its greeting after site 0 has replied, which alone would be enough."""
    here = asked(tmp_path, data, split, "survey", [Policy(survey=SurveyRules())] * 3, begin_with=1)
    here.grid.offline, late, pull = {"site-2"}, iter(range(3)), here.grid.pull_messages
    monkeypatch.setattr("fedskew.flower.sites._POLL_SECONDS", 0.01)
    monkeypatch.setattr(here.grid, "pull_messages", lambda ids: pull(list(ids)[: next(late, 99)]))
    ask_sites(here.grid, here.context)
    found = json.loads((tmp_path / "run-survey" / SURVEY).read_text())
    assert (list(found["sites"]), found["absent"]) == (["site-0", "site-1"], ["site-2"])
    show_survey(found)
    assert "not connected, so not asked: site-2\n" in capsys.readouterr().out


@pytest.mark.parametrize("ask", [survey_sites, score_at_sites, fit_at_sites])
def test_sites_are_asked_only_after_those_that_are_greeted_had_time_to_reply(ask: Callable[..., object]) -> None:
    settings = make_settings(["a", "b"], {"begin_with": 1, "grace_seconds": 7.0})
    sites, model = MagicMock(), MagicMock(state=ModelState({}, {}))
    type(sites).online = PropertyMock(side_effect=InterruptedError)
    given = [sites, model, MagicMock(), MagicMock(), settings] if ask is score_at_sites else [sites, model, settings]
    with pytest.raises(InterruptedError):
        ask(*given)
    assert sites.method_calls == [call.wait_for(1), call.wait_for_greetings(7.0)]


def test_another_survey_gets_the_same_answer_so_noise_is_not_averaged_out(
    data: Path, split: Federation, tmp_path: Path
) -> None:
    here = asked(tmp_path, data, split, "survey", [Policy(survey=SurveyRules(epsilon=0.5))] * 3)
    terms, site = _terms(here), here.grid._sites[1000][1]
    first, again = (Site(site.config).answer({"kind": "describe", "terms": terms}, b"")[0] for _ in range(2))
    assert first == again
    assert first["label_counts"] != split.label_counts[0].tolist()
    assert first["columns"] == []


def test_another_spelling_of_the_contract_gets_the_same_answer(data: Path, split: Federation, tmp_path: Path) -> None:
    """A server that adds a key, or writes 1.0 for 1, would get new noise each time, and could compute the mean."""
    here = asked(tmp_path, data, split, "survey", [Policy(survey=SurveyRules(epsilon=0.5))] * 3)
    terms, site = _terms(here), here.grid._sites[1000][1]
    spellings = [{}, {"comment": "2"}, {"mean": [str(m) for m in terms["contract"]["mean"]]}, {"column_sums": 0}]
    answers = [
        Site(site.config).answer({"kind": "describe", "terms": {**terms, "contract": terms["contract"] | other}}, b"")
        for other in spellings
    ]
    assert answers == [answers[0]] * len(spellings)


def test_another_scaling_of_the_same_images_gets_the_same_answer(data: Path, split: Federation, tmp_path: Path) -> None:
    here = asked(tmp_path, data, split, "survey", [Policy(survey=SurveyRules(epsilon=0.5))] * 3)
    terms, site = _terms(here), here.grid._sites[1000][1]
    contracts = [terms["contract"] | {"mean": [mean]} for mean in (0.1, 0.2, 0.3)]
    answers = [
        Site(site.config).answer({"kind": "describe", "terms": {**terms, "contract": other}}, b"")
        for other in contracts
    ]
    assert answers == [answers[0]] * 3


def patients_site(folder: Path, second: str = "0123456") -> tuple[SiteConfig, Contract]:
    """A site with a table of two columns, whose survey has noise, and the contract of its data.

    `second` are the values of the second column.
    """
    cells = [(20 + row % 60, second[row % len(second)], "yes" if row % 3 else "no") for row in range(90)]
    rows = ["age,dose,ill", *(f"{age},{dose},{ill}" for age, dose, ill in cells)]
    (folder / "p.csv").write_text("\n".join(rows) + "\n")
    policy = Policy(survey=SurveyRules(1, 1, 1.0), reveals=frozenset({COLUMN_SUMS}))
    own = SiteConfig(folder, "a", "p.csv", {"label": "ill"}, device="cpu", policy=policy)
    return own, Contract.from_dataset(own.federation().dataset)


def ask_patients(own: SiteConfig, contract: Contract, kind: str = "describe") -> dict[str, Any]:
    config = resolve_config(with_values(Config(), {"method": "fedavg", "rounds": 1}), contract, ["a"]).to_mapping()
    return Site(own).answer({"kind": kind, "terms": {"contract": contract.to_json(), "config": config}}, b"")[0]


def test_another_encoding_of_the_same_columns_gets_the_same_answer(tmp_path: Path) -> None:
    """An approved draft of a table allows any encoding, so a server could ask once for each."""
    own, contract = patients_site(tmp_path)
    contracts = [replace(contract, mean=(mean, 0.0)) for mean in (0.0, 1.0, 2.0)]
    assert all(other.completes(contract.draft()) for other in contracts)
    assert len({str(ask_patients(own, other)) for other in contracts}) == 1


def test_other_categories_of_the_same_columns_get_the_same_answer(tmp_path: Path) -> None:
    own, contract = patients_site(tmp_path, second="ab")
    assert contract.encoding is not None
    age, dose = contract.encoding.columns
    encodings = [TableEncoding((age, replace(dose, categories=tuple(names)))) for names in ("ab", "abc", "abcd")]
    contracts = [Contract.from_encoding(contract.classes, encoding) for encoding in encodings]
    assert all(other.completes(contract.draft()) for other in contracts)
    assert len({str(ask_patients(own, other)) for other in contracts}) == 1


def test_a_draft_with_means_of_the_servers_choice_gets_the_same_answer(tmp_path: Path) -> None:
    """fedskew's drafts have no means, but a server can write any into what it calls a draft."""
    own, contract = patients_site(tmp_path)
    answers = [ask_patients(own, replace(contract, column_sums=True, mean=(mean, 0.0))) for mean in (0.0, 1.0, 2.0)]
    assert answers == [ask_patients(own, contract)] * 3


def test_classes_or_columns_in_another_order_get_no_new_answer(tmp_path: Path) -> None:
    """With many classes there are many orders, and noise that is new for each could be averaged out."""
    own, contract = patients_site(tmp_path)
    answer = ask_patients(own, contract)
    with pytest.raises(AlreadyAnswered, match="another request for a survey of the data"):
        ask_patients(own, replace(contract, classes=contract.classes[::-1]))
    assert ask_patients(own, replace(contract, columns=contract.columns[::-1])) == answer
    draft = contract.draft()
    assert draft.encoding is not None
    backwards = TableEncoding(draft.encoding.columns[::-1])
    sums = ask_patients(own, draft, "column_sums")
    assert sums == ask_patients(own, replace(draft, classes=draft.classes[::-1]), "column_sums")
    with pytest.raises(AlreadyAnswered, match="another request for column sums of the data"):
        ask_patients(own, replace(draft, columns=backwards.features, encoding=backwards), "column_sums")


def test_a_hidden_class_does_not_follow_from_the_number_of_samples() -> None:
    """Whatever a small class has, the answer is the same for the same number of samples."""
    for total in range(20, 140):
        answers = {tuple(hide_counts_given_total(np.array([total - n, n]), SurveyRules())) for n in range(5)}
        assert answers == {((total + 2) // 5 * 5, 0)}
    assert hide_counts_given_total(np.array([2, 4, 3]), SurveyRules()) == [0, 0, 0]
    assert hide_counts_given_total(np.array([8] * 9), SurveyRules()) == [10] * 9  # not 0, which is left of 72 samples


def test_noise_is_for_a_sample_that_another_replaces(split: Federation) -> None:
    """The number of samples is public. So two counts change by one, and each needs noise for half of ε."""
    rules, shrink = SurveyRules(epsilon=1.0), math.exp(-1 / 2)
    label = int(split.label_counts[0].argmax())
    drawn = [describe_site(split, None, rules)["label_counts"][label] for _ in range(1500)]
    assert np.var(drawn) == pytest.approx(2 * shrink / (1 - shrink) ** 2, rel=0.4)


def _terms(here: Case) -> dict[str, Any]:
    _, contract, config = read_settings(dict(here.context.run_config))
    return {"contract": contract.to_json(), "config": resolve_config(config, contract, here.names).to_mapping()}


@pytest.mark.slow
def test_a_survey_needs_an_app_that_declares_it_and_an_approval(data: Path, split: Federation, tmp_path: Path) -> None:
    here = asked(tmp_path, data, split, "survey", [Policy(survey=SurveyRules())] * 3, survey=False)
    with pytest.raises(UserError, match=r"federation\.survey is false in the app"):
        ask_sites(here.grid, here.context)
    settings, contract, config = read_settings(dict(here.context.run_config))
    app = write_app(tmp_path / "app", settings, contract, config)
    for name in here.names:
        (tmp_path / name).mkdir(exist_ok=True)
        add_approval(tmp_path / name, make_approval(app, name))
    curious = asked(tmp_path, data, split, "survey", [Policy(survey=SurveyRules())] * 3)
    with pytest.raises(UserError, match="differs from every app that this site approved: survey"):
        ask_sites(curious.grid, curious.context)


def test_ranges_hide_extremes_and_rare_values() -> None:
    random = np.random.default_rng(0)
    numbers = np.array([*random.integers(30, 80, 198), 7.0, 111.0])[:, None]
    numbers = np.hstack([numbers, np.where(np.arange(200)[:, None] < 33, np.nan, numbers), numbers * 1e-3])
    ward = Strings(("a", "b", "rare"), np.array([*[0] * 150, *[1] * 40, *[2] * 3, *[-1] * 7]))
    table = RawTable(("age", "pulse", "dose", "ward"), numbers, {"ward": ward})
    age, pulse, dose, place = describe_columns(table, smallest=5)
    assert age == {"name": "age", "kind": "number", "missing": 0.0, "low": 30.0, "median": 55.0, "high": 80.0}
    assert (pulse["missing"], dose["low"], dose["high"]) == (0.17, 0.03, 0.08)  # 35 of 200
    assert place == {"name": "ward", "kind": "category", "missing": 0.03, "values": ["a", "b"]}  # 5 of 200
    (few,) = describe_columns(RawTable(("age",), numbers[:19, :1], {}), smallest=5)
    assert few["low"] is few["median"] is few["high"] is None


@pytest.mark.slow
def test_ranges_of_a_table_hide_extremes_and_the_check_shows_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random = np.random.default_rng(0)
    rows = ["age,ward,ill"]
    rows += [
        f"{age},{ward},{'yes' if age > 55 else 'no'}"
        for age, ward in zip(
            [*random.integers(30, 80, 198), 7, 111], [*["a"] * 150, *["b"] * 47, *["rare"] * 3], strict=True
        )
    ]
    (tmp_path / "p.csv").write_text("\n".join(rows) + "\n")
    own = SiteConfig(tmp_path, "a", "p.csv", {"label": "ill"}, device="cpu", policy=Policy(survey=SurveyRules()))
    contract = Contract.from_dataset(own.federation().dataset)
    config = resolve_config(with_values(Config(), {"method": "fedavg", "rounds": 1}), contract, ["a"])
    terms = {"contract": contract.to_json(), "config": config.to_mapping()}
    age, ward = Site(own).answer({"kind": "describe", "terms": terms}, b"")[0]["columns"]
    assert (age["low"], age["high"]) == (30.0, 80.0)
    assert age["missing"] == 0.0
    assert ward == {"name": "ward", "kind": "category", "missing": 0.0, "values": ["a", "b"]}
    file, app = tmp_path / "site.yaml", tmp_path / "app"
    write_app(app, make_settings(["a"], {"survey": True, "evaluate_only": True}), contract, config)
    file.write_text("name: a\ndata: {name: p.csv, label: ill}\npolicy: {survey: {}}\n")
    assert main(["federate", "site", str(file), "--check", str(app)]) == 0
    shown = capsys.readouterr()
    assert "survey: label counts no " in shown.out
    assert "survey: age: 30 to 80, median " in shown.out
    assert "does not allow `fedskew federate evaluate`" in shown.err
    file.write_text(file.read_text().replace("{}", "{hide_below: 60}"))
    repeated = "this site has answered the survey, and will repeat that answer"
    for is_recorded, bounds in ((True, "30 to 80"), (False, "too few values")):
        assert main(["federate", "site", str(file), "--check", str(app)]) == 0
        shown = capsys.readouterr()
        assert (repeated in shown.err) == is_recorded
        assert f"survey: age: {bounds}" in shown.out
        shutil.rmtree(tmp_path / "state" / "answers", ignore_errors=True)


@pytest.fixture(scope="module")
def model(data: Path, split: Federation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exported model of a federation."""
    place = tmp_path_factory.mktemp("trained")
    here = asked(place, data, split, "train", [Policy()] * 3)
    run_federation(here.grid, here.context)
    export_run(place / "run", place / "model")
    return place / "model"


def evaluate_at(place: Path, data: Path, split: Federation, model: Path, policies: list[Policy]) -> dict[str, Any]:
    here = asked(place, data, split, "evaluate", policies)
    here.context.run_config["federation.tested_model"] = str(weights_file(model))
    ask_sites(here.grid, here.context)
    found: dict[str, Any] = json.loads((place / "run-evaluate" / EVALUATION).read_text())
    return found


def test_a_finished_model_is_tested_on_every_site_s_data(
    data: Path, split: Federation, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agreed = Policy(evaluate=EvaluationRules())
    found = evaluate_at(tmp_path, data, split, model, [agreed, agreed, Policy(noise=1.0)])
    samples = len(split.dataset.test)
    assert found["tested_by"] == ["site-0", "site-1"]
    assert found["without_answer"] == ["site-2"]
    assert found["total"]["samples"] == 2 * samples  # all sites of this trial have the same test part
    assert found["by_site"].keys() == {"site-0", "site-1"}
    assert found["total"]["auroc"] == pytest.approx(found["by_site"]["site-0"]["auroc"])
    assert found["total"]["calibration_error"] is not None
    show_evaluation(found)
    assert "without a usable answer: site-2" in capsys.readouterr().out


def test_the_model_card_names_the_sites_that_sent_label_counts_in_other_runs(
    data: Path, split: Federation, tmp_path: Path
) -> None:
    policies = [Policy(survey=SurveyRules()), Policy(evaluate=EvaluationRules()), Policy()]
    survey = asked(tmp_path, data, split, "survey", policies)
    ask_sites(survey.grid, survey.context)
    training = asked(tmp_path, data, split, "train", policies, evaluation="server")
    run_federation(training.grid, training.context)
    export_run(tmp_path / "run", tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
    assert (
        "In this run, the label counts stayed at the sites. In a survey, which was a run of its own, site-0 sent"
        in card
    )
    assert "In a test of a finished model" not in card
    assert "frequent categories, and its share of missing values" in card
    assert "learns about the client's labels: nothing. Other runs revealed more: see the label distribution." in card
    assert "SHA-256 of the split" not in card  # the server does not know the split
    evaluate_at(tmp_path, data, split, tmp_path / "model", policies)
    export_run(tmp_path / "run", tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
    assert "In a test of a finished model, which was a run of its own, site-1 sent score histograms by class" in card
    (tmp_path / "run-survey" / SURVEY).write_text("{")
    with pytest.raises(UserError, match=r"survey\.json is damaged"):
        export_run(tmp_path / "run", tmp_path / "model")


@pytest.mark.slow
def test_a_site_that_withholds_its_results_is_still_named(
    data: Path, split: Federation, model: Path, tmp_path: Path
) -> None:
    agreed, unlisted = Policy(evaluate=EvaluationRules()), Policy(evaluate=EvaluationRules(by_site=False))
    two = evaluate_at(tmp_path / "b", data, split, model, [agreed, unlisted, unlisted])
    assert two["by_site"].keys() == {"site-0"}
    assert two["tested_by"] == ["site-0", "site-1", "site-2"]
    one = evaluate_at(tmp_path / "c", data, split, model, [agreed, agreed, unlisted])
    assert one["by_site"] == {}  # the total without the others would be the one that declined
    assert one["tested_by"] == ["site-0", "site-1", "site-2"]


@pytest.mark.parametrize(
    ("agreed", "listed"), [(["a", "b", "c"], ["a", "b", "c"]), (["a", "b"], []), (["a"], ["a"]), ([], [])]
)
def test_no_site_is_listed_if_the_rest_of_the_total_is_a_single_withheld_result(
    agreed: list[str], listed: list[str]
) -> None:
    assert _sites_to_list(["a", "b", "c"], agreed) == listed


def test_a_site_that_withholds_its_results_and_answers_alone_is_not_the_total(
    data: Path, split: Federation, model: Path, tmp_path: Path
) -> None:
    unlisted = Policy(evaluate=EvaluationRules(by_site=False))
    with pytest.raises(UserError, match=r"only site-2 sent usable score histograms, and the total would be its own"):
        evaluate_at(tmp_path, data, split, model, [Policy(), Policy(), unlisted])
    assert not (tmp_path / "run-evaluate" / EVALUATION).exists()


@pytest.mark.slow
def test_a_recorded_answer_is_listed_only_if_the_policy_still_allows_it(
    data: Path, split: Federation, model: Path, tmp_path: Path
) -> None:
    agreed, unlisted = Policy(evaluate=EvaluationRules()), Policy(evaluate=EvaluationRules(by_site=False))
    first = evaluate_at(tmp_path, data, split, model, [agreed, agreed, agreed])
    assert first["by_site"].keys() == {"site-0", "site-1", "site-2"}
    later = evaluate_at(tmp_path, data, split, model, [agreed, unlisted, unlisted])
    assert later["by_site"].keys() == {"site-0"}
    assert later["total"] == first["total"]


@pytest.mark.slow
def test_a_site_tests_only_as_many_finished_models_as_its_policy_allows(
    data: Path, split: Federation, model: Path, tmp_path: Path
) -> None:
    policies = [Policy(evaluate=EvaluationRules(models=1))] * 3
    first = evaluate_at(tmp_path, data, split, model, policies)
    assert evaluate_at(tmp_path, data, split, model, policies) == first
    weights = load_file(model / "model.safetensors")
    other = tmp_path / "other.safetensors"
    save_file({name: torch.zeros_like(tensor) for name, tensor in weights.items()}, other)
    with pytest.raises(UserError, match=r"has answered another request for tests of finished models "):
        evaluate_at(tmp_path, data, split, other, policies)


@pytest.mark.parametrize("low", [10**400, math.inf, math.nan, None], ids=["large", "infinite", "nan", "missing"])
def test_a_bound_that_is_not_finite_or_too_large_for_a_float_or_missing_is_refused(low: float | None) -> None:
    column = {"name": "age", "kind": "number", "missing": 0.0, "low": low, "median": 1.0, "high": 2.0}
    rules = {"hide_below": 5, "round_to": 10, "epsilon": None}
    contract = Contract("table", ("a", "b"), (1,))
    reply = Reply({"label_counts": [10, 20], "columns": [column | {"low": 0.0}], "rules": rules}, b"")
    assert read_description(reply, contract)["label_counts"] == [10, 20]
    with pytest.raises(Garbled, match="its description of the columns does not have the expected form"):
        read_description(replace(reply, facts=reply.facts | {"columns": [column]}), contract)


def test_texts_of_a_site_are_safe_to_print() -> None:
    """Tables from other programs often have two spaces, or spaces at which no line is broken."""
    column = {"name": "pain  today", "kind": "category", "missing": 0.0, "values": ["no\xa0answer", "\x1b[31mred"]}
    rules = {"hide_below": 5, "round_to": 10, "epsilon": None}
    reply = Reply({"label_counts": [10, 20], "columns": [column], "rules": rules}, b"")
    (found,) = read_description(reply, Contract("table", ("a", "b"), (1,)))["columns"]
    assert (found["name"], found["values"]) == ("pain today", ["no answer", "[31mred"])


def test_the_rules_are_in_the_policy() -> None:
    read = read_policy({"survey": {"round_to": 10}, "evaluate": {"models": 3, "by_site": False}})
    assert read.survey == SurveyRules(round_to=10)
    assert read.evaluate == EvaluationRules(3, False)
    assert read_policy({"survey": {}}).survey == SurveyRules()
    with pytest.raises(UserError, match=r"unknown policy\.survey 'round'"):
        read_policy({"survey": {"round": 10}})
    with pytest.raises(UserError, match=r"policy\.evaluate is True; expected keys such as by_site"):
        read_policy({"evaluate": True})


@pytest.mark.slow
def test_real_processes_answer_a_survey_train_and_test_the_finished_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands of an operator, on a federation of three sites. One of them answers neither question."""
    values = {"method": "fedavg", "rounds": 1, "local_epochs": 1, "device": "cpu", "partition.clients": 3}
    settings = {"survey": True, "evaluate_only": True, "minimum": 2, "begin_with": 3}
    trial = plan_trial(tmp_path / "trial", with_values(Config(), values | {"data": "digits"}), settings)
    for name in trial.sites[:2]:
        file = trial.site_file(name)
        text = file.read_text().replace("policy: null", "policy: {survey: {round_to: 10}, evaluate: {}}")
        file.write_text(text)
    app, connection = str(trial.app), ["--connection", "federation"]
    monkeypatch.setenv("FLWR_HOME", str(trial.folder / "flower"))
    with trial:
        trial.start()
        assert main(["federate", "survey", app, *connection]) == 0
        assert f"{trial.sites[2]} gave no usable answer" in capsys.readouterr().out
        assert main(["federate", "run", app, *connection]) == 0
        assert main(["export", str(trial.folder / "run"), "-o", str(tmp_path / "model")]) == 0
        capsys.readouterr()
        assert main(["federate", "evaluate", str(tmp_path / "model"), app, *connection, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tested_by"] == list(trial.sites[:2])
    trained = json.loads((trial.folder / "run" / "summary.json").read_text())
    assert found["total"]["accuracy"] == pytest.approx(trained["accuracy"])  # all parts of a trial have the same tests
    for name in trial.sites:
        log = read_chain(trial.site_file(name).parent / "state" / "audit.jsonl")
        assert log.problem is None
        assert {"describe", "score", "train"} <= {entry["kind"] for entry in log.entries}
    counts = trial.folder / "run-survey" / COUNTS
    assert main(["diagnose", str(counts)]) == 0
    assert f"partition.path={counts}" in capsys.readouterr().out.replace("\n", "")
    command = ["choose", "--data", "synthetic", "--set", "data.classes=0,1,2,3,4,5,6,7,8,9", "--partition", "counts"]
    few = ["--rounds", "1", "--methods", "fedavg,fedvls", "--budget", "60s"]
    assert main([*command, "--set", f"partition.path={counts}", *few]) == 0
