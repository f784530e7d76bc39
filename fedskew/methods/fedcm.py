"""FedCM: local steps along a mixture of the client's gradient and the last round's mean direction.

Xu et al., "FedCM: federated learning with client-level momentum", arXiv:2106.10874, 2021.

    direction = α·g + (1 − α)·Δ,  g = ∇L(v),  Δ ← Σ a_k·(w − w_k)/(J_k·η) on the server, 0 before the first round

v is the client's model during training, and w_k is that model at the end. w is the received model, a_k is client k's
weight in the average, and η is the learning rate. J_k is the client's number of steps or, with momentum, the number of
steps without momentum that would move as far.

This is MoFedSAM (fedsam.py) without sharpness-aware steps.

Sent to the server: the model, the client's number of samples and J_k.
Extra compute: none.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedskew.errors import expect
from fedskew.methods.catalogue import register
from fedskew.methods.fedsam import CommonDirection
from fedskew.methods.parts import Client, Gradient, Solver, Tensors, unpack


@dataclass(frozen=True)
class ClientMomentum(Solver):
    """The gradient mixed with the last round's mean direction."""

    alpha: float = 0.1
    """α, the weight of the client's gradient."""

    def __post_init__(self) -> None:
        expect(0 < self.alpha <= 1, "alpha", self.alpha, "a number > 0 and ≤ 1")

    def direction(self, gradient: Gradient, params: Tensors, client: Client) -> Tensors:
        common = unpack("common_direction", client.downlink)
        return {name: self.alpha * g + (1 - self.alpha) * common[name] for name, g in gradient(params).items()}


register(
    "fedcm",
    parts=(ClientMomentum, CommonDirection),
    paper="Xu et al., arXiv:2106.10874",
    summary="Local steps with the last round's mean direction as momentum.",
)
