"""Objectives around another objective: they change its loss with a regulariser or with class weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from fedskew.methods.class_weights import ClassWeights
from fedskew.methods.hook_results import wrong_number
from fedskew.methods.parts import Client, Mode, Objective, Outputs, Part, Tensors
from fedskew.methods.regularisers import Regulariser


@dataclass(frozen=True)
class WrappedObjective(Objective):
    """An objective around an inner one. The hooks defined here call those of the inner objective.

    A subclass defines `loss` and `members`. Engines call the hooks of `Part`, such as `uplink`, on each member.
    """

    objective: Objective

    def companions(self) -> dict[str, Mode]:
        return self.objective.companions()

    def proximal(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        return self.objective.proximal(out, y, client)

    def class_outputs(self, out: Outputs) -> Outputs:
        return self.objective.class_outputs(out)

    def perturbed(self, features: Tensor, y: Tensor, client: Client, key: Tensor) -> Tensor:
        return self.objective.perturbed(features, y, client, key)

    def tally(self, out: Outputs, y: Tensor) -> Tensors:
        return self.objective.tally(out, y)

    def extra_forwards(self, visits: float, tally: Mapping[str, float]) -> float:
        return self.objective.extra_forwards(visits, tally)


@dataclass(frozen=True)
class Regularised(WrappedObjective):
    """An objective with a regulariser, whose term is added to the loss."""

    regulariser: Regulariser

    @property
    def members(self) -> tuple[Part, ...]:
        return (*self.objective.members, self.regulariser)

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        loss = self.objective.loss(out, y, client)
        term = self.regulariser.term(self.objective.class_outputs(out), y, client)
        for part, hook, found in ((self.objective, "loss", loss), (self.regulariser, "term", term)):
            if not isinstance(found, Tensor) or found.dim():
                raise wrong_number(part, hook, found)
        return loss + term


@dataclass(frozen=True)
class ClassWeighted(WrappedObjective):
    """An objective whose cross entropy has class weights."""

    class_weights: ClassWeights

    @property
    def members(self) -> tuple[Part, ...]:
        return (*self.objective.members, self.class_weights)

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        weights = self.class_weights.weights(out.logits, client)
        return self.objective.loss(out, y, replace(client, class_weights=weights))
