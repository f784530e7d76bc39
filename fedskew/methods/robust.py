"""Robust server rules: median, trimmed mean and norm clipping. A few outlying clients cannot move the result far.

Yin et al., "Byzantine-robust distributed learning: towards optimal statistical rates", ICML 2018 (median and trimmed
mean); Sun et al., "Can you really backdoor federated learning?", 2019 (clipping, here without their noise).

    median         w ← median_k w_k for each coordinate; for an even number of models, the mean of the middle two
    trimmed-mean   w ← the mean for each coordinate, without the ⌊β·M⌋ smallest and largest of its M values
    norm-clipping  w ← w + Σ a_k·Δ_k·min(1, S/‖Δ_k‖), Δ_k = w_k − w

w is the global model, and w_k is the model of client k. M is the number of these models, and a_k is the client's weight
in the average. Median and trimmed mean give every participant the same weight, regardless of its number of samples.
With β = 0.1, nothing is trimmed in rounds of fewer than ten participants. BatchNorm's buffers are averaged as usual.

Sent to the server: the model and the client's number of samples.
Extra compute: none on the client.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedskew.errors import expect
from fedskew.methods.catalogue import method
from fedskew.methods.parts import ServerRule, Tensors, Updates, squared_norms, weighted_mean

_YIN = "Yin et al., ICML 2018"


def _without_extremes(stacked: Tensor, at_each_end: int) -> Tensor:
    """Return the coordinate-wise mean without the `at_each_end` smallest and largest values."""
    kept = stacked.sort(dim=0).values[at_each_end : len(stacked) - at_each_end]
    return kept.mean(dim=0)


@method("median", paper=_YIN)
@dataclass(frozen=True)
class Median(ServerRule):
    """The coordinate-wise median of the clients' models."""

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:  # noqa: ARG002
        at_each_end = (len(updates.weights) - 1) // 2
        return {name: _without_extremes(w, at_each_end) for name, w in updates.params.items()}, state


@method("trimmed-mean", paper=_YIN)
@dataclass(frozen=True)
class TrimmedMean(ServerRule):
    """The coordinate-wise mean without the smallest and largest values."""

    trim: float = 0.1
    """β, the share of participants left out at each end. With fewer than 1/β participants, none is left out."""

    def __post_init__(self) -> None:
        expect(0 <= self.trim < 0.5, "trim", self.trim, "a number ≥ 0 and < 0.5")

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:  # noqa: ARG002
        at_each_end = int(self.trim * len(updates.weights) + 1e-9)  # in floats, 0.29·100 is slightly less than 29
        return {name: _without_extremes(w, at_each_end) for name, w in updates.params.items()}, state


@method("norm-clipping", paper="Sun et al., 2019")
@dataclass(frozen=True)
class NormClipping(ServerRule):
    """The weighted mean of updates whose norm is clipped."""

    max_norm: float = 10.0
    """S, for the whole update of a client. Typical norms depend on the model, the learning rate and the local steps."""

    def __post_init__(self) -> None:
        expect(self.max_norm > 0, "max_norm", self.max_norm, "a number > 0")

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
        changes = updates.changes(sent)
        scale = self.max_norm / squared_norms(changes).sqrt().clamp(min=self.max_norm)
        mean = weighted_mean(changes, updates.weights * scale)
        return {name: w + mean[name] for name, w in sent.items()}, state
