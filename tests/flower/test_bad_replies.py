"""A site that sends nonsense, nothing, or something that is not finite: the round ends with the others."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from in_process import Meddle, case, small_data

from fedskew.data import Dirichlet, Federation, federation
from fedskew.errors import UserError
from fedskew.experiment.config import Config, with_values
from fedskew.experiment.result import Result
from fedskew.flower.server_app import run_federation
from fedskew.flower.tensors import from_bytes, to_bytes
from fedskew.flower.wire import Facts, Garbled, from_records
from fedskew.methods import Tensors


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def split(data: Path) -> Federation:
    return federation(str(data), Dirichlet(beta=0.5, clients=3), seed=0)


def settings(method: str = "scaffold") -> Config:
    return with_values(
        Config(),
        {"method": method, "rounds": 2, "local_epochs": 1, "device": "cpu", "batch_size": 20, "partition.clients": 3},
    )


def spoiling(change: Callable[[Facts, Tensors], None], kind: str = "train", round: int = 1) -> Meddle:
    """Site 1 sends something else in one round."""

    def meddle(site: str, asked: Facts, facts: Facts, answer: bytes) -> tuple[Facts, bytes]:
        if site != "site-1" or asked["kind"] != kind or asked.get("key", {"round": round})["round"] != round:
            return facts, answer
        tensors = from_bytes(answer) if answer else {}
        change(facts, tensors)
        return facts, to_bytes(tensors) if tensors else answer

    return meddle


def not_a_number(facts: Facts, tensors: Tensors) -> None:
    next(iter(t for t in tensors.values() if t.is_floating_point())).view(-1)[0] = torch.nan


def infinite_loss(facts: Facts, tensors: Tensors) -> None:
    facts["loss"] = float("inf")


def endless_loss(facts: Facts, tensors: Tensors) -> None:
    facts["loss"] = 10**400


def infinite_uplink(facts: Facts, tensors: Tensors) -> None:
    tensors[next(n for n in tensors if n.startswith("uplink/"))].view(-1)[0] = torch.inf


def wrong_shape(facts: Facts, tensors: Tensors) -> None:
    tensors["trained:params/head.bias"] = torch.zeros(3)


def wrong_type(facts: Facts, tensors: Tensors) -> None:
    tensors["trained:params/head.bias"] = tensors["trained:params/head.bias"].double()


def missing(facts: Facts, tensors: Tensors) -> None:
    del tensors["trained:params/head.bias"]


def foreign(facts: Facts, tensors: Tensors) -> None:
    tensors["samples/x"] = torch.zeros(2)


def other_uplink(facts: Facts, tensors: Tensors) -> None:
    tensors["uplink/extra"] = torch.zeros(2)


def stale(facts: Facts, tensors: Tensors) -> None:
    facts["round"] = 0


def impossible_visits(facts: Facts, tensors: Tensors) -> None:
    facts["visits"] = -5


def countless_visits(facts: Facts, tensors: Tensors) -> None:
    facts["visits"] = 10**30


def garbage(facts: Facts, tensors: Tensors) -> None:
    facts["garbage"] = True


def eight_bits(facts: Facts, tensors: Tensors) -> None:
    """Of a type for which torch cannot tell whether it is finite."""
    name = next(n for n in tensors if n.startswith("uplink/"))
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)


def list_for_a_tally(facts: Facts, tensors: Tensors) -> None:
    tensors["tally/labels"] = torch.arange(10.0)


LEFT_OUT = [
    eight_bits,
    list_for_a_tally,
    wrong_shape,
    wrong_type,
    missing,
    foreign,
    other_uplink,
    stale,
    impossible_visits,
    countless_visits,
    garbage,
]


@pytest.mark.parametrize("change", LEFT_OUT)
def test_a_bad_update_is_left_out_and_its_site_named(
    change: Callable[[Facts, Tensors], None], data: Path, split: Federation, tmp_path: Path
) -> None:
    here = case(tmp_path, split, data, settings(), spoiling(change), minimum=2)
    result = run_federation(here.grid, here.context)
    assert list(result.history[2].failed) == ["site-1"]
    assert result.history[1].failed == {}
    assert_finite(result)


@pytest.mark.parametrize("change", [not_a_number, infinite_loss, endless_loss, infinite_uplink])
def test_an_update_that_is_not_finite_is_recorded_as_diverged(
    change: Callable[[Facts, Tensors], None], data: Path, split: Federation, tmp_path: Path
) -> None:
    here = case(tmp_path, split, data, settings(), spoiling(change), minimum=2)
    result = run_federation(here.grid, here.context)
    assert result.history[2].diverged == [1]
    assert result.history[2].failed == {}
    assert_finite(result)


def test_an_update_that_is_not_finite_does_not_count_towards_the_minimum(
    data: Path, split: Federation, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = case(tmp_path, split, data, settings(), spoiling(not_a_number), minimum=3, attempts=2)
    with pytest.raises(UserError, match="round 2 had too few good updates"):
        run_federation(here.grid, here.context)
    assert "round 2, attempt 1: 2 of 3 required updates can be used" in caplog.text


def huge_change(facts: Facts, tensors: Tensors) -> None:
    for name in tensors:
        if name.startswith("trained:params/"):
            tensors[name] *= 1e15


def huge_uplink(facts: Facts, tensors: Tensors) -> None:
    for name in tensors:
        if name.startswith("uplink/"):
            tensors[name] *= 1e15


def other_start(facts: Facts, tensors: Tensors) -> None:
    facts["start"] = "0" * 64


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (huge_change, "its change has norm .*, more than 30 times the usual"),
        (huge_uplink, "what it sends besides the model has norm .*, more than 30 times the usual"),
        (other_start, "it was trained from another model than the server sent"),
    ],
)
def test_a_finite_update_that_would_ruin_the_model_is_left_out(
    change: Callable[[Facts, Tensors], None], line: str, data: Path, split: Federation, tmp_path: Path
) -> None:
    here = case(tmp_path, split, data, settings(), spoiling(change), minimum=2)
    result = run_federation(here.grid, here.context)
    failed = result.history[2].failed or {}
    assert failed.keys() == {"site-1"}
    assert re.match(line, failed["site-1"])
    assert result.accuracy > result.history[1].accuracy / 2


def test_a_single_update_is_compared_with_the_round_before(data: Path, split: Federation, tmp_path: Path) -> None:
    spoil = spoiling(huge_change)

    def leave(site: str, asked: Facts, facts: Facts, answer: bytes) -> tuple[Facts, bytes]:
        if site != "site-1" and asked["kind"] == "train" and asked["key"]["round"] == 1:
            return {"failed": "away"}, b""
        return spoil(site, asked, facts, answer)

    here = case(tmp_path, split, data, settings("fedavg"), leave, minimum=1, attempts=1)
    with pytest.raises(UserError, match="round 2 had too few good updates"):
        run_federation(here.grid, here.context)


def test_an_old_update_with_the_current_round_s_number_is_left_out(
    data: Path, split: Federation, tmp_path: Path
) -> None:
    first: list[bytes] = []

    def replay(site: str, asked: Facts, facts: Facts, answer: bytes) -> tuple[Facts, bytes]:
        if site == "site-1" and asked["kind"] == "train":
            first.append(answer)
            return facts, first[0]
        return facts, answer

    here = case(tmp_path, split, data, settings("fedavg"), replay, minimum=2)
    result = run_federation(here.grid, here.context)
    assert result.history[1].failed == {}
    assert result.history[2].failed == {"site-1": "it repeats the update of an earlier round"}


def test_a_lie_beside_the_model_does_not_shut_out_a_site_that_sends_none(
    data: Path, split: Federation, tmp_path: Path
) -> None:
    """Of two sites nobody is the majority; but FedAvg declares that it sends nothing."""
    here = case(tmp_path, split, data, settings("fedavg"), spoiling(other_uplink), minimum=1, begin_with=3)
    here.grid.offline = {"site-0"}
    here.context.run_config["federation.begin_with"] = 2
    result = run_federation(here.grid, here.context)
    assert result.history[2].failed["site-1"] == "it sends 'uplink/extra', which the method does not declare"
    assert "site-2" not in result.history[2].failed


def test_a_tally_that_is_a_list_is_named_with_its_shape(data: Path, split: Federation, tmp_path: Path) -> None:
    here = case(tmp_path, split, data, settings("fedavg"), spoiling(list_for_a_tally), minimum=2)
    result = run_federation(here.grid, here.context)
    assert result.history[2].failed == {"site-1": "its 'tally/labels' has shape [10]; expected a single number"}


def test_what_a_site_writes_stays_on_one_line_of_the_log(
    data: Path, split: Federation, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def shout(site: str, asked: Facts, facts: Facts, answer: bytes) -> tuple[Facts, bytes]:
        if site == "site-1" and asked["kind"] == "train":
            return {"refused": "no\nfedskew: round 9 of 9: accuracy 100 %\x1b[2J" + "!" * 100_000}, b""
        return facts, answer

    here = case(tmp_path, split, data, settings("fedavg"), shout, minimum=2)
    result = run_federation(here.grid, here.context)
    told = result.history[1].failed["site-1"]
    assert told.startswith("no fedskew: round 9")
    assert len(told) < 400
    assert all(record.getMessage().isprintable() for record in caplog.records)


def test_a_message_too_deep_to_read_is_garbage() -> None:
    deep = '{"a":' * 100_000 + "1" + "}" * 100_000
    with pytest.raises(Garbled, match="it cannot be read"):
        from_records(RecordDict({"facts": ConfigRecord({"json": deep})}))


def test_a_message_of_another_form_is_garbage() -> None:
    with pytest.raises(Garbled, match=r"it has records \['other'\]; expected \['facts'\]"):
        from_records(RecordDict({"other": ConfigRecord({"json": "{}"})}))
    with pytest.raises(Garbled, match=r"its facts have the keys \['yaml'\]; expected \['json'\]"):
        from_records(RecordDict({"facts": ConfigRecord({"yaml": "{}"})}))


def test_a_bad_update_counts_as_little_as_an_absent_site(data: Path, split: Federation, tmp_path: Path) -> None:
    """Whether it lies or is away, the model is that of the others."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    lying = case(tmp_path / "a", split, data, settings(), spoiling(wrong_shape, round=0), minimum=2)
    away = case(tmp_path / "b", split, data, settings(), spoiling(garbage, round=0), minimum=2)
    some, others = (run_federation(c.grid, c.context).model.state_dict() for c in (lying, away))
    assert all(torch.equal(some[name], others[name]) for name in some)


def test_a_silent_site_is_not_waited_for_beyond_the_time(data: Path, split: Federation, tmp_path: Path) -> None:
    here = case(tmp_path, split, data, settings("fedavg"), minimum=2, round_timeout=0.2)

    def fall_silent(site: str, asked: Facts, facts: Facts, answer: bytes) -> tuple[Facts, bytes]:
        if asked["kind"] == "train":
            here.grid.silent = {"site-2"}
        return facts, answer

    here.grid.meddle = fall_silent
    result = run_federation(here.grid, here.context)
    assert result.history[-1].failed == {"site-2": "it did not reply within 0.2 s"}


@pytest.mark.parametrize("site_metrics", ["none", "total"])  # the round is requested alone, or with tests
def test_a_round_with_too_few_good_updates_is_trained_again(
    site_metrics: str, data: Path, split: Federation, tmp_path: Path
) -> None:
    spoil, spoiled = spoiling(garbage), []

    def once(site: str, asked: Facts, facts: Facts, answer: bytes) -> tuple[Facts, bytes]:
        sent = facts, answer
        if not spoiled:
            facts, answer = spoil(site, asked, dict(facts), answer)
            spoiled.extend([site] * ((facts, answer) != sent))
        return facts, answer

    results = []
    for folder, meddle in ((tmp_path / "spoiled", once), (tmp_path / "whole", None)):
        folder.mkdir()
        here = case(folder, split, data, settings(), meddle, minimum=3, attempts=2, site_metrics=site_metrics)
        results.append(run_federation(here.grid, here.context))
    assert spoiled == ["site-1"]
    assert [row.failed for row in results[0].history[1:]] == [{}, {}]
    assert results[0].evaluation == results[1].evaluation
    for some, other in zip(results[0].model.parameters(), results[1].model.parameters(), strict=True):
        assert torch.equal(some, other)


def test_too_few_good_updates_end_the_run_which_can_go_on(data: Path, split: Federation, tmp_path: Path) -> None:
    here = case(tmp_path, split, data, settings(), spoiling(garbage), minimum=3, attempts=2)
    reason = (
        "round 2 had too few good updates in 2 attempts, so the run does not restart by itself; the log has each "
        "site's reason; remove the cause, then start the run again to resume it"
    )
    with pytest.raises(UserError, match=re.escape(reason)):
        run_federation(here.grid, here.context)
    again = case(tmp_path, split, data, settings(), minimum=3)
    result = run_federation(again.grid, again.context)
    assert [row.round for row in result.history] == [0, 1, 2]


@pytest.mark.parametrize(
    ("site_says", "line"),
    [
        ({"site": "site-0"}, "its key belongs to 'site-1', but its site.yaml has the name 'site-0'"),
        ({"samples": 0}, "it reports 0 samples"),
        ({"samples": 2**40}, "it reports 1099511627776 samples; expected at most 1000000 (federation.most_samples)"),
        ({"refused": "the data do not meet the federation's contract: …"}, "the data do not meet"),
        ({"garbage": True}, "its message cannot be read"),
    ],
)
def test_a_site_is_let_in_or_told_why_not(
    site_says: Facts, line: str, data: Path, split: Federation, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = case(
        tmp_path, split, data, settings("fedavg"), spoiling(lambda f, t: f.update(site_says), "hello"), minimum=2
    )
    result = run_federation(here.grid, here.context)
    assert f"site-1 is not admitted: {line}" in caplog.text
    assert result.history[-1].clients == [0, 2]


def test_a_site_that_the_server_refuses_learns_the_reason(data: Path, split: Federation, tmp_path: Path) -> None:
    questions: list[Facts] = []

    def misname(site: str, asked: Facts, facts: Facts, answer: bytes) -> tuple[Facts, bytes]:
        if site == "site-1" and asked["kind"] == "hello":
            questions.append(asked)
            return facts | {"site": "site-0"}, answer
        return facts, answer

    here = case(tmp_path, split, data, settings("fedavg"), misname, minimum=2)
    run_federation(here.grid, here.context)
    assert "refused" not in questions[0]
    assert questions[1]["refused"] == "its key belongs to 'site-1', but its site.yaml has the name 'site-0'"


def test_a_superlink_that_fails_for_a_moment_is_asked_again(
    data: Path,
    split: Federation,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("fedskew.flower.superlink_calls._RETRY_SECONDS", (0.0, 0.0))
    here = case(tmp_path, split, data, settings("fedavg"))
    push, calls = here.grid.push_messages, itertools.count()

    def sometimes(messages: Iterable[Message]) -> Iterable[str]:
        if next(calls) % 3 == 2:
            raise ObjectPushError("object", 1, "session")
        return push(messages)

    monkeypatch.setattr(here.grid, "push_messages", sometimes)
    result = run_federation(here.grid, here.context)
    assert [row.failed for row in result.history[1:]] == [{}, {}]
    assert "the SuperLink failed (ObjectPushError" in caplog.text


def test_tests_and_surveys_that_cannot_be_are_left_out(
    data: Path, split: Federation, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def lie(site: str, asked: Facts, facts: Facts, answer: bytes) -> tuple[Facts, bytes]:
        if site != "site-1":
            return facts, answer
        if asked["kind"] == "evaluate":
            return {"confusion": [[-1]]}, b""
        if asked["kind"] == "survey":
            return facts, to_bytes({"label_counts": torch.zeros(3)})
        return facts, answer

    here = case(tmp_path, split, data, settings("pkd"), lie, evaluation="sites", site_metrics="class", test_data=None)
    result = run_federation(here.grid, here.context)
    assert (
        "the test results of site-1 are discarded: its confusion matrix does not have counts of 10 classes"
        in caplog.text
    )
    assert "the label counts of site-1 are discarded" in caplog.text
    assert_finite(result)


def test_a_run_without_any_usable_label_counts_ends(data: Path, split: Federation, tmp_path: Path) -> None:
    def lie(_site: str, asked: Facts, facts: Facts, answer: bytes) -> tuple[Facts, bytes]:
        return facts, to_bytes({"label_counts": torch.zeros(3)}) if asked["kind"] == "survey" else answer

    here = case(tmp_path, split, data, settings("pkd"), lie)
    with pytest.raises(UserError, match="no site sent usable label counts at the end of stage"):
        run_federation(here.grid, here.context)


def test_sites_that_tested_no_sample_report_no_tests(data: Path, split: Federation, tmp_path: Path) -> None:
    def report_nothing(_site: str, asked: Facts, facts: Facts, answer: bytes) -> tuple[Facts, bytes]:
        empty = {"confusion": [[0] * 10] * 10, "log_loss": 0.0}
        return (empty, b"") if asked["kind"] == "evaluate" else (facts, answer)

    config = settings("fedavg")
    here = case(tmp_path, split, data, config, report_nothing, evaluation="sites", site_metrics="class", test_data=None)
    with pytest.raises(UserError, match="no site reported usable test results; expected sites that have test samples"):
        run_federation(here.grid, here.context)


def assert_finite(result: Result) -> None:
    assert all(bool(t.isfinite().all()) for t in result.model.state_dict().values())
