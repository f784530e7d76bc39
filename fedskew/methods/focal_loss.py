"""Focal loss: well-classified samples count less.

Lin et al., "Focal loss for dense object detection", ICCV 2017; a baseline in PKD's paper.

    L = −(1 − p_y)^γ·log p_y

p_y is the predicted probability of the sample's class.

Sent to the server: the model and the client's number of samples.
Extra compute: none.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedskew.errors import expect
from fedskew.losses import focal_cross_entropy
from fedskew.methods.catalogue import method
from fedskew.methods.parts import Client, Objective, Outputs


@method("focal-loss", paper="Lin et al., ICCV 2017")
@dataclass(frozen=True)
class FocalLoss(Objective):
    """Cross entropy with less weight on well-classified samples."""

    gamma: float = 2.0
    """γ. With 0, the loss is the cross entropy."""

    sample_by_sample = True
    takes_class_weights = True

    def __post_init__(self) -> None:
        expect(self.gamma >= 0, "gamma", self.gamma, "a number ≥ 0")

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        return focal_cross_entropy(out.logits, y, self.gamma, client.class_weights)
