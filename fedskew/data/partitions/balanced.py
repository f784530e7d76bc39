"""Partitions whose sizes are not random: IID, equally many samples of each class, and one class per client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedskew.data.partitions.rule import (
    CountedPartition,
    IntArray,
    Labels,
    Partition,
    check_whole_number,
    group_by_client,
    register,
    share_equally,
)
from fedskew.errors import plural
from fedskew.randomness import permutation


@register
@dataclass(frozen=True)
class IID(Partition):
    """Shuffled samples are dealt out one by one, without any skew. Client sizes differ by at most one sample."""

    name: ClassVar[str] = "iid"
    clients: int

    def __post_init__(self) -> None:
        check_whole_number("clients", self.clients, at_least=1)

    def draw(self, labels: Labels, seed: int) -> Sequence[IntArray]:
        self.require_clients(self.clients, len(labels))
        order = permutation(len(labels), seed, "partition iid")
        owners = np.empty(len(labels), np.int64)
        owners[order] = np.arange(len(labels)) % self.clients
        return group_by_client(owners, self.clients)


@register
@dataclass(frozen=True)
class OneClass(CountedPartition):
    """Each client has one class: client i has class i mod C (PKD).

    Every class is cut to the size of the smallest class. The other samples are not used.
    """

    name: ClassVar[str] = "one-class"
    uses_all: ClassVar[bool] = False
    clients: int

    def __post_init__(self) -> None:
        check_whole_number("clients", self.clients, at_least=1)

    def counts(self, labels: Labels, seed: int) -> IntArray:  # noqa: ARG002 - the counts are not random
        if self.clients < labels.classes:
            raise self.error(
                f"{plural(self.clients, 'client')} with one class each cannot have all {labels.classes} classes; "
                f"use at least {labels.classes} clients"
            )
        owned = np.arange(self.clients)[:, None] % labels.classes == np.arange(labels.classes)
        most_owners = np.full(labels.classes, owned.sum(axis=0).max())
        # The size to which all classes are cut must be enough for the class with the most owners.
        self.require_samples(most_owners, labels.class_sizes, labels)
        return share_equally(np.full(labels.classes, labels.class_sizes.min()), owned)


@register
@dataclass(frozen=True)
class Balanced(CountedPartition):
    """Each client has the same number of samples of every class (PKD). The other samples are not used."""

    name: ClassVar[str] = "balanced"
    uses_all: ClassVar[bool] = False
    clients: int

    def __post_init__(self) -> None:
        check_whole_number("clients", self.clients, at_least=1)

    def counts(self, labels: Labels, seed: int) -> IntArray:  # noqa: ARG002 - the counts are not random
        smallest = labels.class_sizes.min()
        self.require_samples(np.full(labels.classes, self.clients), labels.class_sizes, labels)
        return np.full((self.clients, labels.classes), smallest // self.clients)
