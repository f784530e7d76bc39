"""FedBN: every client keeps its BatchNorm layers. The other layers are averaged.

Li et al., "FedBN: federated learning on non-IID features via local batch normalization", ICLR 2021.

    client   v ← SGD on the cross entropy, from (w_S, the client's w_N), all layers at once
    server   w_S ← Σ a_k·v_S,k

N are the tensors of all BatchNorm layers: scale, shift, and the running mean and variance. S are all other tensors. w_S
are the tensors that the client receives, v is its model during training, and a_k is its weight in the average.

There is no global model: the server's BatchNorm layers are never trained, so every client's model is tested instead.

Sent to the server: the model without its BatchNorm layers, and the client's number of samples.
Extra compute: none.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedskew.methods.catalogue import method
from fedskew.methods.personal import BATCH_NORM, Personal


@method("fedbn", paper="Li et al., ICLR 2021")
@dataclass(frozen=True)
class FedBN(Personal):
    """Every client keeps its BatchNorm layers."""

    shares = "model without BatchNorm layers"

    def keeps(self) -> tuple[str, ...]:
        return (BATCH_NORM,)
