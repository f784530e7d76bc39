"""BalanceFL's feature augmentation adds noise to the features of rare classes. The noise has the features' covariance.

Shuai et al., "BalanceFL: addressing class imbalance in long-tail federated learning", IPSN 2022.

    L = CE(head(f + m·ε), y),  ε ~ N(0, S),  m = 1 with probability 1 − n_y/max_c n_c, else 0
    S = Σ_c n_c·Cov_c / n, the mean covariance of the client's features within a class, under the received model

f are the features of a sample of class y. n_c is the client's number of samples of class c, and n is the number of all
its samples.

The softmax is over the classes of the batch, as in the published code. BalanceFL's other parts (distillation,
entropy, balanced sampling) are not included.

The noise is the sum over the client's samples i of ξ_i·(f_i − μ_{y_i})·√(n_{y_i}/((n_{y_i} − 1)·n)) with normal ξ_i.
f_i and its class's mean μ_{y_i} are those of the received model. The covariance of the noise is S, and computing it
needs no d×d matrix. As in the published code, a client draws 500 noise vectors per round, and each perturbed sample
takes one of them.

Sent to the server: the model and the client's number of samples.
Extra compute: one forward pass of each sample per round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedskew.errors import expect
from fedskew.losses import batch_class_cross_entropy, class_masks, cross_entropy
from fedskew.methods.catalogue import method
from fedskew.methods.class_means import class_means, class_sums
from fedskew.methods.parts import Client, Objective, Outputs, Seen, Tensors
from fedskew.randomness import fold, uniform


@method("balancefl", paper="Shuai et al., IPSN 2022")
@dataclass(frozen=True)
class BalanceFL(Objective):
    """Cross entropy on features with noise, which the samples of rarer classes get more often."""

    probability: tuple[float, ...] = ()
    """The probability of noise: a list of one number, or of one per class. Default: 1 − n_c/max n, which is 0 for
    balanced classes."""
    softmax: Literal["batch", "all"] = "batch"
    """Whether the softmax is over the classes of the batch or over all classes."""
    noises: int = 500
    """The number of noise vectors per client and round."""

    needs_features = True
    extra_compute = "1 forward of each sample per round"
    takes_class_weights = True

    def __post_init__(self) -> None:
        valid = all(0 <= p <= 1 for p in self.probability)
        expect(valid, "probability", list(self.probability), "numbers from 0 to 1")
        expect(self.noises >= 1, "noises", self.noises, "a whole number ≥ 1")

    def check(self, params: Mapping[str, Tensor], classes: int) -> None:  # noqa: ARG002
        valid = len(self.probability) in (0, 1, classes)
        expect(valid, "probability", list(self.probability), f"a list of one number, or of {classes}: one per class")

    def opening(self, seen: Seen, client: Client) -> Tensors:
        features, counts = seen.out.required_features.flatten(1), client.label_counts
        members = class_masks(seen.y, len(counts)).to(features.dtype)
        drawn = _normal(seen.keys.unsqueeze(-1), torch.arange(self.noises, device=features.device), features.dtype)
        scaled = drawn * (members @ _scales(counts, features)).unsqueeze(-1)
        # The class means are known only after the pass, so `perturbed` subtracts their part of the noise.
        return {
            "noise": scaled.T @ features,
            "noise_by_class": scaled.T @ members,
            **class_sums(seen, client),
        }

    def perturbed(self, features: Tensor, y: Tensor, client: Client, key: Tensor) -> Tensor:
        rows, sums = torch.arange(len(y), device=y.device), client.opening
        which = (uniform(fold(key, 0), rows) * self.noises).long().clamp(max=self.noises - 1)
        noise = sums["noise"][which] - sums["noise_by_class"][which] @ class_means(sums)
        gets_noise = uniform(fold(key, 1), rows) < self._probabilities(client.label_counts)[y.clamp(min=0)]
        return features + torch.where(gets_noise.unsqueeze(-1), noise, 0.0).to(features.dtype).view_as(features)

    def _probabilities(self, counts: Tensor) -> Tensor:
        if self.probability:  # one tensor per number, because a CUDA graph cannot replay the copy of a list to the GPU
            given = [torch.full((1,), p, dtype=torch.float32, device=counts.device) for p in self.probability]
            return torch.cat(given).expand(len(counts))
        return 1 - counts.float() / counts.max().clamp(min=1)

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        loss = batch_class_cross_entropy if self.softmax == "batch" else cross_entropy
        return loss(out.logits, y, client.class_weights)


def _scales(counts: Tensor, like: Tensor) -> Tensor:
    """Return √(n_c/((n_c − 1)·n)). It is 0 for a class with one sample, which has no covariance."""
    n_c = counts.to(like.dtype)
    n = n_c.sum().clamp(min=1)
    return torch.where(n_c > 1, n_c / ((n_c - 1).clamp(min=1) * n), 0.0).sqrt()


def _normal(keys: Tensor, draws: Tensor, dtype: torch.dtype) -> Tensor:
    """Draw normal random numbers from keys, by the Box–Muller transform."""
    radius = (-2 * torch.log1p(-uniform(keys, 2 * draws).to(dtype))).sqrt()
    return radius * torch.cos(2 * math.pi * uniform(keys, 2 * draws + 1).to(dtype))
