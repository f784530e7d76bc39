"""Inputs are laid out with their channels last where that is faster, and nothing else changes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from toy_runs import image_federation, linear, moved, norm_and_dropout, trained

from fedskew.data.federation import Federation
from fedskew.engine import DeviceSamples, Network
from fedskew.engine.model.channels_last import InputLayout, channels_last
from fedskew.losses import cross_entropy
from fedskew.methods.parts import Client, Mode, Objective, Outputs
from fedskew.models import Classifier

CPU = torch.device("cpu")


class Viewing(nn.Module):
    """As many write it: a `view` that needs the usual layout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution, self.out = nn.Conv2d(3, 5, 3), nn.Linear(180, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.convolution(x)).view(x.size(0), -1))


class Drawing(Viewing):
    """Random numbers in the order of memory."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(functional.dropout(self.convolution(x), 0.5, self.training).flatten(1))


def layout(federation: Federation, model: nn.Module) -> InputLayout:
    data = federation.dataset
    return InputLayout(Network(model), DeviceSamples(data, data.train, CPU))


@dataclass(frozen=True)
class Compact(Objective):
    """Small features, which it takes a `view` of: its own and the teacher's."""

    def companions(self) -> dict[str, Mode]:
        return {"teacher": "eval"}

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        assert out.features is not None
        assert out.companions["teacher"].features is not None
        both = (out.features.view(len(y), -1), out.companions["teacher"].features.view(len(y), -1))
        return cross_entropy(out.logits, y) + (both[0] - both[1]).square().mean()


COLOURED = image_federation(shape=(3, 8, 8))


@pytest.mark.parametrize(
    ("model", "suits"),
    [(norm_and_dropout(channels=3), True), (linear(features=192), False), (Viewing(), False), (Drawing(), False)],
    ids=["convolutions", "dense", "a view", "random numbers"],
)
def test_which_networks_it_suits(model: nn.Module, suits: bool) -> None:
    x = torch.randn(5, 3, 8, 8)
    found = layout(COLOURED, model).arrange(x)
    assert torch.equal(found, x)
    assert (found.stride(1) == 1) == suits


def test_one_channel_is_said_to_be_last() -> None:
    x = torch.randn(5, 1, 8, 8)
    assert torch.equal(channels_last(x), x)
    assert channels_last(x).stride() == (64, 1, 8, 1)
    convolved = nn.Conv2d(1, 3, 3)(channels_last(x))
    assert convolved.is_contiguous(memory_format=torch.channels_last)


def test_it_is_for_one_thread_and_float32() -> None:
    found = layout(COLOURED, norm_and_dropout(channels=3))
    x = torch.randn(5, 3, 8, 8)
    assert found.arrange(x.double()).is_contiguous()
    torch.set_num_threads(2)
    try:
        assert found.arrange(x).is_contiguous()
    finally:
        torch.set_num_threads(1)
    assert found.arrange(torch.zeros(5, 7)).shape == (5, 7)


@pytest.mark.parametrize("method", ["fedvls", "scaffold"])
def test_a_run_is_the_same_up_to_rounding(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> dict[str, Tensor]:
        state, _ = trained(COLOURED, method, norm_and_dropout(channels=3), precision="float32", lr=0.01)
        return state.model.params

    with_it = run()
    monkeypatch.setattr(InputLayout, "arrange", lambda self, x: x)
    without = run()
    assert 0 < moved(with_it, without) < 1e-4


def test_methods_never_see_it() -> None:
    model = Classifier(nn.Conv2d(3, 4, 3), nn.Sequential(nn.Flatten(), nn.Linear(144, 4)))
    assert layout(COLOURED, model).arrange(torch.randn(5, 3, 8, 8)).stride(1) == 1
    _, rows = trained(COLOURED, Compact(), model, precision="float32", lr=0.01)
    assert [row.diverged for row in rows] == [[], []]
