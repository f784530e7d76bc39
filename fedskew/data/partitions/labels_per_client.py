"""A fixed number of labels per client (#label-m of NIID-Bench)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedskew.data.partitions.rule import (
    CountedPartition,
    IntArray,
    Labels,
    random_orders,
    register,
    share_equally,
    whole_number,
)


@register
@dataclass(frozen=True)
class LabelsPerClient(CountedPartition):
    """Client i owns class i mod C and `labels_per_client` − 1 random others; owners share a class equally.

    With fewer clients than classes, a class that nobody draws stays unused.
    """

    name: ClassVar[str] = "labels"
    uses_all: ClassVar[bool] = False
    clients: int
    labels_per_client: int = 2

    def __post_init__(self) -> None:
        whole_number("clients", self.clients, at_least=1)
        whole_number("labels_per_client", self.labels_per_client, at_least=1)

    def counts(self, labels: Labels, seed: int) -> IntArray:
        self.require_labels(self.labels_per_client, labels)
        self.require_clients(self.clients, len(labels))
        every = np.arange(self.clients)
        orders = random_orders(self.clients, labels.classes, seed, "partition labels")
        rank = np.argsort(orders, axis=1)
        rank[every, every % labels.classes] = -1
        chosen = np.argsort(rank, axis=1)[:, : self.labels_per_client]
        owned = np.zeros((self.clients, labels.classes), np.bool_)
        owned[every[:, None], chosen] = True
        self.require_samples(owned.sum(axis=0), labels.class_sizes, labels)
        return share_equally(labels.class_sizes, owned)
