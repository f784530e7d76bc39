"""Train low-rank adapters (`train: lora`). Only the adapters, the normalisation layers and the head are exchanged.

The server and the clients work on a model with adapters. The final model has none: they are added to its weights.
"""

from __future__ import annotations

from torch import nn

from fedskew.data.federation import Federation
from fedskew.experiment.config import Config
from fedskew.experiment.round.server import Server
from fedskew.experiment.round.state import RunState
from fedskew.methods import Method
from fedskew.models.base import Classifier
from fedskew.models.lora import merged, with_adapters


class LoraServer(Server):
    """The server of a run that trains adapters."""

    saves_whole_model = True

    def __init__(self, federation: Federation, method: Method, model: Classifier, config: Config) -> None:
        super().__init__(federation, method, adapter_model(model, config), config)

    def module(self, state: RunState) -> nn.Module:
        return merged(super().module(state))

    def initial_module(self) -> nn.Module:
        return merged(super().initial_module())


def adapter_model(model: Classifier, config: Config) -> Classifier:
    """Return the model with the adapters that the configuration describes."""
    return with_adapters(model, config.lora_rank, config.lora_alpha, config.lora_targets, config.seed)
