"""FedNTD: distil the global model's output over the classes other than the target. FedNTD-Tf: without a teacher.

Lee et al., "Preservation of the global knowledge by not-true distillation in federated learning", NeurIPS 2022.

    FedNTD     L = CE + β·τ²·KL( σ(z^g_{≠y}/τ) ‖ σ(z_{≠y}/τ) )
    FedNTD-Tf  the same with the uniform distribution over the classes ≠ y as the teacher (Lu et al., ACM MM 2023)

Sent to the server: the model.
Extra compute: one forward pass of the teacher; none for Tf.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedskew.errors import expect
from fedskew.losses import cross_entropy, not_true_distillation, teacher_free_not_true
from fedskew.methods.catalogue import method
from fedskew.methods.parts import Client, Mode, Objective, Outputs


def _check(beta: float, temperature: float) -> None:
    expect(beta >= 0, "beta", beta, "a number ≥ 0")
    expect(temperature > 0, "temperature", temperature, "a number > 0")


@method("fedntd", paper="Lee et al., NeurIPS 2022")
@dataclass(frozen=True)
class FedNTD(Objective):
    """Cross entropy and distillation over the not-true classes."""

    beta: float = 1.0
    temperature: float = 1.0

    extra_compute = "1 teacher forward"

    def __post_init__(self) -> None:
        _check(self.beta, self.temperature)

    def companions(self) -> dict[str, Mode]:
        return {"teacher": "eval"}

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:  # noqa: ARG002
        return cross_entropy(out.logits, y) + self.beta * not_true_distillation(
            out.logits, out.teacher.logits, y, self.temperature
        )


@method("fedntd-tf", paper="Lu et al., ACM MM 2023")
@dataclass(frozen=True)
class FedNTDTf(Objective):
    """FedNTD without a teacher: the not-true classes are kept at equal probabilities."""

    beta: float = 1.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        _check(self.beta, self.temperature)

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:  # noqa: ARG002
        return cross_entropy(out.logits, y) + self.beta * teacher_free_not_true(out.logits, y, self.temperature)
