"""FedRep: every client keeps the head, and trains it before the body. The body is averaged.

Collins et al., "Exploiting shared representations for personalized federated learning", ICML 2021.

    client   h_k ← SGD on CE(h, φ) for τ epochs, with the received body φ fixed
             φ_k ← SGD on CE(h_k, φ) for the run's local epochs, with the head fixed
    server   φ ← Σ a_k·φ_k

a_k is client k's weight in the average. A client that never took part has the initial head. There is no global model:
the server's head is never trained, so every client's model is tested instead.

Sent to the server: the model without the layers that stay (by default the head), and the client's number of samples.
Extra compute: τ more epochs per round, which train only the head.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedskew.errors import expect
from fedskew.methods.catalogue import method
from fedskew.methods.personal import Personal, Phase


@method("fedrep", paper="Collins et al., ICML 2021")
@dataclass(frozen=True)
class FedRep(Personal):
    """Every client keeps its own head, and trains it before the shared layers."""

    head_epochs: int = 10
    """τ, the epochs in which only the head is trained."""
    layers: tuple[str, ...] = ("head",)
    """The layers that stay on the client: names such as `head` or `encoder.3`, or patterns."""

    shares = "model without personal layers"
    extra_compute = "10 epochs of the head per round"

    def __post_init__(self) -> None:
        expect(self.head_epochs >= 1, "head_epochs", self.head_epochs, "a whole number ≥ 1")
        expect(bool(self.layers), "layers", self.layers, "a list of at least one layer, such as [head]")

    def keeps(self) -> tuple[str, ...]:
        return self.layers

    def phases(self) -> tuple[Phase, ...]:
        return Phase("personal", self.head_epochs), Phase("shared")
