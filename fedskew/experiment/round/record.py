"""What is recorded of a round, except its evaluation and its time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from torch import Tensor

from fedskew.data.federation import Federation
from fedskew.engine import ModelState, RoundResult, RoundWork
from fedskew.experiment.config import Config
from fedskew.experiment.round.aggregate import Aggregated
from fedskew.experiment.round.plan import RoundPlan
from fedskew.experiment.round.row import RoundRow
from fedskew.methods.hooks import pass_visits


class RoundRecord:
    """Makes the rows of one run's rounds."""

    def __init__(self, federation: Federation, config: Config) -> None:
        self._federation, self._config = federation, config

    def row(self, plan: RoundPlan, result: RoundResult, aggregated: Aggregated) -> RoundRow:
        """The row of a round."""
        stage, after, report = plan.stage, aggregated.after, aggregated.report
        finite, visits = report.finite, result.visits
        federated = stage.cohort == "clients"
        return RoundRow(
            round=after.round,
            stage=stage.name,
            model=stage.model,
            model_round=plan.start.rounds + 1,
            clients=[] if stage.cohort == "pooled" else plan.clients.tolist(),
            lr=plan.work.local.lr,
            loss=float(np.average(report.loss[finite], weights=visits[finite] + 1e-9)) if finite.any() else None,
            diverged=plan.clients[~finite].tolist(),
            visits=int(visits.sum()),
            tally=report.tally,
            compute=self._compute(plan, int(visits.sum()), report.tally),
            notes=after.notes,
            **({} if after.survey is None else after.survey.recorded()),
            bytes=traffic(plan.work, result, stage.concatenates) if federated else {"down": 0, "up": 0},
        )

    def _compute(self, plan: RoundPlan, visits: int, tally: dict[str, float]) -> float:
        """Local computation, in FedAvg rounds."""
        forwards = plan.stage.objective.extra_forwards(visits, tally) if visits else 0.0
        passes = pass_visits(plan.parts) * sum(map(len, plan.participants.samples))
        spent = visits * plan.stage.cost * plan.work.solver.gradients() + forwards / 3 + passes
        return spent / self._fedavg_visits(plan)

    def _fedavg_visits(self, plan: RoundPlan) -> float:
        """Sample visits of a FedAvg round with the same clients.

        Where a stage leaves clients out, the mean over the clients that the run would draw.
        """
        sizes = self._federation.sizes
        if plan.stage.labels is None and plan.stage.clients is None:
            return self._config.local_epochs * float(plan.participants.sizes.sum())
        drawn = min(self._config.clients_per_round or len(sizes), len(sizes))
        return self._config.local_epochs * float(sizes.mean()) * drawn


def traffic(work: RoundWork, result: RoundResult, frozen: Sequence[str] = ()) -> dict[str, int]:
    """Bytes that all participants receive (`down`) and send (`up`), counted from the tensors themselves.

    Models of earlier stages (PKD's experts, FedConcat's frozen encoders) are sent again in every round, because the
    server cannot know what a client has kept. Label counts and sample numbers, some bytes, are not counted.
    """
    used = [name for name in work.objective.companions() if name in work.companions]
    earlier = [work.companions[name] for name in (*used, *frozen)]
    received = sum(map(_size, (work.sent, *earlier))) + _bytes(work.downlink.values())
    return {
        "down": len(work.assignments) * received,
        "up": _size(result.trained) + _bytes(result.uplink.values()),
    }


def _size(model: ModelState) -> int:
    return _bytes(model.params.values()) + _bytes(model.buffers.values())


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
