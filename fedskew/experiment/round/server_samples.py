"""The training samples that the server holds (`server_data`), for server rules that test or train on them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedskew.data.federation import Federation
from fedskew.engine import Evaluator, ModelState
from fedskew.errors import UserError
from fedskew.methods import Stage, Tensors


@dataclass(frozen=True)
class ServerSamples:
    """The server's samples, and the tensors of the model that a server rule does not have."""

    training_set: Evaluator
    indices: Tensor
    """The samples' indices in the training set."""
    model: ModelState
    """The model before the round. Losses are computed with its personal tensors, because a server rule has only the
    shared parameters."""
    buffers: Tensors
    """The mean of the clients' buffers in this round."""

    def __len__(self) -> int:
        return len(self.indices)

    def loss(self, params: Tensors, samples: Tensor) -> Tensor:
        """Return the mean loss on some of the samples. `samples` are positions in `indices`."""
        whole = ModelState({**self.model.params, **params}, {**self.model.buffers, **self.buffers})
        return self.training_set.loss(whole, self.indices[samples])


def server_samples(
    training_set: Evaluator, federation: Federation, stage: Stage, model: ModelState, buffers: Tensors
) -> ServerSamples:
    """Return the server's samples, or only those with the stage's labels."""
    indices, y = federation.server_samples, federation.dataset.train.y
    if stage.labels is not None:
        indices = indices[np.isin(y[indices], stage.labels)]
    if not len(indices):
        raise UserError(f"the server holds no samples for stage {stage.name!r}; expected a larger server_data")
    device = next(iter(model.params.values())).device
    return ServerSamples(training_set, torch.from_numpy(indices).to(device), model, buffers)
