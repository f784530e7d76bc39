"""What an engine is given and what it returns: one round's local training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedskew.engine.data.batches import BatchPlan, RoundKey, plan_batches
from fedskew.engine.model.network import ModelState
from fedskew.engine.optimisers import OPTIMISERS, LocalOptimiser
from fedskew.losses import IGNORE
from fedskew.methods.parts import Client, Half, Objective, Part, ServerRule, Solver, Tensors, Trained, unpack
from fedskew.randomness import fold

OPENING = "opening"
"""Under this name the sums of a client's opening pass go with what it keeps."""


@dataclass(frozen=True)
class LocalTraining:
    """How every client trains, as the user chose it."""

    epochs: int
    batch_size: int
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = None
    optimizer: str = "sgd"

    @property
    def optimiser(self) -> LocalOptimiser:
        return OPTIMISERS[self.optimizer](self.momentum, self.weight_decay)


@dataclass(frozen=True)
class Assignment:
    """One client's part of a round."""

    client: int
    samples: npt.NDArray[np.int64]
    """Its rows of the training data."""
    label_counts: npt.NDArray[np.int64]
    state: Tensors
    start: ModelState | None = None
    """Where it starts, on the host; None: at the model that is sent."""


@dataclass(frozen=True)
class RoundWork:
    """Train these clients from this model."""

    objective: Objective
    solver: Solver
    server: ServerRule
    sent: ModelState
    downlink: Tensors
    companions: Mapping[str, ModelState]
    """Models that earlier stages left, for objectives that use them."""
    assignments: Sequence[Assignment]
    local: LocalTraining
    key: RoundKey

    @property
    def parts(self) -> tuple[Part, Part, Part]:
        return self.objective, self.solver, self.server

    @property
    def members(self) -> list[Part]:
        """The parts, those of which others are made one by one."""
        return [member for part in self.parts for member in part.members]

    def client(self, label_counts: Tensor, state: Tensors) -> Client:
        """What the maths of a client may use, from all that goes with it."""
        kept = {name: t for name, t in state.items() if not name.startswith(f"{OPENING}/")}
        return Client(label_counts, self.sent.params, self.downlink, kept, unpack(OPENING, state))

    def end(self, trained: Trained, client: Client) -> tuple[Tensors, Tensors]:
        """What one client sends beside its model, and what it keeps."""
        uplink: Tensors = {}
        state: Tensors = {}
        for part in self.members:
            uplink |= part.uplink(trained, client)
            state |= part.next_state(trained, client)
        return uplink, state

    def plans(self, smallest: int) -> list[BatchPlan]:
        """The batches of each client; no wider than the largest client needs."""
        largest = max(len(a.samples) for a in self.assignments)
        width = min(self.local.batch_size, largest)
        return [
            plan_batches(a.samples, a.client, self.local.epochs, width, smallest, self.key) for a in self.assignments
        ]


@dataclass(frozen=True)
class RoundResult:
    """What the clients came back with; tensors have a leading axis of clients, in the order of the assignments."""

    trained: ModelState
    uplink: Tensors
    states: Tensors
    loss: Tensor
    """[K]: mean over the samples visited."""
    tally: Tensors
    visits: npt.NDArray[np.int64]
    """[K]: samples visited."""


class Engine(Protocol):
    """Executes a round's local training. These are all the attributes and methods that callers use."""

    name: str
    notices: list[str]
    """One line for each thing that the engine had to do differently from what the user chose."""

    def train(self, work: RoundWork) -> RoundResult:
        """Train the round's clients."""
        ...

    def prefetch(self, work: RoundWork) -> None:  # noqa: ARG002
        """Prepare a round that probably comes next while the device is busy. By default nothing is prepared."""
        return

    def close(self) -> None:
        """End the engine's processes and threads. By default it has none."""
        return


def clipped(direction: Tensors, clip_norm: float | None) -> Tensors:
    """One client's direction, scaled down to the largest norm allowed."""
    if clip_norm is None:
        return direction
    norm = torch.stack([d.square().sum() for d in direction.values()]).sum().sqrt()
    scale = (clip_norm / norm.clamp(min=1e-12)).clamp(max=1.0)
    return {name: d * scale for name, d in direction.items()}


def targets_of(y: Tensor, half: Half | None) -> Tensor:
    """Labels of the last axis with those beyond the half left out: every other sample, or all where that is none."""
    if half is None:
        return y
    second = torch.arange(y.shape[-1], device=y.device) % 2 == 1
    inside = torch.where(second if half == "second" else ~second, y, IGNORE)
    return torch.where((inside != IGNORE).any(dim=-1, keepdim=True), inside, y)


def companion(name: str, work: RoundWork, state: Tensors) -> ModelState:
    """The frozen model that an objective calls `name`."""
    if name == "teacher":
        return work.sent
    if name.startswith("state/"):
        return ModelState(unpack(name.removeprefix("state/"), state), work.sent.buffers)
    return work.companions[name]


def companion_key(key: Tensor) -> Tensor:
    """Frozen models in train mode draw dropout masks of their own."""
    return fold(key, 0x7EAC)


def perturbation_key(key: Tensor) -> Tensor:
    """What an objective draws for the features is nobody's dropout mask."""
    return fold(key, 0xFEA7)
