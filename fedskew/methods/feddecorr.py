"""FedDecorr: decorrelate the dimensions of the features.

Shi et al., "Towards understanding and mitigating dimensional collapse in heterogeneous federated learning", ICLR 2023.

    L = base + β·(1/N)·mean_{i≠j} (XᵀX)_{ij}²

X has one row for each of the batch's N samples and one column per feature, and its columns are standardised. i and j
are features. The base is cross entropy, or the loss of the objective that FedDecorr is combined with.

Sent to the server: the model and the client's number of samples.
Extra compute: negligible.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedskew.errors import expect
from fedskew.losses import decorrelation
from fedskew.methods.catalogue import method
from fedskew.methods.parts import Client, Outputs
from fedskew.methods.regularisers import Regulariser


@method("feddecorr", paper="Shi et al., ICLR 2023")
@dataclass(frozen=True)
class FedDecorr(Regulariser):
    """A penalty on correlated features."""

    beta: float = 0.1
    """β, the weight of the penalty."""

    needs_features = True
    multi_label = True

    def __post_init__(self) -> None:
        expect(self.beta >= 0, "beta", self.beta, "a number ≥ 0")

    def term(self, out: Outputs, y: Tensor, client: Client) -> Tensor:  # noqa: ARG002
        return self.beta * decorrelation(out.required_features, y)
