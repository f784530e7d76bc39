"""FedETF: a fixed simplex as classifier, so that no client's classes can bias it.

Li et al., "No fear of classifier biases: neural collapse inspired federated learning with synthetic and fixed
classifier", ICCV 2023.

    z_c = s·cos(P h, m_c),   L = CE(z_c + γ·log max(n_c, 1), y)

h are the features. m is a simplex equiangular tight frame, the same for all clients and never trained. The projection P
and the scale s are trained like all other weights. n_c is the client's number of samples of class c. The paper has
γ = 1.

The method chooses the model's head (`--head etf`). Personal fine-tuning, the paper's second part, is not included.

Sent to the server: the model and the client's number of samples.
Extra compute: none.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedskew.errors import expect
from fedskew.losses import cross_entropy
from fedskew.methods.catalogue import method
from fedskew.methods.parts import Client, Objective, Outputs


@method("fedetf", paper="Li et al., ICCV 2023")
@dataclass(frozen=True)
class FedETF(Objective):
    """A fixed simplex as classifier, and logits shifted by the log of the client's label counts."""

    gamma: float = 1.0
    """γ: the strength of the shift."""

    head = "etf"
    takes_class_weights = True

    def __post_init__(self) -> None:
        expect(self.gamma >= 0, "gamma", self.gamma, "a number ≥ 0")

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        shift = client.label_counts.clamp(min=1).to(out.logits.dtype).log()
        return cross_entropy(out.logits + self.gamma * shift, y, client.class_weights)
