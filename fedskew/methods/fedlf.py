"""FedLF: scales logits by how common their class is, pulls features to their class's centre, and decorrelates them.

Lu et al., "FedLF: adaptive logit adjustment and feature optimization in federated long-tailed learning", ACML 2024.

    L = CE(α_c·z_c, y) + λ₁·CE(−d_c, y) + λ₂·(1/N)·mean_{i≠j} (XᵀX)_{ij}²
    α_c = α + (1 − α)·n_c/max n,  d_c = ‖f − μ_c‖ + m·1[c = y],  m = min(max_{c,c'} ‖μ_c − μ_c'‖, 100)

z are the logits and f the features. μ_c is the client's mean feature of class c under the received model, and 0 for a
vacant class. X has one row for each of the batch's N samples and one column per feature, and its columns are
standardised. i and j are features. The first term is FedRS's with `soft`, and the last is FedDecorr's
(docs/fidelity.md).

Sent to the server: the model and the client's number of samples. Label counts and centres stay on the client.
Extra compute: one forward pass of each sample per round.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedskew.errors import expect
from fedskew.losses import centre_cross_entropy, decorrelation, restricted_softmax_cross_entropy
from fedskew.methods.catalogue import method
from fedskew.methods.class_means import class_means, class_sums
from fedskew.methods.parts import Client, Objective, Outputs, Seen, Tensors


@method("fedlf", paper="Lu et al., ACML 2024")
@dataclass(frozen=True)
class FedLF(Objective):
    """Cross entropy with the logits of rare classes scaled down; features are pulled to centres and decorrelated."""

    alpha: float = 0.25
    """The scale of a vacant class's logits. With 1, nothing is scaled."""
    centre_weight: float = 0.01
    """λ₁, the weight of the pull towards the centres."""
    decorrelation_weight: float = 0.01
    """λ₂, the weight of the decorrelation."""
    max_margin: float = 100.0
    """The maximum of m."""

    needs_features = True
    extra_compute = "1 forward of each sample per round"
    takes_class_weights = True

    def __post_init__(self) -> None:
        expect(0 <= self.alpha <= 1, "alpha", self.alpha, "a number from 0 to 1")
        for name in ("centre_weight", "decorrelation_weight", "max_margin"):
            expect(getattr(self, name) >= 0, name, getattr(self, name), "a number ≥ 0")

    def opening(self, seen: Seen, client: Client) -> Tensors:
        return class_sums(seen, client)

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        features, centres = out.required_features, class_means(client.opening)
        counts, weights = client.label_counts, client.class_weights
        return (
            restricted_softmax_cross_entropy(out.logits, y, counts, self.alpha, soft=True, weights=weights)
            + self.centre_weight * centre_cross_entropy(features, y, centres, self.max_margin)
            + self.decorrelation_weight * decorrelation(features, y)
        )
