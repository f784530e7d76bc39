"""Weighted cross entropy: samples of rare classes count more.

King and Zeng, "Logistic regression in rare events data", Political Analysis 2001; the usual class weights.

    L = mean of w_y·CE(z, y),    w_c = n/(C'·n_c)

n_c are the client's samples of class c, n their sum, and C' the number of its classes, as in scikit-learn's "balanced".
The mean weight of the client's samples is 1. Other weights, the same for all clients, can be given instead.

Sent to the server: the model. Label counts stay on the client.
Extra compute: none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedskew.errors import expect
from fedskew.losses import balanced_weights, weighted_cross_entropy
from fedskew.methods.catalogue import method
from fedskew.methods.parts import Client, Objective, Outputs


@method("weighted-ce", paper="King and Zeng, Political Analysis 2001")
@dataclass(frozen=True)
class WeightedCrossEntropy(Objective):
    """Cross entropy with a weight per class."""

    weights: tuple[float, ...] = ()
    """One weight per class, in the order of the classes. By default, each client balances its own classes."""

    def __post_init__(self) -> None:
        allowed = all(math.isfinite(weight) and weight >= 0 for weight in self.weights)
        allowed &= not self.weights or max(self.weights) > 0
        expect(allowed, "weights", self.weights, "numbers ≥ 0, at least one of them above 0")

    def check(self, params: Mapping[str, Tensor], classes: int) -> None:  # noqa: ARG002
        known = not self.weights or len(self.weights) == classes
        expect(known, "weights", self.weights, f"{classes} numbers, one per class, or none to balance each client")

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        weights = self._given(out.logits) if self.weights else balanced_weights(client.label_counts, out.logits)
        return weighted_cross_entropy(out.logits, y, weights)

    def _given(self, logits: Tensor) -> Tensor:
        """Fill in the weights one by one. A CUDA graph cannot replay the copy of a list from the host."""
        return torch.stack([logits.new_full((), weight) for weight in self.weights])
