"""Dirichlet label skew, over all samples or within each client's domain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from fedskew.data.partitions.rule import (
    CountedPartition,
    IntArray,
    Labels,
    Partition,
    check_positive_number,
    check_whole_number,
    register,
)
from fedskew.errors import UserError, plural
from fedskew.randomness import generator, integer_key

BLOCK_VALUES = 1 << 14
"""The maximum number of random shares, one per client and draw, that are drawn at once for a class. That many fit in
the CPU's cache. If one draw needs more, it is made alone."""
MAX_VALUES = 300_000_000
"""Give up after about this many random shares: 300,000 draws for 100 clients and 10 classes, or about 15 seconds."""
TRIAL_DRAWS = 256
"""The number of draws after which `MAX_TOO_SMALL` applies."""
MAX_TOO_SMALL = 10
"""Give up if even the best of the trial draws leaves more than this many clients too small.

The number of small clients in a draw varies no more than a Poisson variable. If it is above 10 in each of 256 draws,
then a draw without small clients is rarer than about one in a billion."""


@register
@dataclass(frozen=True)
class Dirichlet(CountedPartition):
    """Each class is divided among the clients by a Dirichlet(beta) draw. Small beta means strong skew.

    This is the rule of FedVLS, FedLMD, FedNTD and NIID-Bench. Classes are divided one after the other. A client that
    already has an even share of all samples gets no more, and the shares of the other clients are renormalised. The
    remainder after rounding goes to the last of the other clients. So the last client often has single samples of many
    classes. The draw is repeated until every client has at least `min_size` samples.

    For CIFAR-10 with 100 clients at beta 0.05, about one draw in 20,000 is accepted. Therefore only counts are drawn,
    many draws at a time. Samples are assigned only once, for the accepted draw.
    """

    name: ClassVar[str] = "dirichlet"
    clients: int
    beta: float = 0.1
    min_size: int = 10

    def __post_init__(self) -> None:
        check_whole_number("clients", self.clients, at_least=1)
        check_positive_number("beta", self.beta)
        check_whole_number("min_size", self.min_size, at_least=1)

    @property
    def smallest(self) -> int:
        return self.min_size

    def counts(self, labels: Labels, seed: int) -> IntArray:
        self.require_clients(self.clients, len(labels))
        block_size = max(1, min(TRIAL_DRAWS, BLOCK_VALUES // self.clients))
        # At least 32 draws are allowed, however many shares each needs.
        max_draws = max(TRIAL_DRAWS // 8, MAX_VALUES // (self.clients * labels.classes))
        drawn, fewest_small = 0, self.clients
        while drawn < max_draws:
            rng = generator(seed, "partition dirichlet", drawn // block_size)
            block = self._draw_block(labels.class_sizes, block_size, rng)
            small = (block.sum(axis=1) < self.min_size).sum(axis=1)  # the number of small clients in each draw
            if (small == 0).any():
                accepted: IntArray = block[int(np.argmax(small == 0))].T
                return accepted
            drawn, fewest_small = drawn + block_size, min(fewest_small, int(small.min()))
            if drawn >= TRIAL_DRAWS and fewest_small > MAX_TOO_SMALL:
                break
        remedy = "use fewer clients, a larger beta or a smaller min_size"
        if self.min_size == 1:
            remedy = "use fewer clients or a larger beta"
        raise self.error(
            f"the best of {drawn} draws left {plural(fewest_small, 'client')} with fewer than {self.min_size} of the "
            f"{len(labels)} samples; {remedy}"
        )

    def _draw_block(self, class_sizes: IntArray, draws: int, rng: np.random.Generator) -> IntArray:
        """Return the counts of many independent draws: [draws, classes, clients]."""
        samples = class_sizes.sum()
        counts = np.zeros((draws, len(class_sizes), self.clients), np.int64)
        held = np.zeros((draws, self.clients), np.int64)
        for c in np.flatnonzero(class_sizes):
            log_weights = log_gamma_variates(self.beta, (draws, self.clients), rng)
            below_cap = held * self.clients < samples
            counts[:, c] = divide_class(int(class_sizes[c]), log_weights, below_cap)
            held += counts[:, c]
        return counts


def log_gamma_variates(shape: float, size: tuple[int, int], rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Draw the logarithms of gamma variates. The variates divided by their sum are a Dirichlet draw.

    A gamma variate G(a) is G(a+1)·U^(1/a), and −log U is exponential. With a small shape, most variates would underflow
    to 0. Their logarithms do not. So a class can still be divided if the clients with large weights may get no more
    samples.
    """
    boosted = np.log(rng.standard_gamma(shape + 1, size))
    log_variates: npt.NDArray[np.float64] = boosted - rng.standard_exponential(size) / shape
    return log_variates


def divide_class(class_size: int, log_weights: npt.NDArray[np.float64], below_cap: npt.NDArray[np.bool_]) -> IntArray:
    """Divide one class among the clients in `below_cap`, in proportion to their weights. Each row is one draw.

    Cut points are rounded down, and the last of these clients gets the remainder.
    """
    log_weights = np.where(below_cap, log_weights, -np.inf)
    shares = np.exp(log_weights - log_weights.max(axis=1, keepdims=True))
    cumulated = np.cumsum(shares, axis=1)
    cuts = np.floor(cumulated / cumulated[:, -1:] * class_size).astype(np.int64)
    cuts[:, -1] = class_size
    counts: IntArray = np.diff(cuts, axis=1, prepend=0)
    return counts


@register
@dataclass(frozen=True)
class DomainDirichlet(Partition):
    """Every client belongs to one domain and gets a Dirichlet(beta) share of that domain's classes (FedVLS).

    `per_domain` lists the number of clients of each domain. By default, the numbers are equal, or the first domains
    have one client more. Clients are numbered domain by domain.
    """

    name: ClassVar[str] = "domain-dirichlet"
    clients: int
    beta: float = 0.5
    min_size: int = 10
    per_domain: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_whole_number("clients", self.clients, at_least=1)
        check_positive_number("beta", self.beta)
        check_whole_number("min_size", self.min_size, at_least=1)
        if self.per_domain is not None:
            if not isinstance(self.per_domain, list | tuple):
                raise UserError(
                    f"per_domain is {self.per_domain!r}; expected a list with the number of clients of each domain"
                )
            object.__setattr__(self, "per_domain", tuple(self.per_domain))
            for number in self.per_domain:
                check_whole_number("per_domain", number, at_least=1)

    @property
    def smallest(self) -> int:
        return self.min_size

    def draw(self, labels: Labels, seed: int) -> list[IntArray]:
        if labels.domain is None:
            raise self.error("the dataset has no domains; use the partition dirichlet, or the dataset digits-domains")
        domains = int(labels.domain.max()) + 1
        parts: list[IntArray] = []
        for domain, clients in enumerate(self._clients_per_domain(domains)):
            members = np.flatnonzero(labels.domain == domain)
            rule = Dirichlet(clients, self.beta, self.min_size)
            own_labels = Labels(labels.y[members], labels.names)
            try:
                drawn = rule.draw(own_labels, integer_key(seed, "partition domain", domain))
            except UserError as error:
                raise self.error(f"domain {domain} (counted from 0): {error}") from error
            parts += [members[part] for part in drawn]
        return parts

    def _clients_per_domain(self, domains: int) -> tuple[int, ...]:
        if self.per_domain is None:
            if self.clients < domains:
                raise self.error(
                    f"{plural(self.clients, 'client')} for {domains} domains; expected at least one client per domain"
                )
            even, more = divmod(self.clients, domains)
            return tuple(even + (domain < more) for domain in range(domains))
        if len(self.per_domain) != domains or sum(self.per_domain) != self.clients:
            raise self.error(f"expected one number of clients for each of {domains} domains, {self.clients} in total")
        return self.per_domain
