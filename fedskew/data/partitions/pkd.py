"""PKD's two splits of globally balanced data: every class is cut to the size of the smallest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedskew.data.partitions.rule import (
    CountedPartition,
    IntArray,
    Labels,
    register,
    share_equally,
    whole_number,
)


@register
@dataclass(frozen=True)
class OneClass(CountedPartition):
    """Each client holds one class, client i class i mod C; the classes' surplus stays unused."""

    name: ClassVar[str] = "one-class"
    uses_all: ClassVar[bool] = False
    clients: int

    def __post_init__(self) -> None:
        whole_number("clients", self.clients, at_least=1)

    def counts(self, labels: Labels, seed: int) -> IntArray:  # noqa: ARG002 - no chance in the counts
        if self.clients < labels.classes:
            raise self.refuse(
                f"{self.clients} clients of one class each leave some of the {labels.classes} classes "
                f"without a client; use at least {labels.classes} clients"
            )
        owned = np.arange(self.clients)[:, None] % labels.classes == np.arange(labels.classes)
        balanced = np.full(labels.classes, labels.class_sizes.min())
        self.require_samples(owned.sum(axis=0), balanced, labels)
        return share_equally(balanced, owned)


@register
@dataclass(frozen=True)
class Balanced(CountedPartition):
    """Each client holds the same number of samples of each class; the surplus stays unused."""

    name: ClassVar[str] = "balanced"
    uses_all: ClassVar[bool] = False
    clients: int

    def __post_init__(self) -> None:
        whole_number("clients", self.clients, at_least=1)

    def counts(self, labels: Labels, seed: int) -> IntArray:  # noqa: ARG002 - no chance in the counts
        smallest = labels.class_sizes.min()
        self.require_samples(np.full(labels.classes, self.clients), labels.class_sizes, labels)
        return np.full((self.clients, labels.classes), smallest // self.clients)
