"""Shards of single classes (FedLMD, FedNTD)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedskew.data.partitions.rule import IntArray, Labels, Partition, check_whole_number, group_by_client, register
from fedskew.randomness import permutation


@register
@dataclass(frozen=True)
class Shards(Partition):
    """Each client gets `shards` shards, each from one class.

    Every class is cut, in file order, into `clients * shards / classes` equal shards. The first shards of a class may
    have one more sample. The shards are shuffled and dealt out, so a client may get two shards of the same class.
    """

    name: ClassVar[str] = "shards"
    clients: int
    shards: int = 2

    def __post_init__(self) -> None:
        check_whole_number("clients", self.clients, at_least=1)
        check_whole_number("shards", self.shards, at_least=1)

    def draw(self, labels: Labels, seed: int) -> Sequence[IntArray]:
        per_class = self._shards_per_class(labels)
        # All shards are numbered class by class: shard i belongs to class i // per_class.
        order = permutation(self.clients * self.shards, seed, "partition shards")
        client_of_shard = np.empty(len(order), np.int64)
        client_of_shard[order] = np.arange(len(order)) // self.shards
        owners = np.empty(len(labels), np.int64)
        for c in range(labels.classes):
            members = np.flatnonzero(labels.y == c)
            for j, shard in enumerate(np.array_split(members, per_class)):
                owners[shard] = client_of_shard[c * per_class + j]
        return group_by_client(owners, self.clients)

    def _shards_per_class(self, labels: Labels) -> int:
        self.require_clients(self.clients, len(labels))
        per_class, left_over = divmod(self.clients * self.shards, labels.classes)
        if left_over:
            step = labels.classes // math.gcd(self.shards, labels.classes)
            fitting = max(1, round(self.clients / step)) * step
            raise self.error(
                f"clients × shards = {self.clients * self.shards} shards do not divide evenly among the "
                f"{labels.classes} classes; use a multiple of {step} clients, such as {fitting}"
            )
        self.require_samples(np.full(labels.classes, per_class), labels.class_sizes, labels, "shards")
        return per_class
