"""The cases of a benchmark: runs on random images in the shapes of MNIST and CIFAR-10."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt
from torch import nn

from fedskew.data import Dataset, Federation, Samples
from fedskew.errors import unknown
from fedskew.experiment.config import Config, PartitionConfig
from fedskew.experiment.preparation import data_shape
from fedskew.models import make_model

CLASSES = 10
LARGEST_DATASET = 50_000
"""The maximum number of rows in a dataset. A federation with more samples uses rows more than once. A case that sets
`federation_clients` always has this many rows, so that federations of different sizes share one dataset."""
_BLOCK_ROWS = 100
"""Number of consecutive rows with the same pattern. Clients hold consecutive rows, so most clients lack classes."""


@dataclass(frozen=True)
class Setting:
    """The images, batch size and augmentation with which papers usually train a model."""

    shape: tuple[int, int, int]
    batch_size: int
    augment: tuple[str, ...] = ()


_MNIST = Setting((1, 28, 28), 64)
_CIFAR = Setting((3, 32, 32), 64, ("crop", "flip"))
SETTINGS: dict[str, Setting] = {
    "dnn": _MNIST,
    "lenet5": _MNIST,
    "cnn": Setting(_CIFAR.shape, 50, _CIFAR.augment),
    "mobilenetv2": _CIFAR,
    "resnet18": _CIFAR,
}
"""The models that can be measured, with their settings."""

METHODS = ("fedavg", "fedvls", "scaffold")
"""The measured methods. FedVLS adds a forward pass to FedAvg, and SCAFFOLD adds a state per client."""

PRECISIONS = ("bf16", "tf32", "float32")
"""Number formats, usually from fast to slow."""

Sizes = Literal["equal", "unequal"]


@dataclass(frozen=True)
class Workload:
    """The work per round, chosen for the device."""

    batches: int
    """Batches per client and epoch. With unequal sizes, clients have as many samples on average as with equal sizes."""
    epochs: int
    tests: int
    """Test samples per round."""


@dataclass(frozen=True)
class Case:
    """One run, as a user would configure it."""

    model: str
    clients: int
    """Clients per round."""
    workload: Workload
    device: str
    method: str = "fedavg"
    precision: str = "float32"
    sizes: Sizes = "equal"
    federation_clients: int | None = None
    """Clients in the federation. If None, every client takes part in each round."""
    augmented: bool = True
    compiled: bool = True
    """Whether to compile stacked steps on a GPU, as long runs do."""

    def __post_init__(self) -> None:
        if self.model not in SETTINGS:
            raise unknown("model", self.model, SETTINGS)

    @property
    def setting(self) -> Setting:
        return SETTINGS[self.model]

    @property
    def federation_size(self) -> int:
        return self.federation_clients or self.clients

    @property
    def step_samples(self) -> int:
        """Samples in one local step of all clients of a round."""
        return self.clients * self.setting.batch_size

    def federation(self) -> Federation:
        per_client = self.workload.batches * self.setting.batch_size
        rows = LARGEST_DATASET if self.federation_clients else min(self.clients * per_client, LARGEST_DATASET)
        return _make_federation(
            self.setting.shape, rows, self.federation_size, per_client, self.workload.tests, self.sizes
        )

    def load(self) -> None:
        """Create the data now, so that they do not add to the measured memory or time."""
        self.federation().label_counts  # noqa: B018 - cached

    def fresh_model(self) -> nn.Module:
        return make_model(self.model, data_shape(self.federation().dataset))

    def config(self, engine: str) -> Config:
        """The configuration of the run."""
        return Config(
            data="random",
            partition=PartitionConfig(clients=self.federation_size),
            model=self.model,
            method=self.method,
            rounds=1_000_000,
            clients_per_round=self.clients,
            local_epochs=self.workload.epochs,
            batch_size=self.setting.batch_size,
            augment=self.setting.augment if self.augmented else (),
            engine=engine,
            device=self.device,
            precision=self.precision,
            compile="always" if self.compiled else "never",
        )


@lru_cache(maxsize=8)
def _make_federation(
    shape: tuple[int, int, int], rows: int, federation_clients: int, per_client: int, tests: int, sizes: Sizes
) -> Federation:
    dataset = _make_dataset(shape, rows, tests)
    samples = np.arange(federation_clients * per_client) % rows
    ends = np.cumsum(_client_sizes(federation_clients, per_client, sizes))[:-1]
    return Federation(dataset, tuple(np.split(samples, ends)), {"name": "random", "clients": federation_clients}, 0)


def _client_sizes(federation_clients: int, per_client: int, sizes: Sizes) -> npt.NDArray[np.int64]:
    """The number of samples of each client. Unequal sizes are those of a Dirichlet(0.1) split of ten classes."""
    if sizes == "equal":
        return np.full(federation_clients, per_client, np.int64)
    weights = np.random.default_rng(0).dirichlet(np.full(federation_clients, 0.1), CLASSES).sum(axis=0)
    ends = np.round(np.cumsum(weights) / weights.sum() * (federation_clients * (per_client - 1))).astype(np.int64)
    unequal: npt.NDArray[np.int64] = np.diff(ends, prepend=0) + 1
    return unequal


@lru_cache(maxsize=4)
def _make_dataset(shape: tuple[int, int, int], rows: int, tests: int) -> Dataset:
    """Make images with one learnable pattern per class, plus noise. Every image occurs twice, with two labels.

    The patterns keep training from diverging. The two labels keep the loss above zero. At zero, gradients would vanish,
    which would change the speed.
    """
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 128, (CLASSES, *shape), dtype=np.uint8)

    def samples(count: int) -> Samples:
        row = np.arange(count)
        pattern = row // _BLOCK_ROWS % CLASSES
        noise = rng.integers(0, 128, (count // 2 + 1, *shape), dtype=np.uint8)
        return Samples(patterns[pattern] + noise[row // 2], (pattern + row % 2) % CLASSES)

    names = tuple(str(label) for label in range(CLASSES))
    return Dataset("random", "image", names, samples(rows), samples(tests))
