"""Set up what training and evaluating a model needs: its network, an engine, and the data on the run's devices."""

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
    Network,
    choose_devices,
    make_engine,
    number_format,
)
from fedskew.errors import UserError
from fedskew.experiment.config import Config
from fedskew.experiment.round.evaluate import TestSet


@dataclass(frozen=True)
class ModelRuntime:
    """Trains and evaluates models of one architecture."""

    network: Network
    engine: Engine
    test_set: TestSet
    train_set: Evaluator
    """Evaluates models on training samples, without augmentation."""


class RuntimeFactory:
    """Holds a run's training data on its devices, and makes runtimes that use them."""

    def __init__(self, dataset: Dataset, config: Config, compile_steps: bool) -> None:
        self._dataset, self._config, self._compile_steps = dataset, config, compile_steps
        self._dtype, self._autocast = number_format(config.precision)
        self._augmentation = make_augmentation(config.augment, dataset.input_shape) if config.augment else None
        self.devices = choose_devices(config.device)
        self._train = [self._samples_on(device) for device in self.devices]

    @property
    def train_samples(self) -> DeviceSamples:
        """The training data on the first device."""
        return self._train[0]

    def runtime(self, model: nn.Module, engine: str) -> ModelRuntime:
        """Make a runtime for this architecture, with this engine."""
        networks = [Network(model, self._dtype, self._autocast).to(device) for device in self.devices]
        inputs = [data.some_inputs() for data in self._train]
        smallest = max(network.smallest_batch(x) for network, x in zip(networks, inputs, strict=True))
        if self._config.batch_size < smallest:
            raise UserError(
                f"batch_size is {self._config.batch_size}; expected at least {smallest}, because "
                "the model's BatchNorm cannot train on smaller batches"
            )
        engines = [
            make_engine(engine, network, samples, smallest, self._compile_steps)
            for network, samples in zip(networks, self._train, strict=True)
        ]
        combined = engines[0] if len(engines) == 1 else DevicesEngine(engines, self.devices)
        return ModelRuntime(
            networks[0], combined, self._test_set(networks[0]), Evaluator(networks[0], self.train_samples)
        )

    def _test_set(self, network: Network) -> TestSet:
        def evaluator(samples: Samples) -> Evaluator:
            on_device = DeviceSamples(self._dataset, samples, self.devices[0], self._dtype)
            return Evaluator(network, on_device, self._compile_steps)

        test = self._dataset.test
        if test.domain is None:
            return TestSet({"": evaluator(test)})
        domains = {name: test.select(test.domain == number) for number, name in enumerate(self._dataset.domains)}
        return TestSet({name: evaluator(samples) for name, samples in domains.items() if len(samples)})

    def _samples_on(self, device: torch.device) -> DeviceSamples:
        return DeviceSamples(self._dataset, self._dataset.train, device, self._dtype, self._augmentation)
