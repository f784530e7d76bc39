"""The test that a round ends with: whether there is one, and of which models."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedskew.data.federation import Federation
from fedskew.engine import ModelState, RoundResult
from fedskew.experiment.config import Config
from fedskew.experiment.round.own_models import own_model
from fedskew.experiment.round.phases import Round
from fedskew.experiment.round.state import RunState, Trainee


class RoundTests:
    """Decides on the tests of one run's rounds, and makes them."""

    def __init__(self, federation: Federation, config: Config, initial: ModelState, device: torch.device) -> None:
        self._federation, self._config, self._initial, self._device = federation, config, initial, device

    def due(self, this: Round, after: RunState) -> bool:
        """Whether this round is tested."""
        if this.stage.labels is not None and not np.isin(self._federation.dataset.test.y, this.stage.labels).any():
            return False
        last_of_stage = after.stage_round == 0
        return last_of_stage or (this.trainee.rounds + 1) % self._config.eval_every == 0

    def of_one_model(self, this: Round) -> bool:
        """Whether the global model is all that is tested."""
        return this.stage.cohort != "alone" and not self._config.eval_local

    def row(
        self, this: Round, result: RoundResult, finite: npt.NDArray[np.bool_], trainee: Trainee, after: RunState
    ) -> dict[str, Any]:
        """The fields of `RoundRow` that the evaluation fills."""
        tests, labels = this.bench.tests, this.stage.labels
        if this.stage.cohort == "alone":
            everyone = self._federation.populated.tolist()
            own = partial(own_model, initial=self._initial, device=self._device)
            return tests.of_everyone(everyone, after.clients, this.stage.model, own)
        row = tests.row(trainee.model, labels)
        if self._config.eval_local and this.stage.cohort == "clients":
            sent, trained, last = this.trainee.model, result.trained, after.stage_round == 0
            row |= tests.of_clients(sent, trained, this.clients, finite, this.federation, labels, matrices=last)
        return row
