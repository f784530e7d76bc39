"""FedRS: a restricted softmax that limits the update of vacant classes.

Li and Zhan, "FedRS: federated learning with restricted softmax for label distribution non-IID data", KDD 2021.

    L = CE(α_c·z_c, y),  α_c = 1 for present classes, α for vacant ones

z_c is the logit of class c. A class is present if the client has samples of it, and vacant otherwise.

Sent to the server: the model and the client's number of samples. Label presence stays on the client.
Extra compute: none.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedskew.errors import expect
from fedskew.losses import restricted_softmax_cross_entropy
from fedskew.methods.catalogue import method
from fedskew.methods.parts import Client, Objective, Outputs


@method("fedrs", paper="Li and Zhan, KDD 2021")
@dataclass(frozen=True)
class FedRS(Objective):
    """Cross entropy with the logits of vacant classes scaled down."""

    alpha: float = 0.7
    """α. The FedVLS paper uses 0.7, and the FedLMD paper 0.5 or 0.9. With 1, the method is FedAvg."""
    soft: bool = False
    """Use α_c = α + (1 − α)·n_c/max n, as in the authors' later code. n_c counts the client's samples of class c."""

    takes_class_weights = True

    def __post_init__(self) -> None:
        expect(0 <= self.alpha <= 1, "alpha", self.alpha, "a number from 0 to 1")

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        counts, weights = client.label_counts, client.class_weights
        return restricted_softmax_cross_entropy(out.logits, y, counts, self.alpha, self.soft, weights)
