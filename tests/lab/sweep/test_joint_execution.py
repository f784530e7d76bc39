"""Runs as one: each has the record, the folder and the end that it has by itself."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from fedskew.engine import RoundResult
from fedskew.engine.stacked import engine as stacked
from fedskew.engine.stacked.slots import Slots
from fedskew.experiment import together
from fedskew.experiment.config import run_name
from fedskew.experiment.preparation import Prepared
from fedskew.experiment.round.phases import RoundInProgress
from fedskew.experiment.round.server import Server
from fedskew.experiment.storage.run_folder import RunFolder
from fedskew.lab.sweep import execution, joint_execution
from fedskew.lab.sweep.bundles import bundled
from fedskew.lab.sweep.execution import execute
from fedskew.lab.sweep.job import Job, Outcome, Terms
from fedskew.lab.sweep.joint_execution import execute_together
from fedskew.losses import cross_entropy
from fedskew.methods import METHODS, Client, Objective, Outputs, method
from fedskew.methods.fedprox import FedProx


def quietly(*_: object) -> None:
    pass


@pytest.fixture
def seeds(tiny_job) -> Any:
    """Jobs that differ in their seed alone."""

    def make(number: int = 3, **values: Any) -> list[Job]:
        usual = {"precision": "float64", "model": "dnn", "engine": "stacked"}
        return [tiny_job(str(seed), seed=seed, **{**usual, **values}) for seed in range(number)]

    return make


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many runs each joint round had."""
    found: list[int] = []
    usual = together.joint_work

    def noted(works: Any) -> Any:
        found.append(len(works))
        return usual(works)

    monkeypatch.setattr(together, "joint_work", noted)
    return found


def ended(jobs: list[Job], terms: Terms, tell: Any = quietly) -> dict[str, Outcome]:
    return {jobs[place].label: outcome for place, outcome in execute_together(jobs, terms, tell)}


def same_but_for_time(one: Outcome, other: Outcome) -> bool:
    def told(outcome: Outcome) -> dict[str, Any]:
        assert outcome.record is not None
        apart = ("seconds", "date", "together")
        return {key: value for key, value in outcome.record.content.items() if key not in apart}

    return one.status == other.status and told(one) == told(other)


@pytest.mark.parametrize(
    ("method", "folders"),
    [("fedavg", False), ("fedvls", True), ("scaffold", False), ("scaffold", True), ("fedconcat", True)],
)
def test_the_records_are_those_of_runs_by_themselves(method: str, folders: bool, seeds, joined, tmp_path: Path) -> None:
    jobs = seeds(method=method, lr=0.05, rounds=2)
    terms = Terms(str(tmp_path / "together") if folders else None)
    heard: list[tuple[int, int]] = []
    outcomes = ended(jobs, terms, lambda place, done, *_: heard.append((place, done)))
    assert joined
    assert set(joined) == {3}
    for place, job in enumerate(jobs):
        alone = execute(job, Terms(str(tmp_path / "alone") if folders else None), quietly)
        assert same_but_for_time(outcomes[job.label], alone)
        record = outcomes[job.label].record
        assert record is not None
        assert record.content["together"] == 3
        assert record.seconds > 0
        told = [done for who, done in heard if who == place]
        assert told == list(range(len(told)))
    if folders:
        for kind in ("together", "alone"):
            assert len(list((tmp_path / kind).iterdir())) == 3


@pytest.mark.parametrize("method", ["fedavg", "fedvls", "scaffold"])
def test_runs_on_other_splits_share_a_stack_too(method: str, tiny_job, joined) -> None:
    """With other clients, more of them, and more of them a round."""
    splits = [
        {"partition__beta": 0.1},
        {"partition__clients": 7, "clients_per_round": 3, "seed": 1},
        {"partition__seed": 3, "clients_per_round": 2},
    ]
    usual = {"precision": "float64", "model": "dnn", "engine": "stacked", "method": method}
    jobs = [tiny_job(str(number), **usual, **split) for number, split in enumerate(splits)]
    assert bundled(jobs, 1, 8) == [jobs]
    outcomes = ended(jobs, Terms())
    assert joined == [3, 3, 3]
    for job in jobs:
        assert same_but_for_time(outcomes[job.label], execute(job, Terms(), quietly))
    assert len({outcome.record.content["split"] for outcome in outcomes.values() if outcome.record}) == 3


def test_runs_whose_rounds_are_of_other_kinds_go_on_one_after_another(seeds, joined, monkeypatch) -> None:
    """PKD finds other groups with each seed: its programs would be made anew for each run and round."""
    made: list[Slots] = []

    class Counted(Slots):
        def __init__(self, *given: Any) -> None:
            made.append(self)
            super().__init__(*given)

    monkeypatch.setattr(stacked, "Slots", Counted)
    pkd = {"name": "pkd", "warmup_rounds": 2, "expert_rounds": 4, "group_threshold": 1.0, "max_groups": 2}
    jobs = seeds(method=pkd, rounds=6)
    outcomes, as_one = ended(jobs, Terms()), len(made)
    assert joined.count(3) >= 2, "the warm-up"
    made.clear()
    for job in jobs:
        assert same_but_for_time(outcomes[job.label], execute(job, Terms(), quietly))
    groups = [outcome.record.content["notes"]["groups"] for outcome in outcomes.values() if outcome.record is not None]
    assert groups[0] != groups[1] != groups[2] != groups[0]
    assert as_one < len(made)


def test_nothing_of_a_round_is_held_while_the_next_one_is_trained(seeds, monkeypatch: pytest.MonkeyPatch) -> None:
    train, seen = Server.train, []

    def noting(self: Server, under_way: RoundInProgress) -> RoundResult:
        assert not any(tensor() is not None for tensor in seen)
        result = train(self, under_way)
        seen[:] = [weakref.ref(t) for t in (*result.trained.params.values(), result.loss)]
        return result

    monkeypatch.setattr(Server, "train", noting)
    assert {outcome.status for outcome in ended(seeds(2), Terms()).values()} == {"finished"}
    assert seen


def test_numbers_of_the_method_may_differ(tiny_job, joined) -> None:
    usual = {"precision": "float64", "model": "dnn", "engine": "stacked", "lr": 0.05}
    methods = [{"name": "fedvls+fedprox", "mu": mu, "distill_weight": 0.5} for mu in (0.0, 0.1, 0.4)]
    jobs = [tiny_job(str(place), method=method, **usual) for place, method in enumerate(methods)]
    outcomes = ended(jobs, Terms())
    assert joined == [3, 3, 3]
    records = []
    for job in jobs:
        assert same_but_for_time(outcomes[job.label], execute(job, Terms(), quietly))
        records.append(outcomes[job.label].record)
    assert len({str(record.content["config"]["method"]) for record in records}) == 3


@pytest.fixture
def watchful() -> Iterator[None]:
    """In the catalogue, a method that looks at its number."""

    @method("watchful")
    @dataclass(frozen=True)
    class Watchful(Objective):
        """Cross entropy, unless its weight is small."""

        weight: float = 1.0

        def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
            return (self.weight if self.weight > 0.1 else 0.1) * cross_entropy(out.logits, y)

    yield
    del METHODS["watchful"]


@pytest.mark.usefixtures("watchful")
def test_a_method_that_looks_at_its_number_is_trained_run_by_run(tiny_job, joined) -> None:
    usual = {"precision": "float64", "model": "dnn", "engine": "stacked", "lr": 0.05}
    jobs = [tiny_job(str(w), method={"name": "watchful", "weight": w}, **usual) for w in (0.5, 1.0)]
    outcomes = ended(jobs, Terms())
    assert joined == [2], "once, to see that it does not work"
    for job in jobs:
        assert same_but_for_time(outcomes[job.label], execute(job, Terms(), quietly))


def test_one_that_cannot_begin_leaves_the_others_to_go_on(seeds, joined, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = execution._prepared

    def refusing(job: Job, terms: Terms) -> Any:
        if job.config.seed == 1:
            raise ZeroDivisionError("no such split")
        return usual(job, terms)

    monkeypatch.setattr(execution, "_prepared", refusing)
    outcomes = ended(seeds(), Terms())
    assert [outcomes[label].status for label in "012"] == ["finished", "failed", "finished"]
    assert outcomes["1"].reason.startswith("ZeroDivisionError: no such split (test_joint_execution.py, line ")
    assert set(joined) == {2}


def test_one_that_fails_on_the_way_leaves_the_others_to_go_on(seeds, joined) -> None:
    jobs = seeds()

    def tell(place: int, done: int, *_: object) -> None:
        if (place, done) == (1, 2):
            raise OSError("disk full")

    outcomes = ended(jobs, Terms(), tell)
    assert [outcomes[label].status for label in "012"] == ["finished", "failed", "finished"]
    assert "disk full" in outcomes["1"].reason
    assert joined == [3, 3, 2]
    for label in "02":
        assert same_but_for_time(outcomes[label], execute(jobs[int(label)], Terms(), quietly))


def test_where_training_as_one_fails_it_shows_whose_round_it_was(seeds, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: FedProx, gradient: Any, params: Any, client: Any) -> Any:
        raise ArithmeticError("this solver is broken")

    outcomes = ended(seeds(method="fedprox"), Terms())
    assert {outcome.status for outcome in outcomes.values()} == {"finished"}
    monkeypatch.setattr(FedProx, "direction", broken)
    outcomes = ended(seeds(method="fedprox"), Terms())
    assert {outcome.status for outcome in outcomes.values()} == {"failed"}
    assert all("this solver is broken" in outcome.reason for outcome in outcomes.values())


def test_the_others_train_as_one_without_the_run_that_was_the_cause(seeds, joined, monkeypatch) -> None:
    usual = Server.train

    def failing(self: Server, under_way: RoundInProgress) -> RoundResult:
        work = under_way.work
        if any(work.of(assignment).key.seed == 1 for assignment in work.assignments):
            raise ArithmeticError("a bad seed")
        return usual(self, under_way)

    monkeypatch.setattr(Server, "train", failing)
    outcomes = ended(seeds(), Terms())
    assert [outcomes[label].status for label in "012"] == ["finished", "failed", "finished"]
    assert "a bad seed" in outcomes["1"].reason
    assert joined == [3, 2, 2]


def test_what_cannot_be_trained_as_one_is_tried_once(seeds, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def failing(works: Any) -> Any:
        tried.append(len(works))
        raise MemoryError("too many at once")

    monkeypatch.setattr(together, "joint_work", failing)
    jobs = seeds()
    outcomes = ended(jobs, Terms())
    assert tried == [3]
    for job in jobs:
        assert same_but_for_time(outcomes[job.label], execute(job, Terms(), quietly))


def test_a_stopped_bundle_continues_where_each_run_was(seeds, joined, tmp_path: Path, monkeypatch) -> None:
    jobs, terms = seeds(rounds=6, lr_decay=0.9), Terms(str(tmp_path), deadline=time.time() + 3600)
    late: list[bool] = []
    real = time.time
    monkeypatch.setattr(execution.time, "time", lambda: real() + 7200 * bool(late))

    def stop_after(rounds: int) -> Any:
        return lambda _, done, *__: late.append(True) if done == rounds else None

    assert execute(jobs[2], terms, lambda done, *_: stop_after(4)(0, done)).status == "stopped"
    late.clear()
    stopped = ended(jobs, terms, stop_after(2))
    assert {outcome.status for outcome in stopped.values()} == {"stopped"}
    assert [len(RunFolder(folder).rounds()) for folder in _folders(jobs, tmp_path)] == [3, 3, 6], (
        "one waited, and did its next"
    )
    assert stopped["2"].record is not None
    assert stopped["2"].record.rounds == 5
    late.clear()
    joined.clear()
    outcomes = ended(jobs, terms)
    assert joined == [2, 2, 2, 3], "who is behind catches up first"
    for job in jobs:
        assert same_but_for_time(outcomes[job.label], execute(job, Terms(), quietly))
    assert {outcome.status for outcome in ended(jobs, terms).values()} == {"finished"}
    assert joined == [2, 2, 2, 3], "finished runs are not run again"


def test_a_run_that_is_ahead_is_joined_at_once_where_its_rounds_are_alike(seeds, joined, tmp_path: Path) -> None:
    jobs, terms = seeds(2, rounds=4), Terms(str(tmp_path))

    def stop(done: int, *_: object) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(jobs[1], terms, stop)
    outcomes = ended(jobs, terms)
    assert joined == [2, 2, 1, 1]
    for job in jobs:
        assert same_but_for_time(outcomes[job.label], execute(job, Terms(), quietly))


def test_runs_whose_rounds_do_not_fit_are_led_to_their_end_one_after_another(tiny_job, joined) -> None:
    """An engine that went to and fro between them would make its programs anew each round."""
    usual = {"precision": "float64", "model": "dnn", "engine": "stacked"}
    jobs = [tiny_job(method, method=method, **usual) for method in ("fedavg", "fedlmd", "fedprox")]
    heard: list[tuple[int, int]] = []
    ended(jobs, Terms(), lambda place, done, *_: heard.append((place, done)))
    assert set(joined) == {1}
    assert [place for place, done in heard if done] == [0] * 3 + [1] * 3 + [2] * 3


def _folders(jobs: list[Job], parent: Path) -> list[Path]:
    return [parent / run_name(execution._prepared(job, Terms()).config) for job in jobs]


def test_ctrl_c_leaves_folders_that_can_be_continued(seeds, tmp_path: Path) -> None:
    jobs, terms = seeds(), Terms(str(tmp_path))

    def interrupt(place: int, done: int, *_: object) -> None:
        if (place, done) == (1, 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as held:
        ended(jobs, terms, interrupt)
    outcomes = ended(jobs, terms)
    for job in jobs:
        assert same_but_for_time(outcomes[job.label], execute(job, Terms(), quietly))
    assert held.value, "and with it all that the runs had open, had they not closed it"


def test_runs_with_engines_of_their_own_are_not_joined(seeds, joined, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of data that are not one another's."""

    def own(this: Prepared, _: object) -> Server:
        return Server(this.federation, this.method, this.model, this.config)

    monkeypatch.setattr(joint_execution, "_server", own)
    assert {outcome.status for outcome in ended(seeds(2), Terms()).values()} == {"finished"}
    assert joined == [1] * 6


def test_what_no_stack_trains_runs_one_after_another(seeds, joined) -> None:
    outcomes = ended(seeds(2, engine="plain"), Terms())
    assert {outcome.status for outcome in outcomes.values()} == {"finished"}
    assert not joined


def test_seconds_are_shared_out_by_the_samples_visited() -> None:
    class Result:
        def __init__(self, *visits: int) -> None:
            self.visits = np.array(visits)

    (_, one), (_, other) = together._seconds_shared([Result(10, 20), Result(90)], 12.0)  # type: ignore[list-item]
    assert one == pytest.approx(3.0)
    assert other == pytest.approx(9.0)
