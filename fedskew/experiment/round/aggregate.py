"""Aggregate the updates of a round's clients into the next model.

A client with numbers that are not finite has diverged, and its update is discarded. If the server's step with the other
updates is not finite, the round changes neither the model nor the clients' states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from fedskew.accurate_sums import ACCURATE
from fedskew.data.federation import Federation
from fedskew.engine import Fetch, ModelState, RoundKey, RoundResult, to_device
from fedskew.experiment.config import Config
from fedskew.experiment.round.plan import RoundPlan
from fedskew.experiment.round.server_samples import server_samples
from fedskew.experiment.round.state import RunState, ServerModel
from fedskew.methods import Tensors, Updates
from fedskew.methods.fedavg import AVERAGES
from fedskew.methods.parts import server_step, weigh_updates, weighted_mean
from fedskew.randomness import integer_key

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class TrainingReport:
    """The results of a round's training that the host needs."""

    finite: BoolArray
    """[clients]: whether all numbers of a client are finite. A buffer may keep infinities that the server sent."""
    loss: npt.NDArray[np.float64]
    """[clients]: each client's mean local loss."""
    tally: dict[str, float]
    """Counts that the method keeps during training, summed over the clients."""


class PendingReport:
    """A report on its way to the host. It takes one transfer from the device, unless something is not finite."""

    def __init__(self, result: RoundResult, sent: ModelState, server_update: Sequence[torch.Tensor] = ()) -> None:
        """`sent` is the model that the clients received.

        `server_update` has the tensors that the server computed optimistically, before it had this report.
        """
        self._result, self._sent, self._server_update = result, sent, server_update
        updates = [*result.trained.params.values(), *result.trained.buffers.values(), *result.uplink.values()]
        device = result.loss.device
        numbers = [
            _magnitude(updates, device),
            _magnitude(list(result.states.values()), device),
            _magnitude(server_update, device),
            *map(torch.sum, result.tally.values()),
        ]
        accurate = ACCURATE[device.type]
        self._numbers = Fetch(
            {"": torch.cat([result.loss.to(accurate), *(n.to(device).to(accurate).view(1) for n in numbers)])}
        )

    def read(self) -> TrainingReport:
        """Wait for the report."""
        numbers, clients = self._numbers.read()[""].numpy(), len(self._result.loss)
        loss, magnitudes, tally = np.split(numbers, [clients, clients + 3])
        updates_finite = np.isfinite(magnitudes[:2]).all()
        finite = np.isfinite(loss) if updates_finite else _finite_by_client(self._result, self._sent)
        return TrainingReport(finite, loss, dict(zip(self._result.tally, tally.tolist(), strict=True)))

    def server_update_is_finite(self) -> bool:
        """Whether the `server_update` that this report was made with is finite."""
        magnitude = self._numbers.read()[""][len(self._result.loss) + 2]
        return bool(magnitude.isfinite()) or all_finite(self._server_update)


@dataclass(frozen=True)
class Aggregated:
    """The outcome of a round's aggregation."""

    model: ServerModel
    """The aggregated model."""
    after: RunState
    """The run's state after the round."""
    report: TrainingReport
    """`report.finite` shows which clients' updates the model contains."""


class Aggregator:
    """Aggregates the updates of one run's rounds."""

    def __init__(self, federation: Federation, config: Config, device: torch.device) -> None:
        self._federation, self._config, self._device = federation, config, device

    def combine(self, plan: RoundPlan, result: RoundResult, finite: BoolArray, may_wait: bool = False) -> ServerModel:
        """Compute the next model from the clients with finite updates. For `may_wait`, see `weigh_updates`."""
        unchanged = replace(plan.start, rounds=plan.start.rounds + 1)
        if not finite.any():
            return unchanged
        if plan.stage.cohort == "alone":
            return replace(unchanged, model=self._representative(plan, result, finite))
        sizes = plan.participants.sizes[finite]
        updates = Updates(
            params=_rows(result.trained.params, finite),
            weights=to_device(torch.from_numpy(sizes / sizes.sum()), self._device),
            uplink=_rows(result.uplink, finite),
            lr=plan.work.local.lr,
            participation=len(sizes) / plan.participants.population,
            key=server_key(plan.work.key),
        )
        sent, server_state = plan.work.exchanged, plan.start.server_state
        weighting = plan.work.weighting or AVERAGES[plan.stage.average or self._config.average]
        updates = weigh_updates(weighting, sent.params, updates, server_state, may_wait)
        buffers = _merge_buffers(sent.buffers, _rows(result.trained.buffers, finite), updates.weights)
        if plan.work.server.needs_server_data:
            data = server_samples(plan.runtime.train_set, self._federation, plan.stage, plan.start.model, buffers)
            updates = replace(updates, server_data=data)
        params, next_state = server_step(plan.work.server, plan.parts, sent.params, updates, server_state)
        if plan.work.personal_names:  # the server keeps the initial values of personal tensors
            params, buffers = {**plan.start.model.params, **params}, {**plan.start.model.buffers, **buffers}
        return replace(unchanged, model=ModelState(params, buffers), server_state=next_state)

    def combine_safely(self, plan: RoundPlan, result: RoundResult, finite: BoolArray) -> tuple[ServerModel, BoolArray]:
        """Return the next model, and a mask of the clients whose updates it contains.

        If the server's step is not finite, the model does not change, and the mask is False for all clients.
        """
        model = self.combine(plan, result, finite)
        if all_finite(server_update(model)):
            return model, finite
        self.combine(plan, result, finite, may_wait=True)  # raises if wrong weights are the reason
        none = np.zeros_like(finite)
        return self.combine(plan, result, none), none

    def _representative(self, plan: RoundPlan, result: RoundResult, finite: BoolArray) -> ModelState:
        """Return the newest model of the client with the most samples. It stands for all models if clients train alone.

        A new model is a copy, because a view of the stacked tensors would keep all clients' models in memory.
        """
        row = np.flatnonzero((plan.clients == self._federation.sizes.argmax()) & finite)
        if not len(row):
            return plan.start.model
        (index,) = row.tolist()
        return ModelState(
            {name: t[index].clone() for name, t in result.trained.params.items()},
            {name: t[index].clone() for name, t in result.trained.buffers.items()},
        )


def server_key(key: RoundKey) -> int:
    """Return the server's random key in a round."""
    return integer_key(key.seed, "server", key.model, key.round)


def server_update(model: ServerModel) -> list[torch.Tensor]:
    """The tensors that the server's step computes."""
    return [*model.model.params.values(), *model.server_state.values()]


def _rows(stacked: Tensors, rows: BoolArray) -> Tensors:
    """Select some clients' tensors. If all clients are selected, nothing is copied."""
    if rows.all():
        return stacked
    return {name: t[torch.from_numpy(rows).to(t.device)] for name, t in stacked.items()}


def _merge_buffers(sent: Tensors, stacked: Tensors, weights: torch.Tensor) -> Tensors:
    """Average the buffers, such as BatchNorm's statistics. An entry that no client changed keeps its exact bits.

    There are many small buffers, so those of one dtype are merged in one operation.
    """
    merged: Tensors = {}
    for dtype in {b.dtype: None for b in sent.values()}:
        same_dtype = {name: b for name, b in sent.items() if b.dtype == dtype}
        before = torch.cat([b.flatten() for b in same_dtype.values()])
        after = torch.cat([stacked[name].reshape(len(weights), b.numel()) for name, b in same_dtype.items()], dim=1)
        mean = weighted_mean({"": after}, weights)[""]
        flat = torch.where((after == before).all(dim=0), before, mean)
        for (name, b), part in zip(
            same_dtype.items(), torch.split(flat, [b.numel() for b in same_dtype.values()]), strict=True
        ):
            merged[name] = part.view(b.shape).clone()
    return {name: merged[name] for name in sent}


def read_report(result: RoundResult, sent: ModelState) -> TrainingReport:
    """Wait for the training of a round, and check its numbers."""
    return PendingReport(result, sent).read()


def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether every entry is finite."""
    if not tensors or bool(_magnitude(tensors, tensors[0].device).isfinite()):
        return True
    return all(bool(t.isfinite().all()) for t in tensors)


def _magnitude(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Compute a number that is finite only if all entries are."""
    inexact = [t for t in tensors if (t.is_floating_point() or t.is_complex()) and t.numel()]
    if not inexact:
        return torch.zeros((), device=device)
    return torch.stack(torch._foreach_norm(inexact, 1)).sum(dtype=ACCURATE[inexact[0].device.type])


def _finite_by_client(result: RoundResult, sent: ModelState) -> BoolArray:
    """Check each client's numbers, as `TrainingReport.finite` describes."""
    tensors = [*result.trained.params.values(), *result.uplink.values(), *result.states.values()]
    entries = [tensor.isfinite() for tensor in tensors]
    entries += [t.isfinite() | (t == sent.buffers[name]) for name, t in result.trained.buffers.items()]
    finite = result.loss.isfinite().cpu()
    for entry in entries:
        finite &= entry.flatten(1).all(dim=1).cpu() if entry.dim() > 1 else entry.cpu()
    return np.asarray(finite.numpy())
