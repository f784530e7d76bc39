"""FedNTD: distil what the global model says of the classes that are not true.

Lee et al., "Preservation of the global knowledge by not-true distillation in federated learning", NeurIPS 2022.

    L = CE + β·τ²·KL( σ(z^g_{≠y}/τ) ‖ σ(z_{≠y}/τ) )

Leaves the client: the model. Extra compute: one forward pass of the teacher.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedskew.errors import expect
from fedskew.losses import cross_entropy, not_true_distillation
from fedskew.methods.catalogue import method
from fedskew.methods.parts import Client, Mode, Objective, Outputs


@method("fedntd", paper="Lee et al., NeurIPS 2022")
@dataclass(frozen=True)
class FedNTD(Objective):
    """Cross entropy and distillation of the not-true classes."""

    beta: float = 1.0
    temperature: float = 1.0

    extra_compute = "1 teacher forward"

    def __post_init__(self) -> None:
        expect(self.beta >= 0, "beta", self.beta, "a number ≥ 0")
        expect(self.temperature > 0, "temperature", self.temperature, "a number > 0")

    def companions(self) -> dict[str, Mode]:
        return {"teacher": "eval"}

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:  # noqa: ARG002
        return cross_entropy(out.logits, y) + self.beta * not_true_distillation(
            out.logits, out.teacher.logits, y, self.temperature
        )
