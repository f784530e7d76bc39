"""FedCurv: protect the parameters that matter to the other clients.

Shoham et al., "Overcoming forgetting in federated learning on non-IID data", FL-NeurIPS 2019.

    direction = ∇L(v) + 2λ·Σ_{j≠k} F_j∘(v − w_j)

v is client k's model during training, and ∘ multiplies entry by entry. The sum is over all clients j that have taken
part so far. w_j is the last model of client j, and F_j is the diagonal of its Fisher information at w_j. F_j is
computed from the client's batches: it is the mean of the squared gradients of the batches' mean cross entropies. The
server keeps Σ F_j and Σ F_j∘w_j. A client remembers its own share of both sums, subtracts it from what it receives, and
sends the change of its share.

Sent to the server: the model, the client's number of samples, and the changes of F_k and of F_k∘w_k.
Extra compute: one forward and backward pass of each sample per round.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedskew.errors import expect
from fedskew.losses import IGNORE
from fedskew.methods.catalogue import method
from fedskew.methods.parts import Client, Gradient, Seen, Solver, Tensors, Trained, Updates, pack, unpack

_SUMS = ("fisher", "fisher_centre")
"""The names of Σ F and Σ F∘w on the server, and of a client's own shares in its state."""


@method("fedcurv", paper="Shoham et al., 2019")
@dataclass(frozen=True)
class FedCurv(Solver):
    """The gradient plus a pull towards the other clients' models, weighted by their Fisher information."""

    curvature_weight: float = 1.0
    """λ; FedLMD's tables mostly use 1, and 2 for the most skewed splits."""

    sends = "change of Fisher information (the size of two models)"
    extra_compute = "1 forward and backward of each sample per round"
    needs_gradient = True

    def __post_init__(self) -> None:
        expect(self.curvature_weight >= 0, "curvature_weight", self.curvature_weight, "a number ≥ 0")

    def client_state(self, params: Tensors) -> Tensors:
        zeros = {name: torch.zeros_like(p) for name, p in params.items()}
        return {name: t for sums in _SUMS for name, t in pack(sums, zeros).items()}

    def server_state(self, params: Tensors) -> Tensors:
        return self.client_state(params)

    def downlink(self, server_state: Tensors) -> Tensors:
        return {name: t for sums in _SUMS for name, t in pack(sums, unpack(sums, server_state)).items()}

    def direction(self, gradient: Gradient, params: Tensors, client: Client) -> Tensors:
        fisher, centre = (_others(sums, client) for sums in _SUMS)
        grads, scale = gradient(params), 2 * self.curvature_weight
        return {name: grads[name] + scale * (fisher[name] * v - centre[name]) for name, v in params.items()}

    def closing(self, seen: Seen, client: Client) -> Tensors:  # noqa: ARG002
        squares = {name: g.square() for name, g in seen.gradient.items()}
        has_samples = (seen.y != IGNORE).any()
        return pack("squares", squares) | {"batches": has_samples.to(next(iter(squares.values())).dtype)}

    def next_state(self, trained: Trained, client: Client) -> Tensors:  # noqa: ARG002
        batches = trained.closing["batches"].clamp(min=1)
        fisher = {name: squares / batches for name, squares in unpack("squares", trained.closing).items()}
        centre = {name: f * trained.params[name] for name, f in fisher.items()}
        return pack("fisher", fisher) | pack("fisher_centre", centre)

    def uplink(self, trained: Trained, client: Client) -> Tensors:
        return {f"{name}_change": t - client.state[name] for name, t in self.next_state(trained, client).items()}

    def next_server_state(self, updates: Updates, server_state: Tensors) -> Tensors:
        sums, sent = self.downlink(server_state), updates.uplink
        return {name: t + sent[f"{name}_change"].sum(dim=0) for name, t in sums.items()}


def _others(sums: str, client: Client) -> Tensors:
    """Subtract this client's share from the server's sum."""
    own = unpack(sums, client.state)
    return {name: t - own[name] for name, t in unpack(sums, client.downlink).items()}
