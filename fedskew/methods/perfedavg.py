"""PerFedAvg trains a global model that becomes a good model for a client after one step on that client's data.

Fallah et al., "Personalized federated learning with theoretical guarantees: a model-agnostic meta-learning approach",
NeurIPS 2020.

    v' = v − α·∇L(v; B₁),  d = ∇L(v'; B₂)
    first-order   direction = d
    hessian-free  direction = d − α·(∇L(v + δ·d; B₁) − ∇L(v − δ·d; B₁))/(2δ)

v are the client's parameters, and L is the objective's loss. B₁ and B₂ are the two halves of the batch. If the batch
has one sample, both halves are that sample. The recorded loss is that of the whole batch at v. The run evaluates and
saves the global model, without a personal step.

Sent to the server: the model and the client's number of samples.
Extra compute: one more forward and backward pass, or three for hessian-free. Each pass runs on the whole batch, as
BatchNorm requires, and ignores half of the labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedskew.errors import expect
from fedskew.methods.catalogue import method
from fedskew.methods.parts import Client, Gradient, Solver, Tensors


def _move(params: Tensors, along: Tensors, length: float) -> Tensors:
    return {name: v + length * along[name] for name, v in params.items()}


@method("perfedavg", paper="Fallah et al., NeurIPS 2020")
@dataclass(frozen=True)
class PerFedAvg(Solver):
    """Local steps along the gradient after a trial step."""

    alpha: float = 0.01
    """α, the learning rate of the trial step."""
    variant: Literal["first-order", "hessian-free"] = "first-order"
    delta: float = 1e-3
    """δ, the step of the finite difference that replaces the Hessian."""

    extra_compute = "1 forward and backward"
    plain_gradient = False

    def __post_init__(self) -> None:
        expect(self.alpha >= 0, "alpha", self.alpha, "a number ≥ 0")
        expect(self.delta > 0, "delta", self.delta, "a number > 0")

    def gradients(self) -> int:
        return 2 if self.variant == "first-order" else 4

    def direction(self, gradient: Gradient, params: Tensors, client: Client) -> Tensors:  # noqa: ARG002
        trial = _move(params, gradient(params, "first"), -self.alpha)
        after = gradient(trial, "second")
        if self.variant == "first-order":
            return after
        ahead, behind = (gradient(_move(params, after, sign * self.delta), "first") for sign in (1, -1))
        scale = self.alpha / (2 * self.delta)
        return {name: d - scale * (ahead[name] - behind[name]) for name, d in after.items()}
