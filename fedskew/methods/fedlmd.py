"""FedLMD distils only the minority labels. FedLMD-Tf has no teacher. FedLMD-switch uses Tf first, then FedLMD.

Lu et al., "Federated learning with label-masking distillation", ACM Multimedia 2023.

    FedLMD     L = CE + β·τ²·KL( σ(z^g/τ) over minority∖{y} ‖ σ(z/τ) over all classes ≠ y )
    FedLMD-Tf  the same with the uniform distribution over minority∖{y} in place of the teacher's

z are the client's logits, and z^g are those of the received global model, the teacher. σ is the softmax, τ is the
temperature, and y is the target.

C is the number of classes. A class is a majority class of the client if it has more than n/C of the client's n samples.
All other classes are the client's minority, including vacant ones. With `majority_rule=paper`, C is the number of
classes that the client has, and n/C samples are enough.

Sent to the server: the model and the client's number of samples. Label counts stay on the client.
Extra compute: one forward pass of the teacher; none for Tf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fedskew.errors import expect
from fedskew.losses import (
    MajorityRule,
    cross_entropy,
    label_masking_distillation,
    teacher_free_label_masking,
)
from fedskew.methods.catalogue import method
from fedskew.methods.fedkd import FedKD
from fedskew.methods.parts import Client, Mode, Outputs
from fedskew.methods.stages import Notes, Schedule, Stage

_PAPER = "Lu et al., ACM MM 2023"


@method("fedlmd", paper=_PAPER)
@dataclass(frozen=True)
class FedLMD(FedKD):
    """Cross entropy and distillation over the minority labels.

    The paper uses beta 2 and temperature 3 for CIFAR-10 at Dirichlet 0.05 and for CIFAR-100 with 10 shards per client.
    """

    majority_rule: MajorityRule = "code"
    """Which classes are majority classes: as in the published code, or as in the paper."""

    takes_class_weights = True

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        distilled = label_masking_distillation(
            out.logits, out.teacher.logits, y, client.label_counts, self.temperature, self.majority_rule
        )
        return cross_entropy(out.logits, y, client.class_weights) + self.beta * distilled


@method("fedlmd-tf", paper=_PAPER)
@dataclass(frozen=True)
class FedLMDTf(FedLMD):
    """FedLMD without a teacher: keeps the minority labels at equal probabilities."""

    extra_compute = ""
    takes_class_weights = True

    def companions(self) -> dict[str, Mode]:
        return {}

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        masked = teacher_free_label_masking(out.logits, y, client.label_counts, self.temperature, self.majority_rule)
        return cross_entropy(out.logits, y, client.class_weights) + self.beta * masked


@method("fedlmd-switch", paper=_PAPER)
@dataclass(frozen=True)
class FedLMDSwitch(Schedule):
    """FedLMD-Tf for the first rounds, while the teacher is weak, then FedLMD."""

    switch_round: int | None = None
    """The number of rounds with FedLMD-Tf; default: half of the run."""
    beta: float = 1.0
    """β, the weight of the distillation, before and after the switch."""
    temperature: float = 1.0
    """τ."""
    majority_rule: MajorityRule = "code"
    """Which classes are majority classes: as in the published code, or as in the paper."""

    extra_compute = "1 teacher forward after the switch"
    takes_class_weights = True

    def __post_init__(self) -> None:
        FedLMD(self.beta, self.temperature)  # raises UserError for invalid values
        valid = self.switch_round is None or self.switch_round >= 0
        expect(valid, "switch_round", self.switch_round, "a whole number ≥ 0")

    def stages(self, rounds: int, local_epochs: int, notes: Notes) -> Sequence[Stage]:  # noqa: ARG002
        switch = min(rounds // 2 if self.switch_round is None else self.switch_round, rounds)
        hyper = (self.beta, self.temperature, self.majority_rule)
        return [
            Stage("teacher-free", switch, FedLMDTf(*hyper)),
            Stage("teacher", rounds - switch, FedLMD(*hyper)),
        ]
