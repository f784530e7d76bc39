"""FedSAM steps along the gradient at the worst nearby point. MoFedSAM mixes it with the last round's mean direction.

Qu et al., "Generalized federated learning via sharpness aware minimization", ICML 2022.

    FedSAM    direction = g̃ = ∇L(v + ρ·g/‖g‖),  g = ∇L(v), with the norm over all parameters together
    MoFedSAM  direction = β·g̃ + (1 − β)·Δ,  Δ ← Σ a_k·(w − w_k)/(J_k·η) on the server, 0 before the first round

v is the client's model during training, and w_k is that model at the end. w is the received model, a_k is client k's
weight in the average, and η is the learning rate. J_k is the client's number of steps or, with momentum, the number of
steps without momentum that would move as far.

Sent to the server: the model and the client's number of samples, and J_k for MoFedSAM.
Extra compute: one more forward and backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedskew.errors import expect
from fedskew.methods.catalogue import method, register
from fedskew.methods.parts import (
    Client,
    Gradient,
    ServerRule,
    Solver,
    Tensors,
    Trained,
    Updates,
    pack,
    unpack,
    weighted_mean,
)

_PAPER = "Qu et al., ICML 2022"


def ascend(params: Tensors, grads: Tensors, rho: float) -> Tensors:
    """Return the point at distance ρ along the gradient, or the same point if the gradient is zero."""
    length = norm_or_infinity(grads, params)
    return {name: v + rho * grads[name] / length for name, v in params.items()}


def norm_or_infinity(grads: Tensors, params: Tensors) -> Tensor:
    """Return the norm of the gradient at `params`, or ∞ if the gradient is zero.

    A gradient with a norm of at most ε·‖`params`‖, where ε is the relative precision of a float, counts as zero. It
    consists of rounding errors, which a step of fixed length would amplify.
    """
    norm, smallest = _norm(grads), _norm(params) * torch.finfo(next(iter(params.values())).dtype).eps
    return torch.where(norm <= smallest, torch.inf, norm)


def _norm(tensors: Tensors) -> Tensor:
    return torch.stack([t.square().sum() for t in tensors.values()]).sum().sqrt()


@method("fedsam", paper=_PAPER)
@dataclass(frozen=True)
class FedSAM(Solver):
    """Sharpness-aware local steps."""

    rho: float = 0.1
    """ρ; the value in the FedVLS paper."""

    extra_compute = "1 forward and backward"

    def __post_init__(self) -> None:
        expect(self.rho >= 0, "rho", self.rho, "a number ≥ 0")

    def gradients(self) -> int:
        return 2

    def direction(self, gradient: Gradient, params: Tensors, client: Client) -> Tensors:  # noqa: ARG002
        return gradient(ascend(params, gradient(params), self.rho))


@dataclass(frozen=True)
class SharpnessAwareMomentum(FedSAM):
    """A sharpness-aware gradient mixed with the last round's mean direction."""

    beta: float = 0.1
    """β, the weight of the client's gradient."""

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(0 < self.beta <= 1, "beta", self.beta, "a number > 0 and ≤ 1")

    def direction(self, gradient: Gradient, params: Tensors, client: Client) -> Tensors:
        own, common = super().direction(gradient, params, client), unpack("common_direction", client.downlink)
        return {name: self.beta * g + (1 - self.beta) * common[name] for name, g in own.items()}


@dataclass(frozen=True)
class CommonDirection(ServerRule):
    """The weighted mean of the models. The server also keeps the mean direction of a local step."""

    sends = "local steps (one number)"
    needs_sgd = True

    def server_state(self, params: Tensors) -> Tensors:
        return pack("common_direction", {name: torch.zeros_like(p) for name, p in params.items()})

    def downlink(self, server_state: Tensors) -> Tensors:
        return pack("common_direction", unpack("common_direction", server_state))

    def uplink(self, trained: Trained, client: Client) -> Tensors:  # noqa: ARG002
        return {"local_steps": trained.effective_steps()}

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
        path = updates.uplink["local_steps"].to(updates.weights.dtype).clamp(min=1) * updates.lr
        direction = weighted_mean(updates.changes(sent), -updates.weights / path)
        return updates.mean(), {**state, **pack("common_direction", direction)}


register(
    "mofedsam",
    parts=(SharpnessAwareMomentum, CommonDirection),
    paper=_PAPER,
    summary="Sharpness-aware local steps with the last round's mean direction as momentum.",
)
