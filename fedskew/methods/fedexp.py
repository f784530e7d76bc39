"""FedExP: a server step that is the longer, the less the clients' updates agree.

Jhunjhunwala et al., "FedExP: speeding up federated averaging via extrapolation", ICLR 2023.

    Δ_k = w_k − w,  Δ = Σ a_k·Δ_k,  η_g = max(1, Σ a_k·‖Δ_k‖² / (2·(‖Δ‖² + ε))),  w ← w + η_g·Δ

over the parameters; buffers are averaged. Leaves the client: the model. Extra compute: none on the client.
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
    """The authors' value for CIFAR; 0.1 for EMNIST; 0.01 in the FedVLS paper."""

    def __post_init__(self) -> None:
        expect(self.epsilon > 0, "epsilon", self.epsilon, "a number > 0")

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
        changes = updates.changes(sent)
        mean = weighted_mean(changes, updates.weights)
        lengths = updates.weights @ squared_norms(changes)
        length = squared_norms({name: d.unsqueeze(0) for name, d in mean.items()})[0]
        server_lr = (lengths / (2 * (length + self.epsilon))).clamp(min=1.0)
        return {name: w + server_lr.to(w.dtype) * mean[name] for name, w in sent.items()}, state
