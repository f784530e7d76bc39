"""A few labels per client: in equal shares (NIID-Bench) or in random quantities (FedVLS)."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import ClassVar

import numpy as np

from fedskew.data.partitions.rule import (
    CountedPartition,
    IntArray,
    Labels,
    check_positive_number,
    check_whole_number,
    random_orders,
    register,
    share_equally,
)
from fedskew.errors import plural
from fedskew.randomness import generator


@dataclass(frozen=True)
class FewLabels(CountedPartition):
    """A rule that gives a client at most `labels_per_client` labels."""

    clients: int
    labels_per_client: int = 2

    def __post_init__(self) -> None:
        check_whole_number("clients", self.clients, at_least=1)
        check_whole_number("labels_per_client", self.labels_per_client, at_least=1)

    def share(self, chosen: IntArray, labels: Labels) -> IntArray:
        """Divide each class equally among the clients that have it in `chosen` [clients, labels_per_client]."""
        owned = np.zeros((self.clients, labels.classes), np.bool_)
        owned[np.arange(self.clients)[:, None], chosen] = True
        self.require_samples(owned.sum(axis=0), labels.class_sizes, labels)
        return share_equally(labels.class_sizes, owned)


@register
@dataclass(frozen=True)
class LabelsPerClient(FewLabels):
    """Client i has class i mod C and `labels_per_client` − 1 random others (`noniid-#label` in NIID-Bench).

    The clients that have a class share it equally. With fewer clients than classes, a class that no client draws is not
    used.
    """

    name: ClassVar[str] = "labels"
    uses_all: ClassVar[bool] = False

    def counts(self, labels: Labels, seed: int) -> IntArray:
        self.require_labels(self.labels_per_client, labels)
        self.require_clients(self.clients, len(labels))
        clients = np.arange(self.clients)
        orders = random_orders(self.clients, labels.classes, seed, "partition labels")
        rank = np.argsort(orders, axis=1)  # each class's place in the client's random order
        rank[clients, clients % labels.classes] = -1  # client i always has class i mod C
        return self.share(np.argsort(rank, axis=1)[:, : self.labels_per_client], labels)


@register
@dataclass(frozen=True)
class Quantity(FewLabels):
    """Groups of clients share the same few labels, and each class is divided at random within its group.

    This is the rule of FedVLS's published code. The groups are not random: each class goes to the first
    r = ⌊clients · labels_per_client / classes⌋ clients that do not have all their labels yet. With 10 clients and 2 of
    10 labels, clients 0 and 1 share classes 0 and 1, clients 2 and 3 share classes 2 and 3, and so on.

    In a pair of clients, the first gets a random number from [n/20, upper · n) of a class's n samples. The second gets
    the rest. FedVLS uses `upper` 1 for CIFAR-10, and 0.5 for CIFAR-100 and Tiny-ImageNet. With 0.5, the second client
    gets more, unless the class has two samples.

    fedskew generalises the rule to groups of r clients. Each client but the last draws from [n/(10r), upper · m). Here
    m is the number of samples that are left, minus n/(10r) for each later client but the last. The last group may have
    fewer clients or labels.
    """

    name: ClassVar[str] = "quantity"
    upper: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_number("upper", self.upper, at_most=1)

    def counts(self, labels: Labels, seed: int) -> IntArray:
        ranges = self._layout(labels)
        counts = np.zeros((self.clients, labels.classes), np.int64)
        for c, (first, end) in enumerate(ranges):
            rng = generator(seed, "partition quantity", c)
            counts[first:end, c] = self._divide(int(labels.class_sizes[c]), end - first, rng)
        return counts

    def _layout(self, labels: Labels) -> list[tuple[int, int]]:
        """Return, for each class, the range of clients that share it: the first, and the one after the last."""
        self.require_labels(self.labels_per_client, labels)
        self.require_clients(self.clients, len(labels))
        owners_per_class = self.clients * self.labels_per_client // labels.classes
        if owners_per_class == 0:
            raise self.error(
                f"clients × labels_per_client = {self.clients * self.labels_per_client} leaves some of the "
                f"{labels.classes} classes without a client; "
                f"use at least {ceil(labels.classes / self.labels_per_client)} clients"
            )
        groups = ceil(labels.classes / self.labels_per_client)
        if groups * owners_per_class < self.clients:
            raise self.error(
                f"{groups} groups of {plural(owners_per_class, 'client')} have all {labels.classes} classes, so "
                f"the other clients would have no label; use {groups * owners_per_class} clients"
            )
        starts = [c // self.labels_per_client * owners_per_class for c in range(labels.classes)]
        ranges = [(start, min(start + owners_per_class, self.clients)) for start in starts]
        needed = np.array([end - first for first, end in ranges])
        self.require_samples(needed, labels.class_sizes, labels)
        return ranges

    def _divide(self, class_size: int, owners: int, rng: np.random.Generator) -> list[int]:
        """Divide one class among its owners. Every owner but the last draws its number of samples."""
        minimum = max(1, class_size // (10 * owners))
        shares: list[int] = []
        left = class_size
        for later in range(owners - 1, 0, -1):
            high = ceil(self.upper * (left - (later - 1) * minimum))
            shares.append(int(rng.integers(minimum, max(high, minimum + 1))))
            left -= shares[-1]
        return [*shares, left]
