"""Weighted cross entropy: samples of rare classes count more.

King and Zeng, "Logistic regression in rare events data", Political Analysis 2001.

    L = mean of w_y·CE(z, y),    w_c = n/(C'·n_c)

z are the logits, and y is the label. The client has n_c samples of class c, n samples in total, and samples of C'
classes. These are the "balanced" weights of scikit-learn. The mean weight of the client's samples is 1. Other weights,
the same for all clients, can be given. The setting `class_weights` weighs the cross entropy of other methods in this
way. In a run of this method, it replaces the balanced weights, and is refused beside given ones.

Sent to the server: the model and the client's number of samples. Label counts stay on the client.
Extra compute: none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedskew.errors import expect
from fedskew.losses import balanced_weights, cross_entropy
from fedskew.methods.catalogue import method
from fedskew.methods.class_weights import filled
from fedskew.methods.parts import Client, Objective, Outputs


@method("weighted-ce", paper="King and Zeng, Political Analysis 2001")
@dataclass(frozen=True)
class WeightedCrossEntropy(Objective):
    """Cross entropy with a weight per class."""

    weights: tuple[float, ...] = ()
    """One weight per class, in the order of the classes. By default, each client balances its own classes."""

    takes_class_weights = True

    def __post_init__(self) -> None:
        valid = all(math.isfinite(weight) and weight >= 0 for weight in self.weights)
        valid &= not self.weights or max(self.weights) > 0
        expect(valid, "weights", self.weights, "numbers ≥ 0, at least one of them above 0")

    def check(self, params: Mapping[str, Tensor], classes: int) -> None:  # noqa: ARG002
        valid = not self.weights or len(self.weights) == classes
        expect(valid, "weights", self.weights, f"{classes} numbers, one per class, or none to balance each client")

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        weights = client.class_weights
        if weights is None:
            counts = client.label_counts
            weights = filled(self.weights, out.logits) if self.weights else balanced_weights(counts, out.logits)
        return cross_entropy(out.logits, y, weights)
