"""The reference engine: one client after another, one batch after another, in ordinary PyTorch."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedskew.accurate_sums import ACCURATE
from fedskew.engine.contract import (
    Assignment,
    Engine,
    PassKind,
    RoundResult,
    RoundWork,
)
from fedskew.engine.data.batches import BatchPlan, companion_key, half_targets, perturbation_key
from fedskew.engine.data.device import DeviceSamples
from fedskew.engine.data_passes import DataPass, client_sums
from fedskew.engine.model.channels_last import InputLayout
from fedskew.engine.model.layers import Between
from fedskew.engine.model.network import ModelState, Network
from fedskew.engine.optimisers import clip
from fedskew.methods.hook_results import (
    named_tensors,
    without_gradient_call,
    wrong_number,
    wrong_perturbation,
    wrong_tally,
    wrong_tensors,
)
from fedskew.methods.parts import (
    Client,
    LossPart,
    Mode,
    Objective,
    Outputs,
    Tensors,
    Trained,
    same_form,
    split_direction,
    uses_hook,
)
from fedskew.randomness import fold

if TYPE_CHECKING:
    from fedskew.engine.private_gradient import PrivateGradient


class PlainEngine(Engine):
    """Trains a round's clients one after another."""

    name = "plain"

    def __init__(self, network: Network, data: DeviceSamples, smallest_batch: int = 1) -> None:
        self._network = network
        self._data = data
        self._smallest = smallest_batch
        self._layout = InputLayout(network, data)
        self.notices: list[str] = []

    def train(self, work: RoundWork) -> RoundResult:
        plans = work.batch_plans(self._smallest, self._data)
        clients = [
            _ClientTraining(self._network, self._data, self._layout, work, assignment, plan).train()
            for assignment, plan in zip(work.assignments, plans, strict=True)
        ]
        uplinks, states = zip(*[client.finish() for client in clients], strict=True)
        numbers = [assignment.client for assignment in work.assignments]
        work.require_same_form("uplink", numbers, uplinks)
        work.require_same_form("next_state", numbers, states)
        return RoundResult(
            trained=ModelState(_stack([c.params for c in clients]), _stack([c.buffers for c in clients])),
            uplink=_stack(uplinks),
            states=_stack(states),
            loss=torch.stack([client.mean_loss() for client in clients]),
            tally=_stack([client.tally for client in clients]),
            visits=np.array([plan.visits for plan in plans]),
        )


_STAGED_NUMBERS = 1 << 19
"""The number of input values prepared at a time. More would not fit in a CPU's cache. Fewer would need more calls."""


class _ClientTraining:
    """One client's local training."""

    def __init__(
        self,
        network: Network,
        data: DeviceSamples,
        layout: InputLayout,
        work: RoundWork,
        assignment: Assignment,
        plan: BatchPlan,
    ) -> None:
        device = data.y.device
        self._network, self._data, self._layout, self._work, self._plan = network, data, layout, work, plan
        start = work.start(assignment)
        self.params = {name: p.to(device, copy=True) for name, p in start.params.items()}
        self.buffers = {name: b.to(device, copy=True) for name, b in start.buffers.items()}
        self.tally: Tensors = {}
        self._hooks_are_checked = False
        self._optimiser = work.local.local_optimiser
        self._optimiser_state = self._optimiser.new_state(list(self.params.values()))
        self._loss = torch.zeros((), dtype=ACCURATE[device.type], device=device)
        client_key = torch.tensor(plan.client_key, device=device)
        self._keys = fold(client_key, torch.arange(plan.steps, device=device))
        self._state = {name: t.to(device) for name, t in assignment.state.items()}
        counts = torch.tensor(assignment.label_counts, device=device)
        if work.local.is_private:
            counts = torch.ones_like(counts)  # no hook may know the label counts, whatever the method declares
        self._client = work.client(counts, self._state)

    def train(self) -> _ClientTraining:
        device = self._loss.device
        self._client = replace(self._client, opening=self._pass("opening"))
        with _seeded(device, self._plan.client_key):
            for key, (x, y) in zip(self._keys, self._batches(), strict=True):
                self._descend(x, y, key)
        return self

    def _pass(self, when: PassKind) -> Tensors:
        """Run the client's opening or closing pass with the current model, and return its sums."""
        if not self._work.needs_pass(when):
            return {}
        data_pass, model = DataPass(self._work, when), ModelState(self.params, self.buffers)
        return client_sums(self._network, self._data, self._layout, data_pass, self._plan, model, self._client)

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the inputs and labels of each step. Several steps are prepared at once."""
        plan, device = self._plan, self._loss.device
        is_sample = plan.indices >= 0
        entries = plan.indices.shape[1] * self._data.x[0].numel()
        at_once = max(1, _STAGED_NUMBERS // max(entries, 1))
        for first, end in pairwise([*range(0, plan.steps, at_once), plan.steps]):
            chunk = slice(first, end)
            lengths = is_sample[chunk].sum(axis=1)
            rows = torch.from_numpy(plan.indices[chunk][is_sample[chunk]]).to(device)
            keys = torch.from_numpy(np.repeat(plan.epoch_keys[chunk], lengths)).to(device)
            x, y = self._data.training_inputs(rows, keys), self._data.y[rows]
            sizes = lengths.tolist()
            yield from zip(torch.split(x, sizes), torch.split(y, sizes), strict=True)

    def _descend(self, x: Tensor, y: Tensor, key: Tensor) -> None:
        local, solver = self._work.local, self._work.solver
        gradient = self._gradient(x, y, key)
        direction = solver.direction(gradient, self.params, self._client)
        if solver.changes_state():
            direction, kept = split_direction(direction)
            self._state |= kept
            self._client = replace(self._client, state={**self._client.state, **kept})
        if gradient.recorded is None:
            raise without_gradient_call(solver)
        loss, tally = gradient.recorded
        if not self._hooks_are_checked:
            self._check_step(direction, tally)
        direction = clip(direction, local.clip_norm)
        ordered = [direction[name] for name in self.params]
        self._optimiser.step(list(self.params.values()), ordered, self._optimiser_state, local.lr)
        self._loss += loss.to(self._loss.dtype) * len(y)
        self.tally = {name: value + self.tally.get(name, 0) for name, value in tally.items()}

    def _gradient(self, x: Tensor, y: Tensor, key: Tensor) -> BatchGradient | PrivateGradient:
        """Return a function that computes gradients of this batch. With example-level privacy, they are private."""
        work, names = self._work, self._work.objective.companions()
        companions = {name: (work.companion(name, self._state), mode) for name, mode in names.items()}
        batch = self._network, work, self._client, companions, self.buffers
        if work.local.is_private:
            from fedskew.engine.private_gradient import PrivateGradient  # few runs need it

            return PrivateGradient(*batch, x, y, key, self._plan.full_batch)
        return BatchGradient(*batch, self._layout.arrange(x), y, key)

    def _check_step(self, direction: object, tally: Tensors) -> None:
        """Check what the method's hooks returned in the first step. Raise `UserError` if it has the wrong form."""
        if not same_form(direction, self.params):
            raise wrong_tensors(self._work.solver, "direction", direction, self.params)
        if any(count.dim() for count in named_tensors(self._work.objective, "tally", tally).values()):
            raise wrong_tally(self._work.objective, tally)
        self._hooks_are_checked = True

    def mean_loss(self) -> Tensor:
        return self._loss / max(self._plan.visits, 1)

    @torch.no_grad()
    def finish(self) -> tuple[Tensors, Tensors]:
        """Return what the client sends besides its model, and its state for the next round."""
        local = self._work.local
        dtype = next(iter(self.params.values())).dtype
        steps = torch.tensor(self._plan.steps, dtype=dtype, device=self._loss.device)
        trained = Trained(self.params, steps, local.lr, local.momentum, self._pass("closing"), local.optimizer)
        return self._work.finish_client(trained, self._client)


class BatchGradient:
    """Computes gradients of the loss on one batch. The first call also records the loss and the tally."""

    def __init__(
        self,
        network: Network,
        work: RoundWork,
        client: Client,
        companions: Mapping[str, tuple[ModelState, Mode]],
        buffers: Tensors,
        x: Tensor,
        y: Tensor,
        key: Tensor,
    ) -> None:
        """`companions` are the frozen models that the objective names. `key` is the random key of the step."""
        self._network, self._objective, self._client = network, work.objective, client
        self._buffers, self._x, self._y, self._key = buffers, x, y, key
        with torch.no_grad():
            self._frozen = frozen_outputs(network, companions, x, key)
        self.recorded: tuple[Tensor, Tensors] | None = None
        """The loss and the tally of the whole batch. None before the first gradient."""

    def __call__(self, at: Tensors, part: LossPart | None = None, /) -> Tensors:
        leaves = {name: p.detach().requires_grad_() for name, p in at.items()}
        targets, objective = half_targets(self._y, part), self._objective
        between = perturbation(objective, targets, self._client, self._key)
        out = self._network.forward(leaves, self._buffers, self._x, "train", self._key, between)
        out = Outputs(out.logits, contiguous(out.features), self._frozen)
        hook = "proximal" if part == "proximal" else "loss"
        loss = getattr(objective, hook)(out, targets, self._client)
        if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
            raise wrong_number(objective, hook, loss)
        if self.recorded is None:  # record the whole loss on the whole batch, even if this call is for one `LossPart`
            whole = loss if part is None else objective.loss(out, self._y, self._client)
            self.recorded = whole.detach(), objective.tally(out, self._y)
        grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        return {name: g.contiguous() for name, g in zip(leaves, grads, strict=True)}


def frozen_outputs(
    network: Network, companions: Mapping[str, tuple[ModelState, Mode]], x: Tensor, key: Tensor
) -> dict[str, Outputs]:
    """Return the outputs of the frozen models on a batch."""
    outputs = {}
    for name, (model, mode) in companions.items():
        buffers = {n: b.clone() for n, b in model.buffers.items()} if mode == "train" else model.buffers
        out = network.forward(network.protected(model.params), buffers, x, mode, companion_key(key))
        outputs[name] = Outputs(out.logits, contiguous(out.features))
    return outputs


def perturbation(objective: Objective, y: Tensor, client: Client, key: Tensor) -> Between | None:
    """Return the function with which the objective changes the features, or None if it does not change them."""
    if not uses_hook(objective, "perturbed"):
        return None

    def changed(features: Tensor) -> Tensor:
        returned: object = objective.perturbed(features, y, client, perturbation_key(key))
        if not isinstance(returned, Tensor) or returned.shape != features.shape:
            raise wrong_perturbation(objective, returned, features)
        return returned

    return changed


def contiguous(features: Tensor | None) -> Tensor | None:
    """Make features contiguous, because methods may call `view`."""
    return None if features is None else features.contiguous()


@contextlib.contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the global generators of torch, numpy and Python, from which users' code may draw, and restore them.

    The generator of Apple's GPU is seeded, but not restored.
    """
    with restored_generators([device] if device.type == "cuda" else []):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        elif device.type == "mps":
            torch.mps.manual_seed(seed)
        yield


@contextlib.contextmanager
def restored_generators(cuda_devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Restore the global generators of Python, numpy and torch (CPU and `cuda_devices`) after a `with` block."""
    python, numpy_ = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=cuda_devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_)  # noqa: NPY002


def _stack(clients: Sequence[Tensors]) -> Tensors:
    names = dict.fromkeys(name for tensors in clients for name in tensors)
    return {name: torch.stack([_entry(tensors, name, clients) for tensors in clients]) for name in names}


def _entry(tensors: Tensors, name: str, clients: Sequence[Tensors]) -> Tensor:
    """Return a client's tensor, or zeros if it has none: a client without steps has no tally."""
    if name in tensors:
        return tensors[name]
    return torch.zeros_like(next(other[name] for other in clients if name in other))
