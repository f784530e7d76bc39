"""FedAvgM: momentum on the server.

Hsu et al., "Measuring the effects of non-identical data distribution for federated visual classification", 2019.

    m ← β·m + (w − w̄),  w ← w − η_g·m

w is the global model, w̄ is FedAvg's mean of the clients' models, and m is the momentum, which starts at 0.

Sent to the server: the model and the client's number of samples.
Extra compute: none on the client.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedskew.errors import expect
from fedskew.methods.catalogue import method
from fedskew.methods.parts import ServerRule, Tensors, Updates, pack, unpack


@method("fedavgm", paper="Hsu et al., 2019")
@dataclass(frozen=True)
class FedAvgM(ServerRule):
    """Server momentum on the mean update."""

    server_momentum: float = 0.7
    """β, the share of the momentum that each round keeps."""
    server_lr: float = 1.0
    """η_g, the server's learning rate."""

    uses_only_mean = True

    def __post_init__(self) -> None:
        expect(
            0 <= self.server_momentum < 1,
            "server_momentum",
            self.server_momentum,
            "a number ≥ 0 and < 1",
        )
        expect(self.server_lr > 0, "server_lr", self.server_lr, "a number > 0")

    def server_state(self, params: Tensors) -> Tensors:
        return pack("momentum", {name: torch.zeros_like(p) for name, p in params.items()})

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
        mean, momentum = updates.mean(), unpack("momentum", state)
        momentum = {name: self.server_momentum * momentum[name] + (w - mean[name]) for name, w in sent.items()}
        stepped = {name: w - self.server_lr * momentum[name] for name, w in sent.items()}
        return stepped, {**state, **pack("momentum", momentum)}
