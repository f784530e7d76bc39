"""FedLESAM: sharpness-aware local steps. The perturbation comes from how the global model moved.

Fan et al., "Locally estimated global perturbations are better than local perturbations for federated sharpness-aware
minimization", ICML 2024.

    direction = ∇L(v + ρ·(w_old − w)/‖w_old − w‖),  with the norm over all parameters together

v is the client's model during training, w is the received global model, and w_old is the one that the client received
when it last took part. A client that takes part for the first time steps along the plain gradient. The global model
moved from w_old to w to lower the loss. So the way back estimates the direction in which the federation's loss rises.
FedSAM (fedsam.py) estimates this direction with the gradient on the client's batch, which costs a second gradient per
step.

Sent to the server: the model and the client's number of samples.
Extra compute: negligible.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedskew.errors import expect
from fedskew.methods.catalogue import method
from fedskew.methods.fedsam import ascend
from fedskew.methods.parts import Client, Gradient, Solver, Tensors, Trained, pack, unpack


@method("fedlesam", paper="Fan et al., ICML 2024")
@dataclass(frozen=True)
class FedLESAM(Solver):
    """Sharpness-aware local steps with one gradient each, perturbed back along the global model's last change."""

    rho: float = 0.1
    """ρ; the default in the authors' code."""

    plain_gradient = False

    def __post_init__(self) -> None:
        expect(self.rho >= 0, "rho", self.rho, "a number ≥ 0")

    def client_state(self, params: Tensors) -> Tensors:
        return pack("last_received", params)

    def direction(self, gradient: Gradient, params: Tensors, client: Client) -> Tensors:
        last = unpack("last_received", client.state)
        back = {name: last[name] - w for name, w in client.received.items()}
        return gradient(ascend(params, back, self.rho))

    def next_state(self, trained: Trained, client: Client) -> Tensors:  # noqa: ARG002
        return pack("last_received", client.received)
