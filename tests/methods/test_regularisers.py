"""A regulariser's term is added to any objective's loss, in every stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from linear_clients import federation, played, settings
from torch import Tensor, nn

import fedskew as fs
from fedskew.errors import UserError
from fedskew.experiment.round.server import Server
from fedskew.losses import IGNORE, batch_mean, cross_entropy
from fedskew.methods import Client, Method, Objective, Outputs, Stage, Tensors, make_method
from fedskew.methods.feddecorr import FedDecorr
from fedskew.methods.fedvls import FedVLS
from fedskew.models import Classifier

NAMES = ("encoder.0.weight", "encoder.0.bias", "head.weight", "head.bias")


def two_layers() -> Classifier:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return Classifier(nn.Sequential(nn.Linear(3, 5), nn.Tanh()), nn.Linear(5, 4))


def weights(method: str | Method, params: dict[str, Any] | None = None, **changed: Any) -> list[Tensor]:
    server = Server(federation(), make_method(method, params), two_layers(), settings(**changed))
    return [played(server)[0][-1].model.params[name] for name in NAMES]


BASES = ("fedvls", "fedlmd", "moon", "balancefl", "fedlmd-switch+fedsam+fedavgm", "fedgr")
WEIGHTS = (("feddecorr", "feddecorr.beta"), ("fedmr", "fedmr.mu"))
ENGINES = ("plain", "stacked")


@pytest.mark.parametrize(
    ("base", "regulariser", "parameter", "engine"),
    [
        # Each pair of the three occurs; `make test` has each base, and each regulariser on each engine.
        pytest.param(
            base, *weight, ENGINES[(row + column) % 2], marks=pytest.mark.slow if (row // 2 + column) % 2 else ()
        )
        for row, base in enumerate(BASES)
        for column, weight in enumerate(WEIGHTS)
    ],
)
def test_with_weight_zero_it_changes_no_method(regulariser: str, parameter: str, base: str, engine: str) -> None:
    alone = weights(base, engine=engine)
    joined = weights(f"{base}+{regulariser}", {parameter: 0.0}, engine=engine)
    for a, b in zip(alone, joined, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    changed = weights(f"{base}+{regulariser}", {parameter: 1.0}, engine=engine)
    assert any(not torch.allclose(a, b) for a, b in zip(alone, changed, strict=True))


def test_the_losses_add_up() -> None:
    (stage,) = make_method("fedvls+feddecorr").stages(1, 1, {})
    rng = torch.Generator().manual_seed(0)
    logits, features = torch.randn(6, 4, generator=rng), torch.randn(6, 3, generator=rng)
    out = Outputs(logits, features, {"teacher": Outputs(logits.flip(0))})
    y, client = torch.tensor([0, 1, 1, 0, 1, 1]), Client(torch.tensor([3, 5, 0, 0]), {})
    expected = FedVLS().loss(out, y, client) + FedDecorr().term(out, y, client)
    torch.testing.assert_close(stage.objective.loss(out, y, client), expected)
    assert stage.objective.companions() == FedVLS().companions()
    assert stage.objective.extra_forwards(10, {}) == 10


def test_every_stage_of_a_schedule_has_the_term() -> None:
    stages = make_method("fedlmd-switch+feddecorr", {"switch_round": 1}).stages(3, 1, {})
    assert len(stages) == 2
    for stage in stages:
        assert [type(member).__name__ for member in stage.objective.members][1:] == ["FedDecorr"]


@dataclass(frozen=True)
class Shrink(fs.Regulariser):
    """Small logits."""

    strength: float = 0.1

    def term(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        return self.strength * batch_mean(out.logits.square().sum(dim=-1), y)


def test_a_regulariser_of_the_user_can_be_an_object() -> None:
    assert make_method(Shrink(0.5)).regulariser == Shrink(0.5)
    assert make_method(Shrink(0.5)).params == {"strength": 0.5}
    joined = Method("mine", objective=FedVLS(), regulariser=Shrink(0.0))
    for a, b in zip(weights(joined), weights("fedvls"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    assert [type(part).__name__ for part in joined.parts] == ["FedVLS", "Shrink", "SGD", "Mean"]


def test_two_regularisers_and_one_without_a_term_are_refused() -> None:
    with pytest.raises(UserError, match="'fpl' and 'fedmr' both set the regulariser"):
        make_method("fpl+fedmr")

    @dataclass(frozen=True)
    class Empty(fs.Regulariser):
        """No term."""

    with pytest.raises(UserError, match=r"Empty has no term\(\)"):
        make_method(Empty())


def test_its_parameters_are_found_by_its_name() -> None:
    method = make_method("fpl+fedlmd", {"fpl.temperature": 0.3, "fedlmd.temperature": 2.0})
    assert method.params["regulariser.temperature"] == 0.3
    assert method.params["objective.temperature"] == 2.0
    assert make_method("fpl+fedlmd", method.params) == method
    assert isinstance(method.stages(1, 1, {})[0], Stage)


@dataclass(frozen=True)
class Counting(Objective):
    """Cross entropy that counts the samples it sees."""

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        return cross_entropy(out.logits, y)

    def tally(self, out: Outputs, y: Tensor) -> Tensors:
        return {"counted": (y != IGNORE).sum()}


@pytest.mark.parametrize("engine", ["plain", "stacked"])
def test_what_the_objective_counts_is_still_counted(engine: str) -> None:
    method = Method("counting", Counting(), regulariser=FedDecorr())
    _, rows = played(Server(federation(), method, two_layers(), settings(engine=engine, batch_size=2)))
    assert [row.tally for row in rows] == [{"counted": row.visits} for row in rows]
