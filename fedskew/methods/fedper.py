"""FedPer: every client keeps the head of the model. The other layers are averaged.

Arivazhagan et al., "Federated learning with personalization layers", arXiv:1912.00818, 2019.

    client   (v_B, v_P) ← SGD on the cross entropy, from (w_B, the client's w_P), all layers at once
    server   w_B ← Σ a_k·v_B,k

B are the base layers and P the personalisation layers, by default the head. w_B are the layers that the client
receives, v is its model during training, and a_k is its weight in the average. A client that never took part has the
initial layers P. There is no global model: the server's P are never trained, so every client's model is tested instead.

Sent to the server: the model without its personalisation layers, and the client's number of samples.
Extra compute: none.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedskew.errors import expect
from fedskew.methods.catalogue import method
from fedskew.methods.personal import Personal


@method("fedper", paper="Arivazhagan et al., 2019")
@dataclass(frozen=True)
class FedPer(Personal):
    """Every client keeps its own head, trained together with the shared layers."""

    layers: tuple[str, ...] = ("head",)
    """The personalisation layers: names such as `head` or `encoder.3`, or patterns of tensors such as `*.bias`."""

    shares = "model without personal layers"

    def __post_init__(self) -> None:
        expect(bool(self.layers), "layers", self.layers, "a list of at least one layer, such as [head]")

    def keeps(self) -> tuple[str, ...]:
        return self.layers
