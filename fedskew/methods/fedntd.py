"""FedNTD: distils the global model's output over the classes other than the target. FedNTD-Tf has no teacher.

Lee et al., "Preservation of the global knowledge by not-true distillation in federated learning", NeurIPS 2022.

    FedNTD     L = CE + β·τ²·KL( σ(z^g_{≠y}/τ) ‖ σ(z_{≠y}/τ) )
    FedNTD-Tf  the same, with equal probabilities in place of the teacher's softmax (Lu et al., ACM MM 2023)

z_{≠y} are the client's logits of all classes but the target y, and z^g are the logits of the received global model, the
teacher. σ is the softmax and τ is the temperature.

Sent to the server: the model and the client's number of samples.
Extra compute: one forward pass of the teacher; none for Tf.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedskew.losses import cross_entropy, not_true_distillation, teacher_free_not_true
from fedskew.methods.catalogue import method
from fedskew.methods.fedkd import FedKD
from fedskew.methods.parts import Client, Mode, Outputs


@method("fedntd", paper="Lee et al., NeurIPS 2022")
@dataclass(frozen=True)
class FedNTD(FedKD):
    """Cross entropy and distillation over the not-true classes."""

    sample_by_sample = True
    takes_class_weights = True

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        distilled = not_true_distillation(out.logits, out.teacher.logits, y, self.temperature)
        return cross_entropy(out.logits, y, client.class_weights) + self.beta * distilled


@method("fedntd-tf", paper="Lu et al., ACM MM 2023")
@dataclass(frozen=True)
class FedNTDTf(FedKD):
    """FedNTD without a teacher: keeps the not-true classes at equal probabilities."""

    extra_compute = ""
    sample_by_sample = True
    takes_class_weights = True

    def companions(self) -> dict[str, Mode]:
        return {}

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        return cross_entropy(out.logits, y, client.class_weights) + self.beta * teacher_free_not_true(
            out.logits, y, self.temperature
        )
