"""FedUV penalises predictions that vary too little over the batch, and features that lie close together.

Son et al., "FedUV: uniformity and variance for heterogeneous federated learning", CVPR 2024.

    L = base + λ·mean_c max(0, 1/√C − std_B(p_c)) + μ·mean_{i<j} exp(−‖h_i − h_j‖²/σ)

p are the predicted probabilities and h the features of a batch, and std_B is the standard deviation over the batch.
1/√C is the standard deviation of p_c if every class is predicted once, with probability 1. σ is the median of the
batch's squared distances that are not 0.

The base is cross entropy, or the loss of the objective that FedUV is combined with.

Sent to the server: the model and the client's number of samples.
Extra compute: the distances between all pairs of a batch's features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedskew.errors import expect
from fedskew.losses.features import squared_distances
from fedskew.methods.catalogue import method
from fedskew.methods.parts import Client, Outputs
from fedskew.methods.regularisers import Regulariser
from fedskew.task import real_rows


@method("feduv", paper="Son et al., CVPR 2024")
@dataclass(frozen=True)
class FedUV(Regulariser):
    """Penalties on predictions that vary too little over the batch, and on features that lie close together."""

    variance: float = 2.5
    """λ, the weight of the penalty on predictions."""
    uniformity: float = 0.5
    """μ, the weight of the penalty on features."""

    needs_features = True

    def __post_init__(self) -> None:
        expect(self.variance >= 0, "variance", self.variance, "a number ≥ 0")
        expect(self.uniformity >= 0, "uniformity", self.uniformity, "a number ≥ 0")

    def term(self, out: Outputs, y: Tensor, client: Client) -> Tensor:  # noqa: ARG002
        real = real_rows(y)
        spread = self.variance * missing_variance(out.logits, real)
        return spread + self.uniformity * closeness(out.required_features.flatten(1), real)


def missing_variance(logits: Tensor, real: Tensor) -> Tensor:
    """Return the mean over the classes of max(0, 1/√C − std(p_c)). It is 0 for a batch of one."""
    rows = real.to(logits.dtype).unsqueeze(-1)
    number = rows.sum()
    probabilities = logits.softmax(dim=-1)
    centred = (probabilities - (rows * probabilities).sum(dim=0) / number.clamp(min=1)) * rows
    variance = centred.square().sum(dim=0) / (number - 1).clamp(min=1)
    deviation = variance.clamp(min=torch.finfo(logits.dtype).tiny).sqrt()  # the gradient at 0 would be infinite
    missing = (logits.shape[-1] ** -0.5 - deviation).clamp(min=0).mean()
    return torch.where(number > 1, missing, torch.zeros_like(missing))


def closeness(features: Tensor, real: Tensor) -> Tensor:
    """Return the mean of exp(−d²/σ) over all pairs of rows. σ is the median d² of the pairs that differ.

    Return 0 if no pair differs.
    """
    distances = squared_distances(features, features)
    above = torch.ones_like(distances).triu(diagonal=1) > 0
    pairs = above & real.unsqueeze(-1) & real
    differ = pairs & (distances > 0)
    ordered = torch.where(differ, distances, torch.inf).flatten().sort().values
    median = ordered.gather(0, ((differ.sum() - 1) // 2).clamp(min=0).unsqueeze(0))
    median = torch.where(differ.any(), median, torch.ones_like(median))
    mean = torch.where(pairs, (-distances / median).exp(), 0.0).sum() / pairs.sum().clamp(min=1)
    return torch.where(differ.any(), mean, torch.zeros_like(mean)).to(features.dtype)
