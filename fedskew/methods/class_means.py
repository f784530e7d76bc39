"""A client's mean feature per class, which some methods use as a centre or send to the server as a prototype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedskew.losses import class_masks
from fedskew.methods.parts import Client, Reveals, Seen, Tensors, Trained
from fedskew.methods.regularisers import Regulariser


def class_sums(seen: Seen, client: Client) -> Tensors:
    """Sum and count the batch's features per class, for the hooks `opening` and `closing` (parts.py)."""
    features = seen.out.required_features.flatten(1)
    members = class_masks(seen.y, len(client.label_counts)).to(features.dtype)
    return {"feature_sums": members.T @ features, "feature_counts": members.sum(dim=0)}


def class_means(sums: Tensors) -> Tensor:
    """Return the mean feature per class, `[C, d]`, from the sums over all batches. A vacant class has zeros."""
    return sums["feature_sums"] / sums["feature_counts"].clamp(min=1).unsqueeze(-1)


@dataclass(frozen=True)
class SendsClassMeans(Regulariser):
    """A regulariser whose clients send their class means as prototypes.

    A client sends `prototypes[C, d]` and `prototype_known[C]`, which are zeros and False for a vacant class.
    """

    needs_features = True
    needs_linear_head = True
    sends = "mean feature of each class"
    reveals: ClassVar[Reveals] = "label presence, prototypes"
    extra_compute = "1 forward of each sample per round"

    def closing(self, seen: Seen, client: Client) -> Tensors:
        return class_sums(seen, client)

    def uplink(self, trained: Trained, client: Client) -> Tensors:  # noqa: ARG002
        return {"prototypes": class_means(trained.closing), "prototype_known": trained.closing["feature_counts"] > 0}
