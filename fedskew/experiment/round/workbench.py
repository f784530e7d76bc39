"""What a model is trained and tested with: its network, an engine and the data on their devices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fedskew.data.augmentation.augment import make_augmentation
from fedskew.data.dataset import Dataset, Samples
from fedskew.engine import (
    DeviceSamples,
    DevicesEngine,
    Engine,
    Evaluator,
    ModelState,
    Network,
    choose_devices,
    make_engine,
    number_format,
)
from fedskew.errors import UserError
from fedskew.experiment.config import Config
from fedskew.experiment.round.test_set import Tests


@dataclass(frozen=True)
class Workbench:
    """Of one architecture."""

    network: Network
    engine: Engine
    tests: Tests


class Workshop:
    """A run's data on its devices, and workbenches over them."""

    def __init__(self, dataset: Dataset, config: Config, compiles: bool) -> None:
        self._dataset, self._config, self._compiles = dataset, config, compiles
        self._dtype, self._autocast = number_format(config.precision)
        self._augmentation = make_augmentation(config.augment, dataset.input_shape) if config.augment else None
        self.devices = choose_devices(config.device)
        self._train = [self._training_samples(device) for device in self.devices]

    @property
    def train(self) -> DeviceSamples:
        """The training data on the first device."""
        return self._train[0]

    def bench(self, model: nn.Module, engine: str) -> Workbench:
        """A workbench for this architecture, with the engine of that name."""
        networks = [Network(model, self._dtype, self._autocast).to(device) for device in self.devices]
        smallest = networks[0].smallest_batch(self.train.some_inputs())
        if self._config.batch_size < smallest:
            raise UserError(
                f"batch_size is {self._config.batch_size}; expected at least {smallest}: "
                "BatchNorm cannot train on a batch of one sample here"
            )
        engines = [
            make_engine(engine, *there, smallest, self._compiles) for there in zip(networks, self._train, strict=True)
        ]
        together = engines[0] if len(engines) == 1 else DevicesEngine(engines, self.devices)
        return Workbench(networks[0], together, self._tests(networks[0]))

    def initial(self, model: nn.Module) -> ModelState:
        """The tensors of a model as networks here have them."""
        return Network(model, self._dtype, self._autocast).to(self.devices[0]).state()

    def _tests(self, network: Network) -> Tests:
        def evaluator(samples: Samples) -> Evaluator:
            there = DeviceSamples(self._dataset, samples, self.devices[0], self._dtype)
            return Evaluator(network, there, self._compiles)

        test = self._dataset.test
        if test.domain is None:
            return Tests({"": evaluator(test)})
        parts = {name: test.where(test.domain == number) for number, name in enumerate(self._dataset.domains)}
        return Tests({name: evaluator(part) for name, part in parts.items() if len(part)})

    def _training_samples(self, device: torch.device) -> DeviceSamples:
        return DeviceSamples(self._dataset, self._dataset.train, device, self._dtype, self._augmentation)
