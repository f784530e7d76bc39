"""FedNCM: the head's rows are the mean features of each class over all clients.

Legate et al., "Guiding the last layer in federated learning with pre-trained models", NeurIPS 2023.

    client   s_c = Σ_{i: y_i = c} z_i,  n_c = the number of its samples of class c
    server   μ_c = Σ_k s_c^k / Σ_k n_c^k,   head: w_c = μ_c/‖μ_c‖, b = 0

z are the features of the initial model, so this model should be pretrained (`--init`). The logit z·μ_c/‖μ_c‖ is largest
for the class whose mean has the smallest angle to z. With `distance: euclidean`, w_c = μ_c and b_c = −‖μ_c‖²/2, and the
logit is largest for the class whose mean is closest to z. This needs a head with a bias. A class without samples has
μ_c = 0, so its logit is 0.

Sent to the server: the sum of the features and the number of samples of each class, once. The model is also sent,
unchanged.
Extra compute: one forward pass of each sample, and no training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedskew.methods.catalogue import register
from fedskew.methods.feature_sums import ClosedFormHead, OnePass, require_bias
from fedskew.methods.parts import Client, Reveals, Seen, Tensors, Trained


@dataclass(frozen=True)
class ClassMeanHead(ClosedFormHead):
    """FedNCM's server: the class means of all clients' features become the head's rows."""

    distance: Literal["cosine", "euclidean"] = "cosine"
    """How the distance from a sample to a class mean is measured. The published code uses `cosine`."""

    sends = "sum of the features and number of samples per class, once"
    reveals: ClassVar[Reveals] = "label counts, prototypes"

    def check(self, params: Mapping[str, Tensor], classes: int) -> None:  # noqa: ARG002
        if self.distance == "euclidean":
            require_bias(params, "FedNCM with distance 'euclidean'", "distance 'cosine'")

    def opening(self, seen: Seen, client: Client) -> Tensors:
        return {"class_sums": self.class_sums(seen, client)}

    def uplink(self, trained: Trained, client: Client) -> Tensors:  # noqa: ARG002
        return {"class_sums": client.opening["class_sums"], "class_counts": client.label_counts}

    def solve(self, uplink: Tensors) -> tuple[Tensor, Tensor]:
        counts = uplink["class_counts"].sum(dim=0).to(uplink["class_sums"])
        means = uplink["class_sums"].sum(dim=0) / counts.clamp(min=1).unsqueeze(-1)
        if self.distance == "cosine":
            return torch.nn.functional.normalize(means), torch.zeros_like(counts)
        return means, -means.square().sum(dim=-1) / 2


register(
    "fedncm",
    parts=(OnePass, ClassMeanHead),
    paper="Legate et al., NeurIPS 2023",
    summary="The head's rows are the class means of all clients' features: one round, no training.",
    document=__doc__,
)
