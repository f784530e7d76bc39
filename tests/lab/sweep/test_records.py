"""What is kept of a run, and what can be found again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fedskew.errors import UserError
from fedskew.lab.sweep.execution import execute
from fedskew.lab.sweep.job import SweepSettings, merge_jobs
from fedskew.lab.sweep.records import Record, Records, RecordsFile, is_enough, read_folder, until


def quietly(*_: object) -> None:
    pass


@pytest.fixture
def record(tiny_job) -> Record:
    outcome = execute(tiny_job(eval_local=True), SweepSettings(), quietly)
    assert outcome.status == "finished"
    assert outcome.record is not None
    return outcome.record


def test_a_record_survives_json_and_has_what_a_table_needs(record: Record) -> None:
    again = Record.from_json(json.loads(json.dumps(record.content)))
    assert again.curve == record.curve
    assert [round_ for round_, _ in record.curve] == [0, 1, 2, 3]
    assert record.finished
    assert len(record.class_accuracy) == 10
    assert set(record.content["local"]["after"]) == {"0", "1", "2", "3"}
    assert record.content["local"]["drift_diversity"] > 0
    assert record.content["stages"]["train"]["rounds"] == 3
    assert record.content["compute"][-1] == pytest.approx(sum(s["compute"] for s in record.content["stages"].values()))
    assert {"cpu", "device"} <= record.content["machine"].keys()
    assert "torch" in record.content["versions"]


def test_a_record_is_found_again_by_what_was_asked_for(tiny_job) -> None:
    """Also where the run itself chose the model, or a method has got a parameter since then."""
    job = tiny_job()
    record = execute(job, SweepSettings(), quietly).record
    assert record is not None
    assert job.config.model == "auto"
    assert record.config.model == "dnn"
    older = {**record.content, "experiment": "0123456789ab"}
    older["config"] = {**older["config"], "method": {"name": "fedvls"}}
    assert Records([Record(older)]).get(job) is not None


def test_a_longer_run_contains_the_shorter(tiny_job, record: Record) -> None:
    shorter = execute(tiny_job(rounds=2), SweepSettings(), quietly).record
    assert shorter is not None
    assert until(record.curve, 2) == shorter.curve
    assert shorter.identity == record.identity


def test_of_one_experiment_the_longest_record_counts(tiny_job, record: Record) -> None:
    job = tiny_job()
    short = Record({**record.content, "rounds": [0, 1], "accuracy": [0.1, 0.2], "macro_f1": [0, 0],
                    "worst_class": [0, 0], "compute": [0, 1]})  # fmt: skip
    for order in ([short, record], [record, short]):
        known = Records(order)
        found = known.get(job)
        assert found is not None
        assert found.rounds == 3
        assert len(known) == 1
    assert Records([record]).get(replace(job, config=replace(job.config, seed=5))) is None


def test_who_wants_clients_looked_at_has_no_use_for_a_run_that_did_not(tiny_job, record: Record) -> None:
    """Drift diversity is not in the record of a run for accuracies, however long it was."""
    watching = tiny_job(eval_local=True)
    plain = Record({**record.content, "config": tiny_job().config.to_mapping(), "local": None})
    assert Records([plain]).get(watching) is None
    for order in ([plain, record], [record, plain]):
        assert Records(order).get(watching) is record
        assert len(Records(order)) == 1
    assert Records([record]).get(tiny_job()) is record


def test_one_run_serves_all_who_want_it(tiny_job) -> None:
    jobs = [tiny_job("short", eval_local=True), tiny_job("other", seed=1), tiny_job("long", rounds=7)]
    (both, other) = merge_jobs(jobs)
    assert (both.label, both.config.rounds, both.config.eval_local) == ("short", 7, True)
    assert other is jobs[1]
    updates = [replace(tiny_job(), start=tiny_job(rounds=rounds).config) for rounds in (2, 7)]
    for wanted in (updates, updates[::-1]):
        (update,) = merge_jobs(wanted)
        assert update.start is not None
        assert update.start.rounds == 7, "a model that was trained less does not serve who wants the other"


def test_a_job_that_was_merged_is_still_served_after_the_next_merge(tiny_job) -> None:
    """Eight rounds, evaluated every four, serve the job of four rounds, but not that of two."""
    jobs = [tiny_job(rounds=rounds, eval_every=every) for rounds, every in ((2, 2), (4, 2), (8, 4))]
    assert [(job.config.rounds, job.config.eval_every) for job in merge_jobs(jobs)] == [(4, 2), (8, 4)]


def test_a_shorter_run_of_a_method_with_stages_is_found(tiny_job) -> None:
    job = tiny_job(method="fedlmd-switch", rounds=2)
    record = execute(job, SweepSettings(), quietly).record
    assert record is not None
    wanted = replace(job, config=replace(job.config, rounds=5))
    assert Records([record]).get(wanted) is None
    assert Records([record]).longest(wanted) is record


@pytest.mark.parametrize("torn", ['{"format": 1, "acc', '{"format": 1, "config": {"data": {"name": "digits"}'])
def test_a_file_is_appended_to_and_a_torn_line_is_passed_over(tmp_path: Path, record: Record, torn: str) -> None:
    file = RecordsFile(tmp_path / "x" / "runs.jsonl")
    file.append(record)
    with file.path.open("a") as handle:
        handle.write(torn)
    assert len(file.read()) == 1
    file.append(record)
    assert [found.curve for found in file.read()] == [record.curve, record.curve]
    assert len(read_folder(tmp_path / "x")) == 1


def test_a_record_without_rounds_or_in_another_encoding_is_refused(tmp_path: Path, record: Record) -> None:
    path = tmp_path / "runs.jsonl"
    empty = {name: [] for name, value in record.content.items() if isinstance(value, list)}
    path.write_text(json.dumps({**record.content, **empty}) + "\n")
    with pytest.raises(UserError, match=r"runs.jsonl line 1: damaged record of a run"):
        RecordsFile(path).read()
    path.write_bytes(b"\xff\xfe{\0")
    with pytest.raises(UserError, match=r"runs.jsonl: not UTF-8; expected a JSON record of a run per line"):
        RecordsFile(path).read()


@pytest.mark.parametrize("line", ['{"format": 99}', '{"format": 1, "config": {}}', "[]"])
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(line + "\n\n\n")
    with pytest.raises(UserError, match=r"runs.jsonl line 1: .*record"):
        RecordsFile(path).read()


def test_a_run_that_was_not_evaluated_after_the_last_round_of_a_job_is_not_enough_for_it(tiny_job) -> None:
    """Otherwise its table would show the evaluation before, perhaps that of the initial model."""
    long = execute(tiny_job(rounds=4, eval_every=2), SweepSettings(), quietly).record
    short_job = tiny_job(eval_every=2)
    short = execute(short_job, SweepSettings(), quietly).record
    assert long is not None
    assert short is not None
    assert not is_enough(long, short_job)
    assert is_enough(long, tiny_job(rounds=2, eval_every=2))
    for order in ([long, short], [short, long]):
        known = Records(order)
        assert known.get(short_job) is short
        assert known.get(tiny_job(rounds=4)) is long
        assert list(known) == [long]
    assert Records([long]).get(short_job) is long
    assert len(merge_jobs([short_job, tiny_job(rounds=4, eval_every=2), tiny_job(rounds=2)])) == 2


def test_a_mean_of_the_last_rounds_is_that_of_the_job(tiny_job, record: Record) -> None:
    accuracies = dict(record.curve)
    assert record.mean_of_last("accuracy", tiny_job(mean_last=1).config) == accuracies[3]
    assert record.mean_of_last("accuracy", tiny_job(rounds=2, mean_last=1).config) == accuracies[2]
    assert record.mean_of_last("auroc", tiny_job().config) == record.content["auroc"]
    assert record.mean_of_last("auroc", tiny_job(rounds=2).config) is None
    older = Record({key: value for key, value in record.content.items() if key != "kappa"})
    assert older.mean_of_last("kappa", tiny_job().config) is None
    infinite = Record({**record.content, "log_loss": [None] * len(record.curve)})
    assert infinite.mean_of_last("log_loss", tiny_job().config) is None
