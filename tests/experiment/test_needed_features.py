"""A method that needs features refuses a model without them before any training, whichever part needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from linear_model import WithHead
from method_cases import by_kind

import fedskew as fs
from fedskew.experiment.round.record import RoundRow
from fedskew.flower.contract import Contract
from fedskew.flower.planning import resolve_config
from fedskew.methods.fedavg import CrossEntropy
from fedskew.methods.parts import Tensors, Updates
from fedskew.methods.stages import Notes, stage_without_training

SHORT: dict[str, Any] = {"rounds": 3, "local_epochs": 1, "lr": 0.01}


@pytest.fixture(scope="module")
def fed() -> fs.Federation:
    return fs.federation("digits", fs.Dirichlet(clients=4, beta=0.5), seed=0)


class Rounds(fs.Callback):
    """Counts the rounds."""

    def __init__(self) -> None:
        self.count = 0

    def on_round(self, row: RoundRow, rounds_ahead: int) -> None:
        self.count += row.round > 0


@pytest.mark.parametrize("method", ["ccvr", "fedprox+ccvr", "afl", "fed3r", "fedncm", "fedconcat"])
def test_server_rules_and_stages_refuse_it_before_the_first_round(
    method: str, fed: fs.Federation, tmp_path: Path
) -> None:
    watch = Rounds()
    with pytest.raises(fs.UserError) as error:
        fs.run(fed, method, WithHead(), callbacks=[watch], out=tmp_path / "run", **SHORT)
    expected = "needs features, but WithHead has no separate encoder; use a fedskew.Classifier(encoder, head)"
    assert str(error.value) == f"method {method!r} {expected}"
    assert watch.count == 0
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", by_kind())
def test_no_method_fails_in_a_later_round_for_want_of_features(method: str, fed: fs.Federation) -> None:
    watch = Rounds()
    settings = {**SHORT, "server_data": 0.05} if "fedlaw" in method else SHORT
    try:
        result = fs.run(fed, method, WithHead(), callbacks=[watch], **settings)
    except fs.UserError:
        assert watch.count == 0
    else:
        assert result.rounds == watch.count > 0


# -- a user's own parts ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class NeedySolver(fs.Solver):
    needs_features = True


@dataclass(frozen=True)
class NeedyPersonal(fs.Personal):
    needs_features = True


@dataclass(frozen=True)
class NeedyServer(fs.ServerRule):
    needs_features = True

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
        return updates.mean(), state


@dataclass(frozen=True)
class NeedySurvey(fs.Part):
    needs_features = True


@dataclass(frozen=True)
class NeedyObjective(CrossEntropy):
    needs_features = True


@dataclass(frozen=True)
class UnknownHead(CrossEntropy):
    head = "protos"


def test_an_unknown_head_of_an_own_objective_is_named(fed: fs.Federation) -> None:
    with pytest.raises(fs.UserError, match="chooses the head 'protos'; did you mean 'prototype'"):
        fs.run(fed, UnknownHead(), "dnn", **SHORT)


@dataclass(frozen=True)
class Staged(fs.Schedule):
    """A schedule that does not say that its stage needs features."""

    def stages(self, rounds: int, local_epochs: int, notes: Notes) -> Sequence[fs.Stage]:
        return [fs.Stage("first", 1, CrossEntropy()), self.last(rounds)]

    def last(self, rounds: int) -> fs.Stage:
        raise NotImplementedError


class StagedObjective(Staged):
    def last(self, rounds: int) -> fs.Stage:
        return fs.Stage("last", rounds, NeedyObjective())


class StagedServer(Staged):
    def last(self, rounds: int) -> fs.Stage:
        return stage_without_training("last", NeedyServer())


class StagedSurvey(Staged):
    def last(self, rounds: int) -> fs.Stage:
        return fs.Stage("last", rounds, CrossEntropy(), survey=NeedySurvey())


PARTS = [NeedySolver, NeedyPersonal, NeedyServer, StagedObjective, StagedServer, StagedSurvey]


@pytest.mark.parametrize("part", PARTS)
def test_every_part_can_declare_it(part: type[fs.Part], fed: fs.Federation) -> None:
    with pytest.raises(fs.UserError, match=f"method '{part.__name__.lower()}' needs features, but WithHead"):
        fs.run(fed, part(), WithHead(), **SHORT)


@pytest.mark.parametrize("method", ["ccvr", "fedncm", "fedconcat"])
def test_a_federation_refuses_it_before_it_is_planned(method: str) -> None:
    contract = Contract("image", tuple("0123456789"), (1, 8, 8), (0.5,), (0.5,))
    config = fs.Config(method=method, model="linear_model:make_with_head", rounds=3)
    with pytest.raises(fs.UserError, match=f"method '{method}' needs features, but WithHead"):
        resolve_config(config, contract, ["north", "south"])
