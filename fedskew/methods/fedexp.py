"""FedExP: the server extrapolates the mean update. The more the clients' updates disagree, the longer its step.

Jhunjhunwala et al., "FedExP: speeding up federated averaging via extrapolation", ICLR 2023.

    Δ_k = w_k − w,  Δ = Σ a_k·Δ_k,  η_g = max(1, Σ a_k·‖Δ_k‖² / (2·(‖Δ‖² + ε))),  w ← w + η_g·Δ

w is the global model, w_k is the model that client k sends back, and a_k is its weight in the average. The norms are
over the parameters only. Buffers, such as BatchNorm's statistics, are averaged.

Sent to the server: the model and the client's number of samples.
Extra compute: none on the client.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedskew.errors import expect
from fedskew.methods.catalogue import method
from fedskew.methods.parts import ServerRule, Tensors, Updates, squared_norms, weighted_mean


@method("fedexp", paper="Jhunjhunwala et al., ICLR 2023")
@dataclass(frozen=True)
class FedExP(ServerRule):
    """An extrapolated step along the mean update."""

    epsilon: float = 1e-3
    """ε; the authors' value for CIFAR. They use 0.1 for EMNIST, and the FedVLS paper uses 0.01."""

    def __post_init__(self) -> None:
        expect(self.epsilon > 0, "epsilon", self.epsilon, "a number > 0")

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
        changes = updates.changes(sent)
        mean = weighted_mean(changes, updates.weights)
        mean_square = updates.weights @ squared_norms(changes)
        square_of_mean = squared_norms({name: d.unsqueeze(0) for name, d in mean.items()})[0]
        server_lr = (mean_square / (2 * (square_of_mean + self.epsilon))).clamp(min=1.0)
        return {name: w + server_lr.to(w.dtype) * mean[name] for name, w in sent.items()}, state
