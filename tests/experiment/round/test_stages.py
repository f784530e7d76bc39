"""Methods that train in stages: the order of rounds, their models, clients and notes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from linear_clients import federation, linear_model, settings
from toy_runs import advance, finished, image_federation, linear, same_bits, server, trained

from fedskew.errors import UserError
from fedskew.experiment.preparation import prepare
from fedskew.experiment.round.state import RunState
from fedskew.losses import IGNORE
from fedskew.methods import Method
from fedskew.methods.fedavg import CrossEntropy
from fedskew.methods.feddisco import FedDisco
from fedskew.methods.parts import Client, Part, Reveals, Seen, ServerRule, Tensors, Trained, Updates
from fedskew.methods.pkd import weak_groups
from fedskew.methods.stages import Notes, Schedule, Stage, Survey
from fedskew.randomness import fold, normal

PKD = {"groups": [[0, 3], [1, 2]], "warmup_rounds": 1, "expert_rounds": 2}
ENGINES = pytest.mark.parametrize("engine", ["plain", "stacked"])


@ENGINES
def test_pkd_goes_through_its_stages(engine: str) -> None:
    federation = image_federation()
    this = server(federation, "pkd", linear(), PKD, rounds=3, engine=engine)
    state = this.start()
    assert this.rounds_left(state) == 1 + 2 * 2 + 2
    state, rows = finished(this, state)
    stages = ["warm-up", "expert 0", "expert 0", "expert 1", "expert 1", "distil", "distil"]
    assert [row.stage for row in rows] == stages
    assert [row.model for row in rows] == ["global", *["expert.0"] * 2, *["expert.1"] * 2, "global", "global"]
    assert [row.round for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert {tuple(row.clients) for row in rows if row.stage == "expert 0"} == {(0, 2, 4)}
    assert {tuple(row.clients) for row in rows if row.stage == "expert 1"} == {(0, 1, 2, 3)}
    assert sorted(state.models) == ["expert.0", "expert.1", "global"]
    group = federation.restrict((0, 3))
    assert rows[1].visits == 2 * group.sizes.sum()


def test_an_expert_trains_on_its_group_alone() -> None:
    """A federation that never had the other samples gives the same expert."""
    federation = image_federation()
    params = {**PKD, "groups": [[0, 3]], "expert_rounds": 1}
    this = server(federation, "pkd", linear(), params)
    after_warmup, _ = advance(this, this.start())
    with_expert, _ = advance(this, after_warmup)
    alone = server(federation.restrict((0, 3)), "pkd", linear(), params)
    again, _ = advance(alone, after_warmup)
    assert same_bits(replace(with_expert), replace(again))
    bias = with_expert.models["expert.0"].model.params["head.bias"] - after_warmup.model.params["head.bias"]
    assert bias[[0, 3]].abs().min() > 0
    plain = server(federation, "pkd", linear(), params, weight_decay=0.0)
    start, _ = advance(plain, plain.start())
    expert, _ = advance(plain, start)
    change = expert.models["expert.0"].model.params["head.bias"] - start.model.params["head.bias"]
    assert torch.equal(change[[1, 2]], torch.zeros(2, dtype=torch.float64))


def test_the_groups_that_pkd_finds_are_noted() -> None:
    federation = image_federation()
    this = server(federation, "pkd", linear(), {"warmup_rounds": 1, "expert_rounds": 1}, rounds=2)
    state, row = advance(this, this.start())
    data = this._runtimes.train_samples
    rows = np.concatenate(federation.indices)
    model = this.network.module(state.model)
    with torch.no_grad():
        probability = model(data.inputs(torch.from_numpy(rows))).softmax(dim=1).numpy()
    y = federation.dataset.train.y[rows]
    expected = weak_groups(np.stack([probability[y == c].mean(axis=0) for c in range(4)]), 2.0)
    assert row.notes["groups"] == [list(group) for group in expected]
    assert state.notes == row.notes
    recorded = np.array(row.survey["probability"])
    np.testing.assert_allclose(recorded, [probability[y == c].mean(axis=0) for c in range(4)], rtol=1e-5)
    assert row.survey.keys() == {"probability"}, "nobody's label counts"
    assert state.notes.keys() == {"groups"}, "what checkpoints keep and sites are sent"
    _, rows_after = finished(this, state)
    assert [r.stage for r in rows_after] == [*(f"expert {i}" for i in range(len(expected))), "distil"]
    assert not any(r.survey for r in rows_after), "it is recorded once"


def test_a_class_without_samples_has_no_recorded_probabilities() -> None:
    probability = np.array([[0.75, 0.25], [np.nan, np.nan]])
    assert Survey(np.array([[3, 0]]), probability).to_record() == {
        "survey": {"probability": [[0.75, 0.25], [None, None]]}
    }
    assert Survey(np.array([[3, 0]])).to_record() == {}


def test_fedlmd_switches_at_its_round() -> None:
    _, rows = trained(image_federation(), "fedlmd-switch", linear(), {"switch_round": 1}, rounds=3)
    assert [row.stage for row in rows] == ["teacher-free", "teacher", "teacher"]
    _, rows = trained(image_federation(), "fedlmd-switch", linear(), {"switch_round": 0}, rounds=2)
    assert [row.stage for row in rows] == ["teacher", "teacher"]


@dataclass(frozen=True)
class Brightness(Part):
    """A survey: the sum of every client's inputs to the head, and nothing else."""

    sends = "sum of features"

    def opening(self, seen: Seen, client: Client) -> Tensors:
        real = (seen.y != IGNORE).unsqueeze(-1)
        return {"sum": torch.where(real, seen.out.required_features, 0.0).sum().view(1)}

    def uplink(self, trained: Trained, client: Client) -> Tensors:
        return {"sum": client.opening["sum"]}


@dataclass(frozen=True)
class Jitter(ServerRule):
    """Replaces the head's bias by random numbers, and counts its rounds."""

    reveals: ClassVar[Reveals] = "nothing"

    def server_state(self, params: Tensors) -> Tensors:
        return {"jitters": torch.zeros(())}

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
        bias = normal(fold(torch.tensor(updates.key), torch.arange(len(sent["head.bias"]))))
        return {**updates.mean(), "head.bias": bias.to(sent["head.bias"])}, {"jitters": state["jitters"] + 1}


@dataclass(frozen=True)
class TwoRules(Schedule):
    """One round of training, a survey, two rounds with another server rule, and one of training again."""

    sends = "sum of features, once"

    def stages(self, rounds: int, local_epochs: int, notes: Notes) -> Sequence[Stage]:
        first = Stage("train", 1, CrossEntropy(), survey=Brightness())
        rest = Stage("jitter", 2, CrossEntropy(), server=Jitter()), Stage("again", 1, CrossEntropy())
        return [first, *rest] if "dark" in notes else [first]

    def conclude(self, stage: Stage, survey: Survey) -> Notes:
        order = survey.answers["sum"].flatten().argsort()
        return {"dark": survey.clients[int(order[0])], "key": survey.key, "sums": survey.answers["sum"].tolist()}


def test_a_stage_has_its_own_server_rule_and_a_survey_of_any_kind() -> None:
    federation = image_federation()
    runs = {engine: server(federation, TwoRules(), linear(), engine=engine) for engine in ("plain", "stacked")}
    ends = {engine: finished(this) for engine, this in runs.items()}
    state, rows = ends["plain"]
    assert [row.stage for row in rows] == ["train", "jitter", "jitter", "again"]
    inputs = runs["plain"]._runtimes.train_samples
    sums = [float(inputs.inputs(torch.from_numpy(own)).sum()) for own in federation.indices]
    np.testing.assert_allclose(np.ravel(state.notes["sums"]), sums, rtol=1e-9)
    assert state.notes["dark"] == int(np.argmin(sums))
    assert state.models["global"].server_state["jitters"] == 2, "in its own stage only"
    stacked, _ = ends["stacked"]
    torch.testing.assert_close(stacked.model.params, state.model.params, rtol=0, atol=1e-9)
    assert rows[1].survey is None


def test_the_servers_numbers_depend_on_seed_and_round_only() -> None:
    def biases(seed: int, rounds: int) -> list[list[float]]:
        this, found = server(image_federation(), TwoRules(), linear(), seed=seed), []
        state = this.start()
        for _ in range(rounds):
            state, row = advance(this, state)
            if row.stage == "jitter":
                found.append(state.model.params["head.bias"].tolist())
        return found

    both = biases(0, 3)
    assert both[0] != both[1]
    assert biases(0, 2) == both[:1]
    assert biases(1, 2) != both[:1]


def test_a_run_that_is_resumed_between_stages_ends_with_the_same_bits() -> None:
    this = server(image_federation(), TwoRules(), linear())
    whole, _ = finished(this)
    state, _ = advance(this, this.start())
    state, _ = advance(this, state)
    saved = RunState.restore(state.tensors(), state.meta(), state.clients, torch.device("cpu"))
    resumed, _ = finished(server(image_federation(), TwoRules(), linear()), saved)
    assert same_bits(whole, resumed)


@dataclass(frozen=True)
class SkewedBrightness(Brightness):
    """A survey that also reveals something about the labels."""

    reveals: ClassVar[Reveals] = "label skew"


@dataclass(frozen=True)
class MuteBrightness(Brightness):
    """A survey that does not declare what it sends."""

    sends = ""


@dataclass(frozen=True)
class MuteRule(Jitter):
    """A server rule that does not declare what it sends."""

    def uplink(self, trained: Trained, client: Client) -> Tensors:
        return {"labels": client.label_counts}


def scheduled(stage: Stage, declared_sends: str, declared_reveals: Reveals) -> Schedule:
    @dataclass(frozen=True)
    class Scheduled(Schedule):
        sends = declared_sends
        reveals: ClassVar[Reveals] = declared_reveals

        def stages(self, rounds: int, local_epochs: int, notes: Notes) -> Sequence[Stage]:
            return [stage]

    return Scheduled()


def prepare_method(method: Method) -> None:
    prepare(settings(), federation(), method, linear_model())


@pytest.mark.parametrize("weighting", [None, FedDisco()])
@pytest.mark.parametrize(
    ("sends", "reveals", "problem"),
    [
        ("sum of features", "nothing", "reveals label skew; expected the method's schedule to declare that in `rev"),
        ("", "label skew", "sends sum of features; expected the method's schedule to declare that in `sends`"),
        ("sum of features of each class", "label skew", "sends sum of features; expected the method's schedule"),
    ],
)
def test_a_stage_that_sends_or_reveals_more_than_its_schedule_declares_is_refused(
    sends: str, reveals: Reveals, problem: str, weighting: FedDisco | None
) -> None:
    """FedDisco also sends something, and it reveals the label skew, but that declares nothing for the survey."""
    stage = Stage("train", 2, CrossEntropy(), survey=SkewedBrightness())
    with pytest.raises(UserError, match=f"stage 'train' of method 'mine' has SkewedBrightness, which {problem}"):
        prepare_method(Method("mine", scheduled(stage, sends, reveals), weighting=weighting))
    prepare_method(Method("mine", scheduled(stage, "norms, sum of features", "label skew"), weighting=weighting))


@pytest.mark.parametrize(
    ("stage", "part"),
    [
        (Stage("train", 2, CrossEntropy(), survey=MuteBrightness()), "MuteBrightness"),
        (Stage("train", 2, CrossEntropy(), server=MuteRule()), "MuteRule"),
    ],
)
def test_a_part_of_a_stage_with_an_uplink_must_declare_it_itself(stage: Stage, part: str) -> None:
    """The sites of a federation would refuse to send it, in the middle of the run."""
    with pytest.raises(UserError, match=f"'mine' has {part}, which does not declare what its uplink\\(\\) sends;"):
        prepare_method(Method("mine", scheduled(stage, "sum of features", "label counts")))


def test_an_unknown_survey_is_refused() -> None:
    stage = Stage("train", 2, CrossEntropy(), survey="histograms")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="has the survey 'histograms'; expected labels, predictions or a part"):
        prepare_method(Method("mine", scheduled(stage, "sum of features", "label counts")))


@pytest.mark.parametrize(
    ("stage", "problem"),
    [
        (Stage("rare", 1, CrossEntropy(), labels=(0,)), "stage 'rare' of method 'silent' trains on some labels only"),
        (
            Stage("count", 1, CrossEntropy(), survey="labels"),
            "stage 'count' of method 'silent' has the survey 'labels'",
        ),
        (Stage("count", 1, CrossEntropy(), survey="predictions"), "has the survey 'predictions'"),
    ],
)
def test_a_stage_that_counts_labels_needs_a_method_that_declares_it(stage: Stage, problem: str) -> None:
    """Sites would refuse to count, in the middle of the run."""

    @dataclass(frozen=True)
    class Silent(Schedule):
        def stages(self, rounds: int, local_epochs: int, notes: Notes) -> Sequence[Stage]:
            return [stage]

    @dataclass(frozen=True)
    class Declared(Silent):
        reveals: ClassVar[Reveals] = "label counts"

    with pytest.raises(UserError, match=f"{problem}, which reveals label counts; expected the method's schedule"):
        server(image_federation(), Silent(), linear()).start()
    server(image_federation(), Declared(), linear()).start()
