"""FedACG: clients start from the point that the server's momentum is about to reach, and are pulled towards it.

Kim et al., "Communication-efficient federated learning with accelerated client gradient", CVPR 2024.

    client   starts from s = w + λ·m;  L = CE + (μ/2)·‖u − s‖², hence direction = ∇CE(u) + μ·(u − s)
    server   m ← λ·m + Σ a_k·(u_k − s),  w ← w + m, with m = 0 before the first round

w is the global model and m the server's momentum. u is the client's model during training, u_k is that model at the
end, and a_k is client k's weight in the average.

In fedskew, clients compute with v = u − λ·m. So v starts from the received w, and the server adds the mean of v_k − w
to λ·m. The direction is ∇CE(v + λ·m) + μ·(v − w). The models are the same as in the formulas above. The server sends w
and λ·m, and tests w. Weight decay acts on v, not u.

Sent to the server: the model and the client's number of samples.
Extra compute: negligible.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedskew.errors import expect
from fedskew.methods.catalogue import register
from fedskew.methods.parts import Client, Gradient, ServerRule, Solver, Tensors, Updates, pack, unpack


@dataclass(frozen=True)
class AcceleratedGradient(Solver):
    """The gradient ahead of the client's model along the server's momentum, plus a pull towards the received model."""

    mu: float = 0.002
    """μ; the authors' code has 0.001·‖u − s‖², which is μ = 0.002."""

    plain_gradient = False

    def __post_init__(self) -> None:
        expect(self.mu >= 0, "mu", self.mu, "a number ≥ 0")

    def direction(self, gradient: Gradient, params: Tensors, client: Client) -> Tensors:
        ahead = unpack("lookahead", client.downlink)
        grads = gradient({name: v + ahead[name] for name, v in params.items()})
        return {name: grads[name] + self.mu * (v - client.received[name]) for name, v in params.items()}


@dataclass(frozen=True)
class LookaheadMomentum(ServerRule):
    """Server momentum on the mean update. Clients receive λ·m, the momentum that the next round will add."""

    server_momentum: float = 0.85
    """λ; the value in the authors' code."""

    uses_only_mean = True

    def __post_init__(self) -> None:
        expect(0 <= self.server_momentum < 1, "server_momentum", self.server_momentum, "a number ≥ 0 and < 1")

    def server_state(self, params: Tensors) -> Tensors:
        return pack("momentum", {name: torch.zeros_like(p) for name, p in params.items()})

    def downlink(self, server_state: Tensors) -> Tensors:
        momentum = unpack("momentum", server_state)
        return pack("lookahead", {name: self.server_momentum * m for name, m in momentum.items()})

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
        mean, momentum = updates.mean(), unpack("momentum", state)
        momentum = {name: self.server_momentum * momentum[name] + (mean[name] - w) for name, w in sent.items()}
        return {name: w + momentum[name] for name, w in sent.items()}, {**state, **pack("momentum", momentum)}


register(
    "fedacg",
    parts=(AcceleratedGradient, LookaheadMomentum),
    paper="Kim et al., CVPR 2024",
    summary="Clients start from where the server's momentum leads, and are pulled towards that point.",
)
