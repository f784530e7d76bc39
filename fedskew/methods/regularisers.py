"""Regularisers: terms that are added to an objective's loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedskew.methods.hook_results import wrong_number
from fedskew.methods.parts import Client, Mode, Objective, Outputs, Part, Tensors


@dataclass(frozen=True)
class Regulariser(Part):
    """A term added to the loss of the method's objective. Without another objective, this is FedAvg's cross entropy."""

    needs_features: ClassVar[bool] = False
    """Whether the term uses features. Then the model must be a `Classifier(encoder, head)`."""
    multi_label: ClassVar[bool] = False
    """As in `Part`."""

    def term(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        """Return a scalar for the batch. Ignore rows with the target `losses.IGNORE`: they are padding."""
        raise NotImplementedError


@dataclass(frozen=True)
class Regularised(Objective):
    """An objective with a regulariser. Hooks other than those below are called on each of the `members`."""

    objective: Objective
    regulariser: Regulariser

    @property
    def members(self) -> tuple[Part, ...]:
        return (*self.objective.members, self.regulariser)

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        loss, term = self.objective.loss(out, y, client), self.regulariser.term(out, y, client)
        for part, hook, found in ((self.objective, "loss", loss), (self.regulariser, "term", term)):
            if not isinstance(found, Tensor) or found.dim():
                raise wrong_number(part, hook, found)
        return loss + term

    def companions(self) -> dict[str, Mode]:
        return self.objective.companions()

    def perturbed(self, features: Tensor, y: Tensor, client: Client, key: Tensor) -> Tensor:
        return self.objective.perturbed(features, y, client, key)

    def tally(self, out: Outputs, y: Tensor) -> Tensors:
        return self.objective.tally(out, y)

    def extra_forwards(self, visits: float, tally: Mapping[str, float]) -> float:
        return self.objective.extra_forwards(visits, tally)
