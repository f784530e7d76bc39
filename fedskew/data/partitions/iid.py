"""No skew at all: the reference that the others are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedskew.data.partitions.rule import IntArray, Labels, Partition, group, register, whole_number
from fedskew.randomness import permutation


@register
@dataclass(frozen=True)
class IID(Partition):
    """All samples shuffled and dealt out one by one; sizes differ by one at most."""

    name: ClassVar[str] = "iid"
    clients: int

    def __post_init__(self) -> None:
        whole_number("clients", self.clients, at_least=1)

    def draw(self, labels: Labels, seed: int) -> list[IntArray]:
        self.require_clients(self.clients, len(labels))
        order = permutation(len(labels), seed, "partition iid")
        owners = np.empty(len(labels), np.int64)
        owners[order] = np.arange(len(labels)) % self.clients
        return group(owners, self.clients)
