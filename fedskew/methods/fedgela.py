"""FedGELA: a fixed simplex as classifier. Each client scales the logits by its label distribution.

Fan et al., "Federated learning with bilateral curation for partially class-disjoint data", NeurIPS 2023.

    z_c = s·cos(P h, m_c),   L = CE(φ_c·z_c, y),   φ_c = C·n_c/n

h are the features. m is a simplex equiangular tight frame, the same for all clients and never trained. The projection P
and the scale s are trained like all other weights. C is the number of classes, and n_c of the client's n samples have
class c. So φ adapts the logits to the client. The logit of a class that the client does not have is 0, so training does
not push features away from that class. The global model has φ = 1.

The method chooses the model's head (`--head etf`). The paper's personal models, which keep φ, are not included.

Sent to the server: the model and the client's number of samples.
Extra compute: none.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedskew.losses import cross_entropy
from fedskew.methods.catalogue import method
from fedskew.methods.parts import Client, Objective, Outputs


@method("fedgela", paper="Fan et al., NeurIPS 2023")
@dataclass(frozen=True)
class FedGELA(Objective):
    """A fixed simplex as classifier, with logits multiplied by the client's class shares."""

    head = "etf"
    takes_class_weights = True

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        counts = client.label_counts.to(out.logits.dtype)
        share = len(counts) * counts / counts.sum().clamp(min=1)
        return cross_entropy(share * out.logits, y, client.class_weights)
