"""FedAdagrad, FedYogi and FedAdam: an adaptive optimiser on the server.

Reddi et al., "Adaptive federated optimization", ICLR 2021.

    Δ = Σ a_k·w_k − w,  m ← β₁·m + (1 − β₁)·Δ
    FedAdagrad  v ← v + Δ²
    FedYogi     v ← v − (1 − β₂)·Δ²·sign(v − Δ²)
    FedAdam     v ← β₂·v + (1 − β₂)·Δ²
    w ← w + η_g·m / (√v + τ)

w is the global model, w_k is the model that client k sends back, and a_k is its weight in the average. Each coordinate
has its own m and v. Before the first round, m = 0 and v = τ².

Sent to the server: the model and the client's number of samples.
Extra compute: none on the client.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedskew.errors import expect
from fedskew.methods.catalogue import method
from fedskew.methods.parts import ServerRule, Tensors, Updates, pack, unpack

_PAPER = "Reddi et al., ICLR 2021"


@dataclass(frozen=True)
class _Adaptive(ServerRule):
    """The base of the three methods, which differ in how the second moment v changes."""

    server_lr: float = 0.01
    """η_g, the server's learning rate."""
    tau: float = 1e-3
    """With a small τ, the steps of all coordinates have similar sizes. With a large τ, they are proportional to m."""
    beta1: float = 0.9
    """β₁, the share of m that each round keeps."""

    uses_only_mean = True

    def __post_init__(self) -> None:
        expect(self.server_lr > 0, "server_lr", self.server_lr, "a number > 0")
        expect(self.tau > 0, "tau", self.tau, "a number > 0")
        expect(0 <= self.beta1 < 1, "beta1", self.beta1, "a number ≥ 0 and < 1")

    def server_state(self, params: Tensors) -> Tensors:
        first = {name: torch.zeros_like(p) for name, p in params.items()}
        second = {name: torch.full_like(p, self.tau**2) for name, p in params.items()}
        return {**pack("first_moment", first), **pack("second_moment", second)}

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
        mean, first, second = updates.mean(), unpack("first_moment", state), unpack("second_moment", state)
        change = {name: mean[name] - w for name, w in sent.items()}
        first = {name: self.beta1 * m + (1 - self.beta1) * change[name] for name, m in first.items()}
        second = {name: self.second_moment(v, change[name].square()) for name, v in second.items()}
        stepped = {n: w + self.server_lr * first[n] / (second[n].sqrt() + self.tau) for n, w in sent.items()}
        return stepped, {**state, **pack("first_moment", first), **pack("second_moment", second)}

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        """Return the next v from the current v and the squared mean update Δ²."""
        raise NotImplementedError


@method("fedadagrad", paper=_PAPER)
@dataclass(frozen=True)
class FedAdagrad(_Adaptive):
    """Adagrad on the server: steps shrink where updates have been large."""

    beta1: float = 0.0

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return v + squared


@dataclass(frozen=True)
class _WithBeta2(_Adaptive):
    """The base of FedYogi and FedAdam, in which β₂ sets how fast v changes."""

    beta2: float = 0.99
    """β₂. The closer it is to 1, the more slowly v changes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(0 <= self.beta2 < 1, "beta2", self.beta2, "a number ≥ 0 and < 1")


@method("fedyogi", paper=_PAPER)
@dataclass(frozen=True)
class FedYogi(_WithBeta2):
    """Yogi on the server: like Adam, but v moves towards Δ² by (1 − β₂)·Δ², so a large v falls more slowly."""

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return v - (1 - self.beta2) * squared * (v - squared).sign()


@method("fedadam", paper=_PAPER)
@dataclass(frozen=True)
class FedAdam(_WithBeta2):
    """Adam on the server, without bias correction."""

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * squared
