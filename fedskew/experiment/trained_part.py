"""Train only a part of the model: the head (`train: head`) or low-rank adapters (`train: lora`).

Server and clients work with the part as if it were the whole model, so only the part is sent. With `train: lora`, the
part has the adapters, the normalisation layers and the head. The final model is the whole model with the trained part.
In this model, each adapter is added to the weight of its layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from fedskew.data.dataset import Dataset
from fedskew.data.federation import Federation
from fedskew.experiment.config import Config
from fedskew.experiment.head_training import feature_dataset, head_model, with_encoder
from fedskew.experiment.round.server import Server
from fedskew.experiment.round.state import RunState
from fedskew.methods import Method
from fedskew.models.base import Classifier
from fedskew.models.lora import merged, with_adapters


@dataclass(frozen=True)
class TrainedPart:
    """The part of a model that clients train."""

    model: nn.Module
    """The part, as a model."""
    dataset: Dataset
    """The data with the inputs that the part takes: features with `train: head`, the original inputs with
    `train: lora`."""
    whole: Callable[[nn.Module], nn.Module]
    """Makes the whole model from the trained part."""


def trained_model(config: Config, model: Classifier) -> Classifier:
    """Return the part of a model that the run trains, as a model."""
    if config.train == "head":
        return head_model(model)
    return with_adapters(model, config.lora_rank, config.lora_alpha, config.lora_targets, config.seed)


def make_part(config: Config, model: Classifier, dataset: Dataset) -> TrainedPart:
    """Return the part of a model that the run trains, with its data. With `train: head`, this computes the features."""
    part = trained_model(config, model)
    if config.train == "head":
        return TrainedPart(part, feature_dataset(dataset, model, config), partial(with_encoder, model))
    return TrainedPart(part, dataset, merged)


class TrainedPartServer(Server):
    """The server of a run that trains only a part of the model."""

    saves_whole_model = True

    def __init__(self, federation: Federation, method: Method, model: Classifier, config: Config) -> None:
        self._part = make_part(config, model, federation.dataset)
        super().__init__(replace(federation, dataset=self._part.dataset), method, self._part.model, config)

    def module(self, state: RunState) -> nn.Module:
        return self._part.whole(super().module(state))

    def initial_module(self) -> nn.Module:
        return self._part.whole(super().initial_module())
