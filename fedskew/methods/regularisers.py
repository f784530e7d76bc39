"""Regularisers: terms that are added to an objective's loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedskew.methods.parts import Client, Outputs, Part


@dataclass(frozen=True)
class Regulariser(Part):
    """A term added to the loss of the method's objective, which is FedAvg's cross entropy by default."""

    multi_label: ClassVar[bool] = False
    sample_by_sample: ClassVar[bool] = False
    """As in `Part`."""

    def term(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        """Return a scalar for the batch. Ignore rows with the target `losses.IGNORE`: they are padding."""
        raise NotImplementedError
