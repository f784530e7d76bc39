"""From the models that a round's clients come back with to the next global one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from fedskew.data.federation import Federation
from fedskew.engine import ModelState, RoundResult, to_device
from fedskew.experiment.config import Config
from fedskew.experiment.round.client_rows import of_client, of_rows
from fedskew.experiment.round.phases import Round, made_by
from fedskew.experiment.round.report import are_finite
from fedskew.experiment.round.state import Trainee
from fedskew.methods import Method, Tensors, Updates
from fedskew.methods.hooks import server_step
from fedskew.methods.parts import weighted_mean

Finite = npt.NDArray[np.bool_]
"""[K]: the clients whose update is finite."""


class Aggregation:
    """Makes the next global model of one run's rounds."""

    def __init__(self, federation: Federation, method: Method, config: Config, device: torch.device) -> None:
        self._federation, self._method, self._config, self._device = federation, method, config, device

    def of(self, this: Round, result: RoundResult, finite: Finite) -> Trainee:
        """The next global model, from the clients whose update is finite."""
        trainee = replace(this.trainee, rounds=this.trainee.rounds + 1)
        if not finite.any():
            return trainee
        if this.stage.cohort == "alone":
            return replace(trainee, model=self._representative(this, result, finite))
        sizes = this.participants.sizes[finite]
        average = this.stage.average or self._config.average
        shares = sizes if average == "samples" else np.ones_like(sizes)
        weights = to_device(torch.from_numpy(shares / shares.sum()), self._device)
        updates = Updates(
            params=of_rows(result.trained.params, finite),
            weights=weights,
            uplink=of_rows(result.uplink, finite),
            lr=this.local.lr,
            participation=len(sizes) / this.participants.population,
        )
        sent, before = this.trainee.model, this.trainee.server
        params, server = server_step(self._method.server, this.parts, sent.params, updates, before)
        buffers = _merged_buffers(sent.buffers, of_rows(result.trained.buffers, finite), weights)
        return replace(trainee, model=ModelState(params, buffers), server=server)

    def of_finite(self, this: Round, result: RoundResult, finite: Finite) -> tuple[Trainee, Finite]:
        """The same, and the clients that it is made of: nobody, where the server's step over them is not finite."""
        trainee = self.of(this, result, finite)
        if are_finite(made_by(trainee)):
            return trainee, finite
        nobody = np.zeros_like(finite)
        return self.of(this, result, nobody), nobody

    def _representative(self, this: Round, result: RoundResult, finite: Finite) -> ModelState:
        """Where there is no common model, what is saved in its place: that of the client with most samples; a copy, for
        a row would keep the models of all of the round's clients in memory."""
        row = np.flatnonzero((this.clients == self._federation.sizes.argmax()) & finite)
        if not len(row):
            return this.trainee.model
        own = of_client(result.trained, int(row[0]))
        return ModelState({n: t.clone() for n, t in own.params.items()}, {n: t.clone() for n, t in own.buffers.items()})


def _merged_buffers(sent: Tensors, stacked: Tensors, weights: torch.Tensor) -> Tensors:
    """The mean of BatchNorm's statistics; a constant that no client changed stays what it is, to the last bit.

    There are many small ones: those of one number type are merged as one.
    """
    merged: Tensors = {}
    for dtype in {b.dtype: None for b in sent.values()}:
        alike = {name: b for name, b in sent.items() if b.dtype == dtype}
        before = torch.cat([b.flatten() for b in alike.values()])
        after = torch.cat([stacked[name].reshape(len(weights), b.numel()) for name, b in alike.items()], dim=1)
        mean = weighted_mean({"": after}, weights)[""]
        whole = torch.where((after == before).all(dim=0), before, mean)
        for (name, b), part in zip(alike.items(), torch.split(whole, [b.numel() for b in alike.values()]), strict=True):
            merged[name] = part.view(b.shape).clone()
    return {name: merged[name] for name in sent}
