"""One job: finished, stopped in time, or failed without harm to others."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedskew.data import load
from fedskew.experiment import shared_federations
from fedskew.experiment.config import run_name
from fedskew.experiment.shared_federations import hold_out_validation, shared_federation
from fedskew.lab.sweep import execution
from fedskew.lab.sweep.execution import execute
from fedskew.lab.sweep.job import Job, SweepSettings
from fedskew.lab.sweep.records import Outcome


def quietly(*_: object) -> None:
    pass


def test_a_job_that_cannot_run_says_why(tiny_job) -> None:
    outcome = execute(tiny_job(clients_per_round=9, partition__clients=None), SweepSettings(), quietly)
    assert outcome.status == "finished"
    refused = execute(tiny_job(model="mobilenetv3"), SweepSettings(), quietly)
    assert refused.status == "failed"
    assert "did you mean 'mobilenetv2'" in refused.reason


def test_a_bug_is_an_outcome_with_its_place(tiny_job, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("all clients left")

    monkeypatch.setattr(execution, "run_prepared", broken)
    outcome = execute(tiny_job(), SweepSettings(), quietly)
    assert outcome.status == "failed"
    assert outcome.reason.startswith("ZeroDivisionError: all clients left (test_execution.py, line ")


def test_a_run_that_is_stopped_has_a_record_and_continues(tiny_job, tmp_path: Path) -> None:
    job = tiny_job(rounds=4)
    seen: list[int] = []

    def tell(done: int, total: int, accuracy: float | None) -> None:
        seen.append(done)
        if done == 2:
            deadlines.clear()  # the next look at the clock is past the deadline

    deadlines = [time.time() + 3600]
    settings = SweepSettings(str(tmp_path), deadline=deadlines[0])
    real = time.time
    stopping = pytest.MonkeyPatch()
    stopping.setattr(execution.time, "time", lambda: real() if deadlines else real() + 7200)
    try:
        outcome = execute(job, settings, tell)
    finally:
        stopping.undo()
    assert outcome.status == "stopped"
    assert outcome.record is not None
    assert outcome.record.rounds == 2
    assert not outcome.record.finished
    seen.clear()
    finished = execute(job, SweepSettings(str(tmp_path)), lambda done, *_: seen.append(done))
    assert finished.status == "finished"
    assert seen == [2, 3, 4]
    whole = execute(job, SweepSettings(), quietly).record
    assert finished.record is not None
    assert whole is not None
    assert finished.record.curve == whole.curve


def test_nothing_begins_after_the_deadline(tiny_job) -> None:
    outcome = execute(tiny_job(data="no such data"), SweepSettings(deadline=time.time() - 1), quietly)
    assert outcome == Outcome("stopped")


def test_a_finished_run_keeps_no_checkpoints(tiny_job, tmp_path: Path) -> None:
    job = tiny_job(method="scaffold")
    assert execute(job, SweepSettings(str(tmp_path)), quietly).status == "finished"
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("digits-dirichlet0.5-scaffold-s0-")
    assert {path.name for path in folder.iterdir()} >= {"config.yaml", "summary.json", "model.safetensors"}
    assert not (folder / "checkpoint").exists()
    assert not (folder / "clients").exists()


def test_a_run_may_begin_with_the_model_of_another(tiny_job) -> None:
    trained = tiny_job(rounds=5)
    outcome = execute(
        Job(tiny_job(rounds=1, eval_local=True).config, "x", start=trained.config), SweepSettings(), quietly
    )
    before = execute(trained, SweepSettings(), quietly).record
    assert outcome.record is not None
    assert before is not None
    assert outcome.record.curve[0][1] == before.curve[-1][1]
    assert outcome.record.content["local"]["before"] == before.content["class_accuracy"]
    assert outcome.record.start_rounds == 5
    assert outcome.record.identity == Job(tiny_job(rounds=1).config, "", start=trained.config).identity


def test_validation_is_cut_from_the_training_data_and_the_test_set_is_out_of_reach(tiny_job) -> None:
    config = tiny_job().config
    usual, cut = shared_federation(config), shared_federation(config, 0.25)
    train, held = cut.dataset.train, cut.dataset.test
    assert len(train) + len(held) == len(usual.dataset.train)
    assert len(held) == pytest.approx(0.25 * len(usual.dataset.train), abs=10)
    rows = {row.tobytes() for row in usual.dataset.test.x}
    assert not any(row.tobytes() in rows for row in held.x)
    assert np.bincount(held.y, minlength=10).min() > 0


def test_a_validation_part_knows_its_domains() -> None:
    """Clients of one domain each are drawn from what is left."""
    digits = load("digits")
    domain = np.arange(len(digits.train)) % 2
    train = replace(digits.train, domain=domain)
    cut = hold_out_validation(replace(digits, train=train, domains=("even", "odd")), 0.25)
    for part in (cut.train, cut.test):
        assert part.domain is not None
        for sample in (0, 1, len(part) - 1):
            (row,) = np.flatnonzero((train.x == part.x[sample]).all(axis=tuple(range(1, train.x.ndim))))
            assert part.domain[sample] == domain[row]


def test_a_run_on_validation_data_is_not_taken_for_one_on_the_test_set(tiny_job, tmp_path: Path) -> None:
    job, settings = tiny_job(), SweepSettings(str(tmp_path))
    judged, tested = (execute(replace(job, validation=part), settings, quietly).record for part in (0.25, None))
    assert judged is not None
    assert tested is not None
    assert judged.content["split"] != tested.content["split"]
    assert tested.curve == execute(job, SweepSettings(), quietly).record.curve


def test_a_split_that_takes_long_is_drawn_once(tiny_job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_federations, "_MIN_CACHED_SECONDS", 0.0)
    config = tiny_job(partition__beta=0.37).config
    shared_federations._recent.clear()
    drawn = shared_federation(config)
    shared_federations._recent.clear()

    def never(*_: object) -> None:
        raise AssertionError("drawn again")

    monkeypatch.setattr(shared_federations, "build_federation", never)
    kept = shared_federation(config)
    assert kept.hash == drawn.hash
    assert kept.partition == drawn.partition
    assert kept.seed == drawn.seed


def test_workers_share_a_machine_without_processes_of_their_own(tiny_job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedskew.engine.choice.SHORT_RUN", -1.0)
    job = tiny_job()
    assert execution._prepare_job(job, SweepSettings(is_alone_on_machine=True)).config.engine == "auto"
    assert execution._prepare_job(job, SweepSettings(is_alone_on_machine=False)).config.engine == "stacked"
    assert run_name(job.config)


def test_a_gpu_that_answers_no_more_does_not_hide_the_outcome(tiny_job, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(execution.torch.cuda, "empty_cache", broken)
    assert execute(tiny_job(), SweepSettings(), quietly).status == "finished"
