"""FedGR's three partitions: imbalance of labels, of quantities, and of both.

The paper's code for them is not published. They follow the code of FedRepo, on which the paper builds. There are two
exceptions: no client draws a label twice, and clients hold out no test samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedskew.data.partitions.few_labels import FewLabels
from fedskew.data.partitions.rule import (
    CountedPartition,
    IntArray,
    Labels,
    Partition,
    check_positive_number,
    check_whole_number,
    random_orders,
    register,
)


@register
@dataclass(frozen=True)
class LabelImbalance(FewLabels):
    """Each client has `labels_per_client` labels. The clients that have a class share its samples equally.

    If clients × labels_per_client is less than the number of classes, some classes are not used.
    """

    name: ClassVar[str] = "fedgr-label"
    uses_all: ClassVar[bool] = False

    def counts(self, labels: Labels, seed: int) -> IntArray:
        return self.share(_deal_labels(self, self.clients, self.labels_per_client, labels, seed), labels)


@register
@dataclass(frozen=True)
class QuantityImbalance(CountedPartition):
    """Each client has all labels, in quantities that follow a power law. The other samples are not used.

    The labels of a client are put in random order. Of the j-th label, the client gets share · j^(−exponent) samples,
    and at least one. The share is the size of that class, divided by the number of clients that have the class. Both
    numbers are rounded down.
    """

    name: ClassVar[str] = "fedgr-quantity"
    uses_all: ClassVar[bool] = False
    clients: int
    exponent: float = 1.0

    def __post_init__(self) -> None:
        check_whole_number("clients", self.clients, at_least=1)
        check_positive_number("exponent", self.exponent)

    def counts(self, labels: Labels, seed: int) -> IntArray:
        dealt = _deal_labels(self, self.clients, labels.classes, labels, seed)
        return _power_law(dealt, labels, self.exponent, seed)


@register
@dataclass(frozen=True)
class DoubleImbalance(FewLabels):
    """Each client has `labels_per_client` labels, in quantities that follow a power law.

    Labels are drawn as in `fedgr-label` and quantities as in `fedgr-quantity`. The other samples are not used.
    """

    name: ClassVar[str] = "fedgr-double"
    uses_all: ClassVar[bool] = False
    exponent: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_number("exponent", self.exponent)

    def counts(self, labels: Labels, seed: int) -> IntArray:
        dealt = _deal_labels(self, self.clients, self.labels_per_client, labels, seed)
        return _power_law(dealt, labels, self.exponent, seed)


def _deal_labels(rule: Partition, clients: int, per_client: int, labels: Labels, seed: int) -> IntArray:
    """Deal `per_client` labels to every client: [clients, per_client].

    The classes are listed in several random orders, one after the other, and each client takes the next `per_client`
    entries. If a client's entries span two orders, it skips the labels in the second order that it already has.
    """
    rule.require_labels(per_client, labels)
    rule.require_clients(clients, len(labels))
    classes = labels.classes
    orders = random_orders(-(-clients * per_client // classes), classes, seed, "partition fedgr labels")
    for i in range(1, len(orders) if classes % per_client else 0):
        # A client may take the end of order i − 1 (`held`) and the start of order i, which must be new to it.
        held = orders[i - 1, classes - (i * classes) % per_client :]
        new = orders[i][np.isin(orders[i], held, invert=True)][: per_client - len(held)]
        orders[i] = np.concatenate([new, orders[i][np.isin(orders[i], new, invert=True)]])
    dealt = orders.ravel()[: clients * per_client].reshape(clients, per_client)
    rule.require_samples(np.bincount(dealt.ravel(), minlength=classes), labels.class_sizes, labels)
    return dealt


def _power_law(dealt: IntArray, labels: Labels, exponent: float, seed: int) -> IntArray:
    """Return the counts [clients, classes]. The quantities of each client's labels follow a power law."""
    clients, per_client = dealt.shape
    owners = np.maximum(np.bincount(dealt.ravel(), minlength=labels.classes), 1)
    share = labels.class_sizes // owners
    rank = 1.0 + random_orders(clients, per_client, seed, "partition fedgr quantities")
    counts = np.zeros((clients, labels.classes), np.int64)
    quantities = np.maximum(1, share[dealt] / rank**exponent).astype(np.int64)
    counts[np.arange(clients)[:, None], dealt] = quantities
    return counts
