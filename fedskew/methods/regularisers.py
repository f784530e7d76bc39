"""A term that is added to the loss of any objective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedskew.methods.parts import Client, Mode, Objective, Outputs, Part, Tensors


@dataclass(frozen=True)
class Regulariser(Part):
    """What a method adds to the loss, whichever that is; alone, to cross entropy."""

    needs_features: ClassVar[bool] = False
    """Whether it uses features, which only a model of an encoder and a head has."""

    def term(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        """A scalar, the mean over the batch; rows whose target is `losses.IGNORE` count for nothing."""
        raise NotImplementedError


@dataclass(frozen=True)
class Regularised(Objective):
    """An objective with a regulariser's term."""

    objective: Objective
    regulariser: Regulariser

    @property
    def members(self) -> tuple[Part, ...]:
        return (*self.objective.members, self.regulariser)

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        return self.objective.loss(out, y, client) + self.regulariser.term(out, y, client)

    def companions(self) -> dict[str, Mode]:
        return self.objective.companions()

    def perturbed(self, features: Tensor, y: Tensor, client: Client, key: Tensor) -> Tensor:
        return self.objective.perturbed(features, y, client, key)

    def tally(self, out: Outputs, y: Tensor) -> Tensors:
        return self.objective.tally(out, y)

    def extra_forwards(self, visits: float, tally: Mapping[str, float]) -> float:
        return self.objective.extra_forwards(visits, tally)
