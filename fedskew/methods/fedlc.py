"""FedLC: calibrates the logits by a margin that is larger for rarer classes.

Zhang et al., "Federated learning with label distribution skew via logits calibration", ICML 2022.

    L = CE(z_c − τ·n_c^(−1/4), y)

z_c is the logit of class c, and n_c is the client's number of samples of it. The softmax is over all classes. The
paper's denominator sums over c ≠ y only, which makes training collapse (docs/fidelity.md). With τ > 0, a vacant class
has an infinite margin and drops out.

Sent to the server: the model and the client's number of samples. Label counts stay on the client.
Extra compute: none.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedskew.errors import expect
from fedskew.losses import margin_cross_entropy
from fedskew.methods.catalogue import method
from fedskew.methods.parts import Client, Objective, Outputs


@method("fedlc", paper="Zhang et al., ICML 2022")
@dataclass(frozen=True)
class FedLC(Objective):
    """Cross entropy with a larger margin for rarer classes."""

    tau: float = 0.5
    """τ, the scale of the margins."""

    takes_class_weights = True

    def __post_init__(self) -> None:
        expect(self.tau >= 0, "tau", self.tau, "a number ≥ 0")

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        return margin_cross_entropy(out.logits, y, client.label_counts, self.tau, client.class_weights)
