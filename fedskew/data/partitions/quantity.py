"""Few labels per client in random quantities, as FedVLS's published code does it."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import ClassVar

import numpy as np

from fedskew.data.partitions.rule import (
    CountedPartition,
    IntArray,
    Labels,
    positive_number,
    register,
    whole_number,
)
from fedskew.randomness import generator


@register
@dataclass(frozen=True)
class Quantity(CountedPartition):
    """Groups of clients share the same few labels, each class divided at random within its group.

    The labels are laid out without chance: classes in order, each to the first r = ⌊clients ·
    labels_per_client / classes⌋ clients with a free label slot. For 10 clients with 2 of 10 labels, clients
    0 and 1 share classes 0 and 1, clients 2 and 3 share classes 2 and 3, and so on. The first of a pair gets
    a random count from [n/20, upper · n) of the class's n samples, the second the rest. `upper` is 1 in the
    code for CIFAR-10 and 0.5 for CIFAR-100 and Tiny-ImageNet, where the second is thus always the larger.

    Other numbers of owners generalise this: each owner but the last draws from [n/(10r), upper · m), m being
    what the owners before it left, less the least that those after it (but the last) must get. When the
    clients do not divide into full groups, the last group is smaller; when classes do not divide into full
    slots, the last group has fewer labels.
    """

    name: ClassVar[str] = "quantity"
    clients: int
    labels_per_client: int = 2
    upper: float = 1.0

    def __post_init__(self) -> None:
        whole_number("clients", self.clients, at_least=1)
        whole_number("labels_per_client", self.labels_per_client, at_least=1)
        positive_number("upper", self.upper, at_most=1)

    def counts(self, labels: Labels, seed: int) -> IntArray:
        owners = self._layout(labels)
        counts = np.zeros((self.clients, labels.classes), np.int64)
        for c, (first, last) in enumerate(owners):
            rng = generator(seed, "partition quantity", c)
            counts[first:last, c] = self._divide(int(labels.class_sizes[c]), last - first, rng)
        return counts

    def _layout(self, labels: Labels) -> list[tuple[int, int]]:
        """The range of clients that own each class."""
        self.require_labels(self.labels_per_client, labels)
        self.require_clients(self.clients, len(labels))
        owners_per_class = self.clients * self.labels_per_client // labels.classes
        if owners_per_class == 0:
            raise self.refuse(
                f"clients × labels_per_client = {self.clients * self.labels_per_client} leaves some of the "
                f"{labels.classes} classes without a client; "
                f"use at least {ceil(labels.classes / self.labels_per_client)} clients"
            )
        groups = ceil(labels.classes / self.labels_per_client)
        if groups * owners_per_class < self.clients:
            raise self.refuse(
                f"{groups} groups of {owners_per_class} clients own all {labels.classes} classes and leave the "
                f"other clients without a label; use {groups * owners_per_class} clients"
            )
        starts = [c // self.labels_per_client * owners_per_class for c in range(labels.classes)]
        owners = [(start, min(start + owners_per_class, self.clients)) for start in starts]
        needed = np.array([last - first for first, last in owners])
        self.require_samples(needed, labels.class_sizes, labels)
        return owners

    def _divide(self, class_size: int, owners: int, rng: np.random.Generator) -> list[int]:
        least = max(1, class_size // (10 * owners))
        shares: list[int] = []
        left = class_size
        for later in range(owners - 1, 0, -1):
            top = ceil(self.upper * (left - (later - 1) * least))
            shares.append(int(rng.integers(least, max(top, least + 1))))
            left -= shares[-1]
        return [*shares, left]
