"""Class weights: samples of rare classes count more in the cross entropy of any method that has one.

    L = mean of w_y·CE(z, y) + the method's other terms, which stay as they are

    balanced   w_c = n/(C'·n_c), from the client's own label counts n_c, which stay on the client. n is their sum, and
               C' is the number of classes that the client has. This is scikit-learn's "balanced"
    counts     the same, from the label counts of the whole federation. Clients send their counts, and the server adds
               up those of each earlier round's participants. A client counts once for each round in which it took
               part. In the first round, all weights are 1. Later, a class that no participant had so far gets the
               largest weight
    given      one weight per class, the same for all clients

With several labels per sample, w_c is the weight of a label's positives, negatives/positives (torch's `pos_weight`). A
label that none of the counted samples has, or that all have, gets the weight 1.

The loss is divided by the number of samples, not by the sum of their weights. So the mean of the clients' losses,
weighted by their samples, is the weighted loss on all data. See `task.weigh`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedskew.accurate_sums import ACCURATE
from fedskew.losses import balanced_label_weights, balanced_weights
from fedskew.methods.catalogue import Entry, find
from fedskew.methods.parts import Client, Objective, Part, Reveals, Tensors, Trained, Updates
from fedskew.methods.personal import Personal
from fedskew.methods.stages import Schedule


@dataclass(frozen=True)
class ClassWeights(Part):
    """Computes the weights of the classes in the cross entropy."""

    sample_by_sample: ClassVar[bool] = False
    """Whether a sample's weight depends neither on label counts nor on other samples (see `Part`)."""

    def weights(self, logits: Tensor, client: Client) -> Tensor:
        """Return one weight per class, [C], in the dtype of the logits."""
        raise NotImplementedError


@dataclass(frozen=True)
class GivenWeights(ClassWeights):
    """The same weights for all clients."""

    values: tuple[float, ...]

    sample_by_sample = True

    def weights(self, logits: Tensor, client: Client) -> Tensor:  # noqa: ARG002
        return filled(self.values, logits)


@dataclass(frozen=True)
class BalancedWeights(ClassWeights):
    """Every client balances its own classes."""

    def weights(self, logits: Tensor, client: Client) -> Tensor:
        return balanced_weights(client.label_counts, logits)


@dataclass(frozen=True)
class BalancedLabelWeights(ClassWeights):
    """Every client balances the positives and negatives of each label, for samples with several labels."""

    needs_sample_count = True

    def weights(self, logits: Tensor, client: Client) -> Tensor:
        return balanced_label_weights(client.label_counts, client.state["sample_count"], logits)


@dataclass(frozen=True)
class FederationWeights(ClassWeights):
    """Balances the classes of the whole federation."""

    classes: int

    sends = "label counts"
    reveals: ClassVar[Reveals] = "label counts"
    sums: ClassVar[tuple[str, ...]] = ("weight_counts",)
    """What the server adds up over the clients and rounds."""

    def server_state(self, params: Tensors) -> Tensors:
        like = next(iter(params.values()))
        return {"weight_counts": torch.zeros(self.classes, dtype=ACCURATE[like.device.type], device=like.device)}

    def downlink(self, server_state: Tensors) -> Tensors:
        counts = server_state["weight_counts"]
        weights = balanced_weights(counts, counts)
        unseen = torch.where(counts.sum() > 0, weights.max(), 1.0)
        return {"class_weights": torch.where(counts > 0, weights, unseen)}

    def weights(self, logits: Tensor, client: Client) -> Tensor:
        return client.downlink["class_weights"].to(logits.dtype)

    def uplink(self, trained: Trained, client: Client) -> Tensors:  # noqa: ARG002
        return {"weight_counts": client.label_counts}

    def next_server_state(self, updates: Updates, server_state: Tensors) -> Tensors:
        before = {name: server_state[name] for name in self.sums}
        return {name: sums + updates.uplink[name].sum(dim=0).to(sums) for name, sums in before.items()}


@dataclass(frozen=True)
class FederationLabelWeights(FederationWeights):
    """Balances the positives and negatives of each label in the whole federation."""

    needs_sample_count = True
    sums = ("weight_counts", "weight_samples")

    def server_state(self, params: Tensors) -> Tensors:
        counts = super().server_state(params)
        return {**counts, "weight_samples": counts["weight_counts"].new_zeros(())}

    def downlink(self, server_state: Tensors) -> Tensors:
        counts = server_state["weight_counts"]
        return {"class_weights": balanced_label_weights(counts, server_state["weight_samples"], counts)}

    def uplink(self, trained: Trained, client: Client) -> Tensors:
        return {**super().uplink(trained, client), "weight_samples": client.state["sample_count"]}


FEDERATION_COUNTS = Entry(
    "class_weights=counts", (FederationWeights,), paper="", summary="Class weights from the federation's label counts."
)
"""What `class_weights: counts` adds to what a method sends and reveals."""


def entries_with_weights(method: str, class_weights: object) -> list[Entry]:
    """Return the entries of the methods joined by + in `method`. Add `FEDERATION_COUNTS` for the setting `counts`."""
    entries = [find(single.strip()) for single in method.split("+")]
    return [*entries, FEDERATION_COUNTS] if class_weights == "counts" else entries


def describe_weights(setting: str | Mapping[str, float] | None) -> str:
    """Return the setting `class_weights` in words."""
    if isinstance(setting, Mapping):
        return ", ".join(f"{name} {weight:g}" for name, weight in setting.items())
    return setting or "none"


def sent_by_clients(entries: Sequence[Entry]) -> str:
    """Return what a client sends under the methods and settings with these entries."""
    words = dict.fromkeys(word for entry in entries for word in entry.sends.split(", "))
    shares = [part.shares for entry in entries for part in entry.parts if issubclass(part, Personal)]
    if shares and "model" not in shares:  # then no method in the combination sends the whole model
        words.pop("model", None)
    return ", ".join(words)


def revealed_labels(entries: Sequence[Entry]) -> str:
    """Return what the server learns about a client's labels and features under these methods and settings."""
    learned = [item for entry in entries if entry.reveals != "nothing" for item in entry.reveals.split(", ")]
    return ", ".join(dict.fromkeys(learned)) or "nothing"


def entries_name(entries: Sequence[Entry]) -> str:
    """Return the names of the entries, joined by +."""
    return "+".join(entry.name for entry in entries)


def filled(values: tuple[float, ...], like: Tensor) -> Tensor:
    """Return the values as a tensor, filled in one by one. A CUDA graph cannot replay the copy of a list to the GPU."""
    return torch.stack([like.new_full((), value) for value in values])


def takes_weights(part: Objective | Schedule) -> bool:
    """Return whether the part declares `takes_class_weights`.

    A class that overrides an inherited loss must declare it again, because the new loss may ignore the weights.
    """
    hook = "stages" if isinstance(part, Schedule) else "loss"
    for kind in type(part).__mro__:
        if "takes_class_weights" in vars(kind):
            return bool(kind.takes_class_weights)  # type: ignore[attr-defined]
        if hook in vars(kind):
            return False
    return False
