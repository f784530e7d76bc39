"""FedSMOO: dynamic regularisation of the models, as in FedDyn, and of their sharpness-aware perturbations.

Sun et al., "Dynamic regularized sharpness aware minimization in federated learning: approaching global consistency and
smooth landscape", ICML 2023.

    client   e = ρ·(g − μ_k − s)/‖g − μ_k − s‖,  g = ∇L(v);  μ_k ← μ_k + e − s, in every step
             direction = ∇L(v + e) − h_k + α·(v − w);  h_k ← h_k − α·(w_k − w), at the end of the round
    server   s ← ρ·m/‖m‖,  m = the mean of the participants' μ_k;  the model as in FedDyn

v is the client's model during training, w_k is that model at the end, and w is the received model. h_k is as in FedDyn.
The dual variables μ_k pull the perturbations of all clients towards a common one, s.

Sent to the server: the model, the client's number of samples, and μ_k, which has the size of one model.
Extra compute: one more forward and backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedskew.errors import expect
from fedskew.methods.catalogue import register
from fedskew.methods.feddyn import CorrectedMean, DynamicRegularisation
from fedskew.methods.fedsam import norm_or_infinity
from fedskew.methods.parts import STATE, Client, Gradient, Tensors, Trained, Updates, pack, unpack


@dataclass(frozen=True)
class DynamicPerturbation(DynamicRegularisation):
    """FedDyn's direction, at a point that the client's dual variable and the common perturbation determine."""

    rho: float = 0.1
    """ρ, the length of a perturbation."""

    extra_compute = "1 forward and backward"
    sends = "dual variable (the size of one model)"

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(self.rho > 0, "rho", self.rho, "a number > 0")

    def gradients(self) -> int:
        return 2

    def changes_state(self) -> bool:
        return True

    def client_state(self, params: Tensors) -> Tensors:
        return super().client_state(params) | pack("dual", {name: torch.zeros_like(p) for name, p in params.items()})

    def direction(self, gradient: Gradient, params: Tensors, client: Client) -> Tensors:
        dual = unpack("dual", client.state)
        common = {name: self.rho * t for name, t in unpack("common", client.downlink).items()}
        corrected = {name: g - dual[name] - common[name] for name, g in gradient(params).items()}
        norm = norm_or_infinity(corrected, params)
        perturbation = {name: self.rho * g / norm for name, g in corrected.items()}

        def perturbed_gradient(at: Tensors, *part: object) -> Tensors:  # noqa: ARG001
            return gradient({name: v + perturbation[name] for name, v in at.items()})

        moved = {name: mu + perturbation[name] - common[name] for name, mu in dual.items()}
        return super().direction(perturbed_gradient, params, client) | pack(STATE, pack("dual", moved))

    def uplink(self, trained: Trained, client: Client) -> Tensors:  # noqa: ARG002
        return pack("dual", unpack("dual", client.state))

    def next_state(self, trained: Trained, client: Client) -> Tensors:
        return super().next_state(trained, client) | pack("dual", unpack("dual", client.state))


@dataclass(frozen=True)
class CommonPerturbation(CorrectedMean):
    """FedDyn's mean, and the direction of the common perturbation for the next round, s/ρ."""

    def server_state(self, params: Tensors) -> Tensors:
        return super().server_state(params) | pack("common", {name: torch.zeros_like(p) for name, p in params.items()})

    def downlink(self, server_state: Tensors) -> Tensors:
        return pack("common", unpack("common", server_state))

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
        params, after = super().aggregate(sent, updates, state)
        mean = {name: mu.mean(dim=0) for name, mu in unpack("dual", updates.uplink).items()}
        norm = norm_or_infinity(mean, sent)
        return params, {**after, **pack("common", {name: mu / norm for name, mu in mean.items()})}


register(
    "fedsmoo",
    parts=(DynamicPerturbation, CommonPerturbation),
    paper="Sun et al., ICML 2023",
    summary="Dynamic regularisation of the models and of their sharpness-aware perturbations.",
)
