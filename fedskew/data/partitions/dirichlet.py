"""Dirichlet label skew with the cap and re-draw that FedVLS, FedLMD, FedNTD and NIID-Bench all use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from fedskew.data.partitions.rule import (
    CountedPartition,
    IntArray,
    Labels,
    positive_number,
    register,
    whole_number,
)
from fedskew.randomness import generator

BLOCK_VALUES = 1 << 14
"""Random shares drawn at once per class: small enough for the processor's cache."""
MOST_VALUES = 300_000_000
"""Random shares drawn before giving up, some 15 seconds: 300,000 draws for 100 clients and 10 classes."""
TRIAL_DRAWS = 256
HOPELESS = 10
"""If the best of the trial draws leaves more clients than this too small, an acceptable draw is rarer than
one in a billion: the number of small clients spreads no wider than a Poisson variable."""


@register
@dataclass(frozen=True)
class Dirichlet(CountedPartition):
    """Each class is divided by a Dirichlet(beta) draw over the clients; small beta, strong skew.

    Class by class in order: a client that already holds its even share of all samples gets nothing more, the
    others' shares are renormalised, and what rounding leaves goes to the last client (which therefore tends
    to hold single samples of many classes). Drawn again until every client holds `min_size` samples.

    For 100 clients at beta 0.05 about one draw in 20,000 is accepted, hence counts are drawn first, many
    draws at a time; which samples they are is decided for the accepted draw only.
    """

    name: ClassVar[str] = "dirichlet"
    clients: int
    beta: float = 0.1
    min_size: int = 10

    def __post_init__(self) -> None:
        whole_number("clients", self.clients, at_least=1)
        positive_number("beta", self.beta)
        whole_number("min_size", self.min_size, at_least=1)

    @property
    def smallest(self) -> int:
        return self.min_size

    def counts(self, labels: Labels, seed: int) -> IntArray:
        self.require_clients(self.clients, len(labels))
        block_size = max(1, min(TRIAL_DRAWS, BLOCK_VALUES // self.clients))
        most_draws = max(TRIAL_DRAWS // 8, MOST_VALUES // (self.clients * labels.classes))
        drawn, fewest_short = 0, self.clients
        while drawn < most_draws:
            rng = generator(seed, "partition dirichlet", drawn // block_size)
            block = self._draw_block(labels.class_sizes, block_size, rng)
            short = (block.sum(axis=1) < self.min_size).sum(axis=1)
            if (short == 0).any():
                accepted: IntArray = block[int(np.argmax(short == 0))].T
                return accepted
            drawn, fewest_short = drawn + block_size, min(fewest_short, int(short.min()))
            if drawn >= TRIAL_DRAWS and fewest_short > HOPELESS:
                break
        raise self.refuse(
            f"the best of {drawn} draws left {fewest_short} clients with fewer than {self.min_size} of the "
            f"{len(labels)} samples; use fewer clients, a larger beta or a smaller min_size"
        )

    def _draw_block(self, class_sizes: IntArray, draws: int, rng: np.random.Generator) -> IntArray:
        """Counts of many independent draws, [draws, classes, clients]."""
        samples = class_sizes.sum()
        counts = np.zeros((draws, len(class_sizes), self.clients), np.int64)
        held = np.zeros((draws, self.clients), np.int64)
        for c in np.flatnonzero(class_sizes):
            log_weights = log_gamma_variates(self.beta, (draws, self.clients), rng)
            open_to = held * self.clients < samples
            counts[:, c] = divide_class(int(class_sizes[c]), log_weights, open_to)
            held += counts[:, c]
        return counts


def log_gamma_variates(shape: float, size: tuple[int, int], rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Logarithms of gamma variates, whose ratios to their sum are a Dirichlet draw.

    G(a) = G(a+1)·U^(1/a), and −log U is exponential: no underflow however small the shape, so a class never
    ends with all shares zero when the cap takes the large ones away.
    """
    boosted = np.log(rng.standard_gamma(shape + 1, size))
    log_variates: npt.NDArray[np.float64] = boosted - rng.standard_exponential(size) / shape
    return log_variates


def divide_class(class_size: int, log_weights: npt.NDArray[np.float64], open_to: npt.NDArray[np.bool_]) -> IntArray:
    """Counts of one class in each draw: proportional to the weights of the clients still open, rounded down
    at the cut points, the remainder to the last client."""
    log_weights = np.where(open_to, log_weights, -np.inf)
    shares = np.exp(log_weights - log_weights.max(axis=1, keepdims=True))
    cumulated = np.cumsum(shares, axis=1)
    cuts = np.floor(cumulated / cumulated[:, -1:] * class_size).astype(np.int64)
    cuts[:, -1] = class_size
    counts: IntArray = np.diff(cuts, axis=1, prepend=0)
    return counts
