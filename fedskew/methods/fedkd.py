"""FedKD: distillation from the global model over all classes, over the client's classes, or decoupled.

FedKD, also called FedAvg+KD, applies Hinton et al., "Distilling the knowledge in a neural network", 2015, on every
client. FedEKD and FedDKD are variants that Guo et al., AAAI 2025, compare with FedVLS. FedDKD follows Zhao et al.,
"Decoupled knowledge distillation", CVPR 2022.

    FedKD    L = CE + β·τ²·KL( σ(z^g/τ) ‖ σ(z/τ) )
    FedEKD   the same with both softmaxes over the client's classes
    FedDKD   L = CE + τ²·( α·KL(b^g ‖ b) + β·KL( σ(z^g_{≠y}/τ) ‖ σ(z_{≠y}/τ) ) ),  b = (p_y, 1 − p_y)

z are the client's logits, and z^g are those of the received global model, the teacher. σ is the softmax and τ is the
temperature. z_{≠y} are the logits of all classes but the target y. p_y is the target's entry of σ(z/τ), and b^g is the
teacher's b.

Sent to the server: the model and the client's number of samples.
Extra compute: one forward pass of the teacher.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedskew.errors import expect
from fedskew.losses import (
    cross_entropy,
    distillation,
    not_true_distillation,
    present_distillation,
    target_distillation,
)
from fedskew.methods.catalogue import method
from fedskew.methods.parts import Client, Mode, Objective, Outputs


@method("fedkd", "fedavg-kd", paper="Hinton et al., 2015")
@dataclass(frozen=True)
class FedKD(Objective):
    """Cross entropy and distillation over all classes."""

    beta: float = 1.0
    """β, the weight of the distillation."""
    temperature: float = 1.0
    """τ."""

    extra_compute = "1 teacher forward"
    sample_by_sample = True
    takes_class_weights = True

    def __post_init__(self) -> None:
        expect(self.beta >= 0, "beta", self.beta, "a number ≥ 0")
        expect(self.temperature > 0, "temperature", self.temperature, "a number > 0")

    def companions(self) -> dict[str, Mode]:
        return {"teacher": "eval"}

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        distilled = distillation(out.logits, out.teacher.logits, y, self.temperature)
        return cross_entropy(out.logits, y, client.class_weights) + self.beta * distilled


@method("fedekd", paper="Guo et al., AAAI 2025")
@dataclass(frozen=True)
class FedEKD(FedKD):
    """Cross entropy and distillation over the client's classes."""

    takes_class_weights = True

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        distilled = present_distillation(out.logits, out.teacher.logits, y, client.label_counts, self.temperature)
        return cross_entropy(out.logits, y, client.class_weights) + self.beta * distilled


@method("feddkd", paper="Zhao et al., CVPR 2022")
@dataclass(frozen=True)
class FedDKD(Objective):
    """Cross entropy and decoupled distillation: the target against the rest, and the non-target classes."""

    alpha: float = 1.0
    """α, the weight of the term for the target against the rest (TCKD)."""
    beta: float = 8.0
    """β, the weight of the term for the non-target classes (NCKD)."""
    temperature: float = 4.0
    """τ."""

    extra_compute = "1 teacher forward"
    sample_by_sample = True
    takes_class_weights = True

    def __post_init__(self) -> None:
        expect(self.alpha >= 0, "alpha", self.alpha, "a number ≥ 0")
        expect(self.beta >= 0, "beta", self.beta, "a number ≥ 0")
        expect(self.temperature > 0, "temperature", self.temperature, "a number > 0")

    def companions(self) -> dict[str, Mode]:
        return {"teacher": "eval"}

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        logits = out.logits, out.teacher.logits
        target = target_distillation(*logits, y, self.temperature)
        non_target = not_true_distillation(*logits, y, self.temperature)
        return cross_entropy(out.logits, y, client.class_weights) + self.alpha * target + self.beta * non_target
