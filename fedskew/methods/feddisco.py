"""FedDisco: clients whose labels are far from the target distribution count less in the mean.

Ye et al., "FedDisco: federated learning with discrepancy-aware collaboration", ICML 2023.

    a_k ∝ max(0, n_k/Σn − a·d_k + b),  d_k = KL(p_k ‖ T)/Σ_j KL(p_j ‖ T)

n_k is the number of samples of client k, and p_k is its label distribution. T is the target, the label distribution of
the test population, which is uniform by default. The sums are over the round's participants. With `distance=l2`, the
distance ‖p_k − T‖ is not divided by the sum. If no participant has a positive weight, the weights are n_k/Σn.

Sent to the server: the model, the client's number of samples and its distance, one number, but no label counts.
Extra compute: none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedskew.accurate_sums import ACCURATE
from fedskew.errors import expect
from fedskew.methods.catalogue import method
from fedskew.methods.parts import Client, Reveals, Tensors, Trained, Updates, Weighting


@method("feddisco", paper="Ye et al., ICML 2023")
@dataclass(frozen=True)
class FedDisco(Weighting):
    """Less weight for clients whose label distribution is far from a target, by default the uniform one."""

    discrepancy_weight: float = 0.5
    """a, the weight of the distance."""
    bias: float = 0.1
    """b. The larger it is, the more equal the weights are."""
    distance: Literal["kl", "l2"] = "kl"
    """How the distance between two label distributions is computed."""
    target: tuple[float, ...] = ()
    """T, the share of each class in the test population; default: all equal."""

    sends = "distance of the label distribution (one number)"
    reveals: ClassVar[Reveals] = "label skew"
    multi_label = False  # several labels per sample have no distribution over the classes

    def __post_init__(self) -> None:
        expect(self.discrepancy_weight >= 0, "discrepancy_weight", self.discrepancy_weight, "a number ≥ 0")
        valid = not self.target or (min(self.target) > 0 and abs(sum(self.target) - 1) < 1e-6)
        expect(valid, "target", self.target, "a positive share for each class, with the sum 1")

    def check(self, params: Mapping[str, Tensor], classes: int) -> None:  # noqa: ARG002
        expect(len(self.target) in (0, classes), "target", self.target, f"{classes} shares, one for each class")

    def uplink(self, trained: Trained, client: Client) -> Tensors:  # noqa: ARG002
        """Return the distance plus 1.

        The server of a federation discards updates whose tensors are far larger than the median of all clients. If the
        median distance were near 0, the server would discard normal updates.
        """
        counts = client.label_counts.to(ACCURATE[client.label_counts.device.type])
        shares = counts / counts.sum().clamp(min=1)
        listed = self.target or [1 / len(shares)] * len(shares)
        target = torch.tensor(listed, dtype=shares.dtype, device=shares.device)
        if self.distance == "l2":
            return {"label_distance": 1 + (shares - target).square().sum().sqrt()}
        return {"label_distance": 1 + torch.xlogy(shares, shares / target).sum()}

    def weigh(self, sent: Tensors, updates: Updates, state: Tensors) -> Tensor:  # noqa: ARG002
        distances = updates.uplink["label_distance"] - 1
        if self.distance == "kl":
            total = distances.sum()
            distances = torch.where(total > 0, distances / total, 0.0)
        weights = (updates.weights - self.discrepancy_weight * distances + self.bias).clamp(min=0)
        return torch.where(weights.sum() > 0, weights, updates.weights)
