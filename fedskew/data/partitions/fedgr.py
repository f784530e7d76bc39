"""FedGR's three splits: imbalance of the labels, of the quantities, and of both.

The paper's code for them is not published; labels are dealt as in FedRepo, its base, except that no client
draws a label twice and no part of a client's data is held out for a local test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedskew.data.partitions.rule import (
    CountedPartition,
    IntArray,
    Labels,
    Partition,
    positive_number,
    random_orders,
    register,
    share_equally,
    whole_number,
)


@register
@dataclass(frozen=True)
class LabelImbalance(CountedPartition):
    """Each client owns `labels_per_client` labels, every class shared equally among its owners.

    With clients × labels_per_client below the number of classes, a class without an owner stays unused.
    """

    name: ClassVar[str] = "fedgr-label"
    uses_all: ClassVar[bool] = False
    clients: int
    labels_per_client: int = 2

    def __post_init__(self) -> None:
        whole_number("clients", self.clients, at_least=1)
        whole_number("labels_per_client", self.labels_per_client, at_least=1)

    def counts(self, labels: Labels, seed: int) -> IntArray:
        dealt = _deal_labels(self, self.clients, self.labels_per_client, labels, seed)
        owned = np.zeros((self.clients, labels.classes), np.bool_)
        owned[np.arange(self.clients)[:, None], dealt] = True
        return share_equally(labels.class_sizes, owned)


@register
@dataclass(frozen=True)
class QuantityImbalance(CountedPartition):
    """Each client owns all labels, in quantities that follow a power law; the surplus stays unused.

    A client's labels in random order get q_j = q_1 · j^(−exponent) samples, at least one; q_1 is the class's
    equal share among its owners.
    """

    name: ClassVar[str] = "fedgr-quantity"
    uses_all: ClassVar[bool] = False
    clients: int
    exponent: float = 1.0

    def __post_init__(self) -> None:
        whole_number("clients", self.clients, at_least=1)
        positive_number("exponent", self.exponent)

    def counts(self, labels: Labels, seed: int) -> IntArray:
        dealt = _deal_labels(self, self.clients, labels.classes, labels, seed)
        return _power_law(dealt, labels, self.exponent, seed)


@register
@dataclass(frozen=True)
class DoubleImbalance(CountedPartition):
    """Each client owns `labels_per_client` labels, in quantities that follow a power law.

    Labels as in `fedgr-label`, quantities as in `fedgr-quantity`; the surplus stays unused.
    """

    name: ClassVar[str] = "fedgr-double"
    uses_all: ClassVar[bool] = False
    clients: int
    labels_per_client: int = 2
    exponent: float = 1.0

    def __post_init__(self) -> None:
        whole_number("clients", self.clients, at_least=1)
        whole_number("labels_per_client", self.labels_per_client, at_least=1)
        positive_number("exponent", self.exponent)

    def counts(self, labels: Labels, seed: int) -> IntArray:
        dealt = _deal_labels(self, self.clients, self.labels_per_client, labels, seed)
        return _power_law(dealt, labels, self.exponent, seed)


def _deal_labels(rule: Partition, clients: int, each: int, labels: Labels, seed: int) -> IntArray:
    """Each client's labels [clients, each]: consecutive entries of one random order of the classes after
    another. Where a client's hand spans two orders, its share of the second skips what it already holds."""
    rule.require_labels(each, labels)
    rule.require_clients(clients, len(labels))
    classes = labels.classes
    orders = random_orders(-(-clients * each // classes), classes, seed, "partition fedgr labels")
    for i in range(1, len(orders) if classes % each else 0):
        held = orders[i - 1, classes - i * classes % each :]
        new = orders[i][np.isin(orders[i], held, invert=True)][: each - len(held)]
        orders[i] = np.concatenate([new, orders[i][np.isin(orders[i], new, invert=True)]])
    dealt = orders.ravel()[: clients * each].reshape(clients, each)
    rule.require_samples(np.bincount(dealt.ravel(), minlength=classes), labels.class_sizes, labels)
    return dealt


def _power_law(dealt: IntArray, labels: Labels, exponent: float, seed: int) -> IntArray:
    clients, each = dealt.shape
    owners = np.maximum(np.bincount(dealt.ravel(), minlength=labels.classes), 1)
    largest = labels.class_sizes // owners
    rank = 1.0 + random_orders(clients, each, seed, "partition fedgr quantities")
    counts = np.zeros((clients, labels.classes), np.int64)
    quantities = np.maximum(1, largest[dealt] / rank**exponent).astype(np.int64)
    counts[np.arange(clients)[:, None], dealt] = quantities
    return counts
