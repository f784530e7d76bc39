"""FedProx: a pull towards the received model.

Li et al., "Federated optimization in heterogeneous networks", MLSys 2020.

    L = CE + (μ/2)·‖v − w‖²,  hence  direction = ∇CE(v) + μ·(v − w)

v is the client's model during training, and w is the received model. The norm is over the trainable parameters.

Sent to the server: the model and the client's number of samples.
Extra compute: negligible.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedskew.errors import expect
from fedskew.methods.catalogue import method
from fedskew.methods.parts import Client, Gradient, Solver, Tensors


@method("fedprox", paper="Li et al., MLSys 2020")
@dataclass(frozen=True)
class FedProx(Solver):
    """SGD with a proximal pull towards the received model."""

    mu: float = 0.01
    """μ, the strength of the pull. The FedVLS paper uses 0.01, and the FedLMD paper 0.5."""

    def __post_init__(self) -> None:
        expect(self.mu >= 0, "mu", self.mu, "a number ≥ 0")

    def direction(self, gradient: Gradient, params: Tensors, client: Client) -> Tensors:
        grads = gradient(params)
        return {name: grads[name] + self.mu * (v - client.received[name]) for name, v in params.items()}
