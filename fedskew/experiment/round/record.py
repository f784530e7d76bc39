"""What is recorded of a round, but for its test and its time."""

from __future__ import annotations

import numpy as np

from fedskew.data.federation import Federation
from fedskew.engine import RoundResult, RoundWork
from fedskew.experiment.config import Config
from fedskew.experiment.round.phases import Round
from fedskew.experiment.round.report import RoundReport
from fedskew.experiment.round.row import RoundRow
from fedskew.experiment.round.state import RunState
from fedskew.experiment.round.traffic import traffic
from fedskew.methods.hooks import pass_visits


class RoundRows:
    """Makes the rows of one run's rounds."""

    def __init__(self, federation: Federation, config: Config) -> None:
        self._federation, self._config = federation, config

    def of(self, this: Round, work: RoundWork, result: RoundResult, report: RoundReport, after: RunState) -> RoundRow:
        """The row of a round, whose clients came back with `result`."""
        finite, visited = report.finite, result.visits
        federated, nothing = this.stage.cohort == "clients", {"down": 0, "up": 0}
        return RoundRow(
            round=after.round,
            stage=this.stage.name,
            model=this.stage.model,
            model_round=this.trainee.rounds + 1,
            clients=[] if this.stage.cohort == "pooled" else this.clients.tolist(),
            lr=this.local.lr,
            loss=float(np.average(report.loss[finite], weights=visited[finite] + 1e-9)) if finite.any() else None,
            diverged=this.clients[~finite].tolist(),
            visits=int(visited.sum()),
            tally=report.tally,
            compute=self._compute(this, work, int(visited.sum()), report.tally),
            notes=after.notes,
            **({} if after.survey is None else after.survey.recorded()),
            bytes=traffic(work, result, this.stage.concatenates) if federated else nothing,
        )

    def _compute(self, this: Round, work: RoundWork, visits: int, tally: dict[str, float]) -> float:
        """Local computation, in FedAvg rounds."""
        forwards = this.stage.objective.extra_forwards(visits, tally) if visits else 0.0
        passes = pass_visits(this.parts) * sum(map(len, this.participants.samples))
        spent = visits * this.stage.cost * work.solver.gradients() + forwards / 3 + passes
        return spent / self._baseline_visits(this)

    def _baseline_visits(self, this: Round) -> float:
        """Sample visits of a FedAvg round: by the same clients, or, where a stage leaves clients out, by as many as
        the run draws, on average."""
        sizes = self._federation.sizes
        if this.stage.labels is None and this.stage.clients is None:
            return self._config.local_epochs * float(this.participants.sizes.sum())
        drawn = min(self._config.clients_per_round or len(sizes), len(sizes))
        return self._config.local_epochs * float(sizes.mean()) * drawn
