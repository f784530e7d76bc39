"""Label smoothing mixes the targets with the uniform distribution.

Szegedy et al., "Rethinking the Inception architecture for computer vision", CVPR 2016; a baseline in FedLMD's paper.

    L = CE against (1 − μ)·one-hot + μ/C

Sent to the server: the model and the client's number of samples.
Extra compute: none.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedskew.errors import expect
from fedskew.losses import smoothed_cross_entropy
from fedskew.methods.catalogue import method
from fedskew.methods.parts import Client, Objective, Outputs


@method("label-smoothing", paper="Szegedy et al., CVPR 2016")
@dataclass(frozen=True)
class LabelSmoothing(Objective):
    """Cross entropy against targets mixed with the uniform distribution."""

    smoothing: float = 0.1
    """μ, the share of the uniform distribution in the targets."""

    sample_by_sample = True
    takes_class_weights = True

    def __post_init__(self) -> None:
        expect(0 <= self.smoothing <= 1, "smoothing", self.smoothing, "a number from 0 to 1")

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        return smoothed_cross_entropy(out.logits, y, self.smoothing, client.class_weights)
