"""FedBABU: only the body of the model is trained and averaged. Clients fine-tune the final model for themselves.

Oh et al., "FedBABU: toward enhanced representation for federated image classification", ICLR 2022.

    client   φ_k ← SGD on CE(h, φ) for the run's local epochs, from φ, with the initial head h fixed
    server   φ ← Σ a_k·φ_k
    test     (h, φ) ← SGD on the cross entropy for τ_f epochs on the client's training samples, from the final (h, φ)

φ are the weights of the body, h are those of the head, and a_k is client k's weight in the average.

The head h has the same random values at all clients and never changes before fine-tuning. The global model (h, φ) is
tested as it is. If clients hold out samples, the fine-tuned models are tested on these after the last round.

Sent to the server: the model without its head, and the client's number of samples.
Extra compute: τ_f epochs after the last round, if clients hold out samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedskew.errors import expect
from fedskew.methods.catalogue import method
from fedskew.methods.personal import Personal, Phase


@method("fedbabu", paper="Oh et al., ICLR 2022")
@dataclass(frozen=True)
class FedBABU(Personal):
    """The head keeps its random initial values, and clients fine-tune the final model."""

    tuning_epochs: int = 5
    """τ_f, the epochs of fine-tuning before the test."""
    tunes: Literal["all", "head", "body"] = "all"
    """The layers that clients fine-tune."""

    has_global_model = True
    shares = "model without its head"
    extra_compute = "5 epochs of fine-tuning after the last round"

    def __post_init__(self) -> None:
        expect(self.tuning_epochs >= 0, "tuning_epochs", self.tuning_epochs, "a whole number ≥ 0")

    def keeps(self) -> tuple[str, ...]:
        return ("head",)

    def phases(self) -> tuple[Phase, ...]:
        return (Phase("shared"),)

    def fine_tuning(self) -> Phase | None:
        if not self.tuning_epochs:
            return None
        trains: dict[str, Literal["all", "shared", "personal"]] = {"all": "all", "head": "personal", "body": "shared"}
        return Phase(trains[self.tunes], self.tuning_epochs)
