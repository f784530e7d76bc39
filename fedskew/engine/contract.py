"""The contract between engines and their callers: a round's work, its result, and the `Engine` protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedskew.engine.data.batches import BatchPlan, RoundKey, plan_batches
from fedskew.engine.data.device import DeviceSamples
from fedskew.engine.model.network import ModelState
from fedskew.engine.noise import Noise, keyed_noise
from fedskew.engine.optimisers import OPTIMISERS, LocalOptimiser
from fedskew.methods.hook_results import different_results, undeclared_state, unknown_companion, wrong_state
from fedskew.methods.parts import (
    Client,
    Objective,
    Part,
    ServerRule,
    Solver,
    Tensors,
    Trained,
    Weighting,
    collect,
    unpack,
    uses_hook,
)
from fedskew.methods.personal import PERSONAL, Personal, shared_tensors

PassKind = Literal["opening", "closing"]
"""The passes over a client's data: before its local training and after it."""

OPENING = "opening"
"""Key prefix of the sums of the opening pass within a client's state."""


@dataclass(frozen=True)
class LocalTraining:
    """The settings of local training in one round."""

    epochs: int
    batch_size: int
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = None
    optimizer: str = "sgd"
    """The name of the local optimiser."""
    batches: str = "shuffled"
    """How batches are drawn: `shuffled`, or `balanced` over the client's classes."""
    example_clip: float | None = None
    """Example-level privacy clips each sample's gradient to this norm. None without such privacy."""
    example_noise: float | None = None
    """The noise multiplier of example-level privacy. None without such privacy."""

    @property
    def is_private(self) -> bool:
        """Whether gradients are clipped sample by sample and get noise."""
        return self.example_noise is not None

    @property
    def example_privacy(self) -> tuple[float, float]:
        """Clip and noise multiplier of example-level privacy."""
        assert self.example_clip is not None
        assert self.example_noise is not None
        return self.example_clip, self.example_noise

    @property
    def local_optimiser(self) -> LocalOptimiser:
        """The optimiser that `optimizer` names, with these settings."""
        return OPTIMISERS[self.optimizer](self.momentum, self.weight_decay)


@dataclass(frozen=True)
class Assignment:
    """One client's part of a round."""

    client: int
    samples: npt.NDArray[np.int64]
    """Indices of the client's samples in the training data."""
    label_counts: npt.NDArray[np.int64]
    state: Tensors
    """The client's state from its last round, or its initial state."""
    start: ModelState | None = None
    """The model that the client starts from, in host memory. None means the model that the server sends, with the
    client's own personal tensors."""


@dataclass(frozen=True)
class RoundWork:
    """A round for an engine: train these clients, starting from this model."""

    objective: Objective
    solver: Solver
    server: ServerRule
    sent: ModelState
    """The model that the server sends to the clients."""
    downlink: Tensors
    """What the server sends besides the model."""
    companions: Mapping[str, ModelState]
    """Models from earlier stages of the run, by name, for objectives that use them."""
    assignments: Sequence[Assignment]
    local: LocalTraining
    key: RoundKey
    weighting: Weighting | None = None
    personal: Personal | None = None
    """The method's personal part. Engines receive None: `train_clients` first splits the work into phases."""
    personal_names: frozenset[str] = frozenset()
    """Names of the personal tensors, which stay on the clients. The method's other parts do not see these tensors."""
    noise: Noise = keyed_noise
    """The source of the noise that example-level privacy adds. At a real site, it must be secret."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The objective, the solver, the server rule, and the weighting if the method has one.

        A regulariser is a member of the objective.
        """
        parts = self.objective, self.solver, self.server
        return parts if self.weighting is None else (*parts, self.weighting)

    @property
    def members(self) -> list[Part]:
        """The parts, with a composed part (such as a regularised objective) split into its members."""
        return [member for part in self.parts for member in part.members]

    def needs_pass(self, when: PassKind) -> bool:
        """Return whether a part of the method needs this pass, because it overrides the hook of that name."""
        return any(uses_hook(part, when) for part in self.parts)

    def client(self, label_counts: Tensor, state: Tensors) -> Client:
        """Return what the method may know about one client.

        `state` may also hold the sums of the client's opening pass, with the prefix `OPENING`. These sums become
        `Client.opening`.
        """
        kept = {name: t for name, t in state.items() if not name.startswith((f"{OPENING}/", f"{PERSONAL}/"))}
        return Client(label_counts, self.exchanged.params, self.downlink, kept, unpack(OPENING, state))

    @property
    def exchanged(self) -> ModelState:
        """The tensors of the model that server and clients exchange: all but the personal ones."""
        if not self.personal_names:
            return self.sent
        return ModelState(
            shared_tensors(self.sent.params, self.personal_names),
            shared_tensors(self.sent.buffers, self.personal_names),
        )

    def start(self, assignment: Assignment) -> ModelState:
        """Return the model that a client starts from.

        This is `Assignment.start` if it is set. Otherwise, it is the model that the server sent, with the client's own
        personal tensors in place of the server's.
        """
        if assignment.start is not None:
            return assignment.start
        return self._with_personal(self.sent, assignment.state)

    def _with_personal(self, model: ModelState, state: Tensors) -> ModelState:
        own = unpack(PERSONAL, state)
        return _replace_tensors(model, own) if own else model

    def _is_model(self, kept: Tensors) -> bool:
        """Return whether these tensors of a client's state are a model.

        If the method has no personal tensors, these must be all parameters and nothing else. Otherwise, they must be
        one or more of the shared tensors.
        """
        if not self.personal_names:
            return kept.keys() == self.sent.params.keys()
        return bool(kept) and kept.keys() <= (self.sent.params.keys() | self.sent.buffers.keys()) - self.personal_names

    def companion(self, name: str, state: Tensors) -> ModelState:
        """Return the frozen model that the objective knows as `name`.

        `teacher` is the model that the server sent. `state/NAME` is a model in the client's state, completed by tensors
        of the sent model, such as buffers. Both have the client's own personal tensors. Any other name is a model from
        an earlier stage, which does not have them.
        """
        if name == "teacher":
            return self._with_personal(self.sent, state)
        if name.startswith("state/"):
            kept = unpack(name.removeprefix("state/"), state)
            if not self._is_model(kept):
                raise unknown_companion(self.objective, name, self.companions)
            return self._with_personal(_replace_tensors(self.sent, kept), state)
        if name not in self.companions:
            raise unknown_companion(self.objective, name, self.companions)
        return self.companions[name]

    def finish_client(self, trained: Trained, client: Client) -> tuple[Tensors, Tensors]:
        """Return what one client sends besides its model, and its state for the next round."""
        members = self.members
        if self.personal_names:
            trained = replace(trained, params=shared_tensors(trained.params, self.personal_names))
        uplink, state = collect(members, "uplink", trained, client), collect(members, "next_state", trained, client)
        for name, tensor in state.items():
            declared = client.state.get(name)
            if declared is None or tensor.shape != declared.shape or tensor.dtype != declared.dtype:
                owner = [part for part in members if name in part.next_state(trained, client)][-1]
                raise undeclared_state(owner, name) if declared is None else wrong_state(owner, name, tensor, declared)
        return uplink, state

    def require_same_form(
        self,
        hook: Literal["uplink", "next_state"],
        clients: Sequence[int],
        returned: Sequence[Tensors],
        stacked: bool = False,
    ) -> None:
        """Refuse tensors of a hook that have other names, shapes or types for one client than for another.

        `returned` has what the hook returned for each of the `clients`. With `stacked`, each entry has the tensors of
        several clients, and `clients` has the first one of each entry.
        """
        axes = 1 if stacked else 0
        forms = [{name: (t.shape[axes:], t.dtype) for name, t in tensors.items()} for tensors in returned]
        for position, form in enumerate(forms):
            if form != forms[0]:
                owners = [part for part in self.members if getattr(type(part), hook) is not getattr(Part, hook)]
                one, other = (
                    (clients[p], {name: t[0] if stacked else t for name, t in returned[p].items()})
                    for p in (0, position)
                )
                raise different_results(owners, hook, one, other)

    def batch_plans(self, smallest: int, data: DeviceSamples | None = None) -> list[BatchPlan]:
        """Plan the batches of each client.

        A full batch has `batch_size` samples, or as many as the round's largest client has, if that is fewer. A last
        batch of fewer than `smallest` samples is dropped. A round without epochs keeps all batches, because only
        passes in eval mode use them. Balanced batches need the training `data`, because they depend on the labels.
        """
        largest = max(len(a.samples) for a in self.assignments)
        width, epochs = min(self.local.batch_size, largest), self.local.epochs
        smallest = smallest if epochs else 1
        labels = data.host_labels if data is not None and self.local.batches == "balanced" else None
        return [
            plan_batches(
                a.samples, a.client, epochs, width, smallest, self.key, None if labels is None else labels[a.samples]
            )
            for a in self.assignments
        ]


@dataclass(frozen=True)
class RoundResult:
    """The results of K clients. Tensors have a leading axis of clients, in the order of the assignments."""

    trained: ModelState
    uplink: Tensors
    """What the clients send besides their models."""
    states: Tensors
    """What the clients keep for their next round."""
    loss: Tensor
    """[K]: mean loss over all visits to samples."""
    tally: Tensors
    """[K] each: the counts of `Objective.tally`, summed over the client's batches."""
    visits: npt.NDArray[np.int64]
    """[K]: number of visits to samples. Each epoch visits a sample again."""


class Engine(Protocol):
    """Executes a round's local training. Callers other than benchmarks use only what is declared here."""

    name: str
    notices: list[str]
    """Lines for the user. Each gives a reason why the engine cannot train in its usual way."""

    def train(self, work: RoundWork) -> RoundResult:
        """Train the round's clients."""
        ...

    def prefetch(self, work: RoundWork) -> None:  # noqa: ARG002
        """Prepare a round that probably comes next, while the device is busy. Does nothing by default."""
        return

    def close(self) -> None:
        """End the engine's processes and threads, if any."""
        return


def _replace_tensors(model: ModelState, others: Tensors) -> ModelState:
    return ModelState(
        {name: others.get(name, t) for name, t in model.params.items()},
        {name: others.get(name, t) for name, t in model.buffers.items()},
    )


def train_clients(engine: Engine, work: RoundWork) -> RoundResult:
    """Train the round's clients.

    If the method has a personal part, the returned models have only the shared tensors. The personal tensors are then
    in `states`, with the prefix `PERSONAL`. Loss and tally are those of the phase that trains shared parameters. The
    visits are those of all phases and of second models.
    """
    if work.personal is None:
        return engine.train(work)
    from fedskew.engine.personal_training import train_personal

    return train_personal(engine, work, work.personal)


def same_parts(parts: Sequence[Part], others: Sequence[Part]) -> bool:
    """Return whether both sequences have equal parts in the same order."""
    return len(parts) == len(others) and all(map(_same_part, parts, others))


def _same_part(one: Part, other: Part) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or not hasattr(one, "__dict__"):
        return False
    values, others = vars(one), vars(other)
    return values.keys() == others.keys() and all(_same_value(values[name], others[name]) for name in values)


def _same_value(one: object, other: object) -> bool:
    if one is other:
        return True
    if isinstance(one, Part) and isinstance(other, Part):
        return _same_part(one, other)
    try:
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
        return type(one) is type(other) and bool(one == other)
    except (TypeError, RuntimeError, ValueError):
        return False
