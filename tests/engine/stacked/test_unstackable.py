"""What cannot be stacked runs one client after another, and a line says so."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import fedskew as fs
from fedskew.engine.stacked.trial import Trial, _are_close


@dataclass(frozen=True)
class Indexing(fs.Objective):
    """Cross entropy that takes the targets, padded ones included, for class numbers."""

    def loss(self, out: fs.Outputs, y: Tensor, client: fs.Client) -> Tensor:
        return -out.logits.log_softmax(-1)[torch.arange(len(y)), y].mean()


@dataclass(frozen=True)
class Gathering(fs.Objective):
    """The same by another way."""

    def loss(self, out: fs.Outputs, y: Tensor, client: fs.Client) -> Tensor:
        return -out.logits.log_softmax(-1).gather(1, y.unsqueeze(1)).mean()


@dataclass(frozen=True)
class Branching(fs.Objective):
    """A branch on a tensor's value, which vmap refuses."""

    def loss(self, out: fs.Outputs, y: Tensor, client: fs.Client) -> Tensor:
        loss = fs.losses.cross_entropy(out.logits, y)
        return loss / 2 if loss > 1 else loss


class Indexed(nn.Module):
    """A layer that returns two values, where its rule knows of one."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.pool = nn.Conv2d(1, 4, 3, padding=1), nn.MaxPool2d(2, return_indices=True)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.convolution(x))[0].flatten(1))


class Notices(fs.Callback):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_notice(self, line: str) -> None:
        self.lines.append(line)


@pytest.mark.parametrize("objective", [Indexing(), Gathering(), Branching()], ids=lambda o: type(o).__name__)
def test_it_gives_the_plain_engines_result(objective: fs.Objective) -> None:
    federation = fs.federation("digits", fs.Dirichlet(clients=5, beta=0.5), seed=0)
    notices = Notices()
    settings = {"rounds": 1, "local_epochs": 1}
    plain = fs.run(federation, objective, "dnn", engine="plain", **settings)
    stacked = fs.run(federation, objective, "dnn", engine="stacked", callbacks=[notices], **settings)
    assert [line for line in notices.lines if "cannot be stacked" in line]
    assert all("\n" not in line for line in notices.lines)
    for one, other in zip(plain.model.parameters(), stacked.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_model_that_fails_in_an_odd_way_gives_the_plain_engines_result() -> None:
    federation = fs.federation("digits", fs.Dirichlet(clients=5, beta=0.5), seed=0)
    model, notices, settings = Indexed(), Notices(), {"rounds": 1, "local_epochs": 1}
    plain = fs.run(federation, "fedavg", model, engine="plain", **settings)
    stacked = fs.run(federation, "fedavg", model, engine="stacked", callbacks=[notices], **settings)
    assert [line for line in notices.lines if "cannot be stacked" in line]
    for one, other in zip(plain.model.parameters(), stacked.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_trial_that_overflows_does_not_hide_other_differences() -> None:
    a = {"w": torch.tensor([math.inf, 1.0]), "b": torch.tensor([math.nan])}
    assert _are_close(a, {name: tensor.clone() for name, tensor in a.items()}, 1e-6)
    assert not _are_close(a, {**a, "w": torch.tensor([math.inf, 100.0])}, 1e-6)
    assert not _are_close(a, {**a, "w": torch.tensor([-math.inf, 1.0])}, 1e-6)


def test_rows_of_padding_are_found_in_data_with_more_samples_than_float32_can_count() -> None:
    samples = 2**25 + 4

    class Data:
        x, y = torch.zeros(1, 1).expand(samples, 1), torch.zeros(1)

        def __len__(self) -> int:
            return samples

    trial = object.__new__(Trial)
    trial._data = Data()  # type: ignore[assignment]
    assert trial._other_row() == samples - 1
