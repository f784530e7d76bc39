"""PerFedAvg: a model from which one step on a client's own data leads to a good one.

Fallah et al., "Personalized federated learning with theoretical guarantees: a model-agnostic meta-learning approach",
NeurIPS 2020.

    v' = v − α·∇L(v; B₁),  d = ∇L(v'; B₂)
    first-order   direction = d
    hessian-free  direction = d − α·(∇L(v + δ·d; B₁) − ∇L(v − δ·d; B₁))/(2δ)

B₁ and B₂ are the two halves of the batch; where there is one sample, it is both. The loss that is recorded is that of
the whole batch at v; what is tested and saved is the global model, before any such step. Leaves the client: the model.
Extra compute: one more forward and backward pass, three for hessian-free: each takes the whole batch, so that BatchNorm
sees it, and leaves out half of the labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedskew.errors import expect
from fedskew.methods.catalogue import method
from fedskew.methods.parts import Client, Gradient, Solver, Tensors


def _moved(params: Tensors, along: Tensors, length: float) -> Tensors:
    return {name: v + length * along[name] for name, v in params.items()}


@method("perfedavg", paper="Fallah et al., NeurIPS 2020")
@dataclass(frozen=True)
class PerFedAvg(Solver):
    """Local steps by the gradient after a trial step."""

    alpha: float = 0.01
    """The length of the trial step."""
    variant: Literal["first-order", "hessian-free"] = "first-order"
    delta: float = 1e-3
    """How far apart the gradients are whose difference stands for the Hessian."""

    extra_compute = "1 forward and backward"

    def __post_init__(self) -> None:
        expect(self.alpha >= 0, "alpha", self.alpha, "a number ≥ 0")
        expect(self.delta > 0, "delta", self.delta, "a number > 0")

    def gradients(self) -> int:
        return 2 if self.variant == "first-order" else 4

    def direction(self, gradient: Gradient, params: Tensors, client: Client) -> Tensors:  # noqa: ARG002
        tried = _moved(params, gradient(params, "first"), -self.alpha)
        after = gradient(tried, "second")
        if self.variant == "first-order":
            return after
        ahead, behind = (gradient(_moved(params, after, way * self.delta), "first") for way in (1, -1))
        scale = self.alpha / (2 * self.delta)
        return {name: d - scale * (ahead[name] - behind[name]) for name, d in after.items()}
