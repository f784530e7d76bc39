"""The work that every peer does, the flags of its script, and the line of JSON that it prints.

FedAvg trains a small CNN on random images. In each round, some clients are drawn, each trains the received model on its
images by SGD with momentum 0.9 and learning rate 0.01, and the server takes the mean of their models. No peer augments
images. No peer tests the model except fedskew, which tests it once, on 100 images, after the last round.

The CNN takes images of 3 × 32 × 32:
    convolution 5×5 without padding, 3 → 32 channels; ReLU; max-pooling 2×2     (32 × 14 × 14)
    convolution 5×5 without padding, 32 → 64 channels; ReLU; max-pooling 2×2    (64 × 5 × 5)
    linear 1600 → 512; ReLU; linear 512 → 10                                    (878,538 parameters)

This module needs nothing but numpy, because every peer's environment imports it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

SHAPE, CLASSES = (3, 32, 32), 10
CHANNELS, HIDDEN, KERNEL = (32, 64), 512, 5
PARAMETERS = 878_538
LEARNING_RATE, MOMENTUM = 0.01, 0.9
PRECISIONS = ("float32", "tf32", "bf16")


@dataclass(frozen=True)
class Work:
    """The size of a federation and of its rounds."""

    clients: int
    participants: int
    """Clients per round."""
    samples: int
    """Images per client."""
    epochs: int
    batch_size: int = 50

    @property
    def description(self) -> str:
        epochs = f"{self.epochs} epoch" + ("s" if self.epochs > 1 else "")
        return (
            f"{self.participants} of {self.clients} clients × {self.samples} images × {epochs}, "
            f"batches of {self.batch_size}"
        )

    def data(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """Make random images and labels: [clients, samples, 3, 32, 32] and [clients, samples]."""
        rng = np.random.default_rng(0)
        images = rng.integers(0, 256, (self.clients, self.samples, *SHAPE), dtype=np.uint8)
        return images, rng.integers(0, CLASSES, (self.clients, self.samples))


SIZES = {
    "tiny": Work(clients=4, participants=2, samples=20, epochs=1, batch_size=10),
    "small": Work(clients=20, participants=5, samples=100, epochs=1),
    "paper": Work(clients=100, participants=10, samples=500, epochs=5),
}
"""`paper` suits a GPU, `small` two CPU cores, and `tiny` a test."""


@dataclass(frozen=True)
class Task:
    """What a script was started for."""

    work: Work
    rounds: int
    device: str
    precision: str


def read_task(peer: str, precisions: tuple[str, ...] = PRECISIONS) -> Task:
    """Read the flags of a peer's script. `precisions` are the number formats that the peer can train in."""
    parser = argparse.ArgumentParser(description=f"Measure {peer} on the work that work.py describes.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=PRECISIONS, default="float32")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    flags = parser.parse_args()
    if flags.rounds < 2:
        parser.error(f"--rounds is {flags.rounds}; expected at least 2, because the first round counts as start-up")
    if flags.precision not in precisions:
        parser.error(f"{peer} has no switch for {flags.precision}; expected {' or '.join(precisions)}")
    return Task(SIZES[flags.size], flags.rounds, flags.device, flags.precision)


class RoundTimes:
    """Records when each round ended."""

    def __init__(self) -> None:
        self._started = time.time()
        self.ends: list[float] = []
        """Seconds since 1970, so that the process that started the script can compare them with its clock."""

    def end_round(self) -> None:
        self.ends.append(time.time())

    def print_json(self, peer: str, version: str, parameters: int) -> None:
        """Print the result as one line of JSON. `first_round` counts from the end of the imports."""
        if parameters != PARAMETERS:
            raise ValueError(f"{peer}'s model has {parameters} parameters; expected {PARAMETERS}")
        steady = [end - start for start, end in zip(self.ends, self.ends[1:], strict=False)]
        result: dict[str, Any] = {
            "peer": peer,
            "version": version,
            "rounds": len(self.ends),
            "seconds_per_round": statistics.median(steady),
            "first_round": self.ends[0] - self._started,
            "ends": self.ends,
        }
        print(json.dumps(result), flush=True)
