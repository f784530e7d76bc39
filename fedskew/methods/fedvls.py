"""FedVLS (also published as FedED): preserves vacant classes by distillation and holds majority classes back.

Guo et al., "Exploring vacant classes in label-skewed federated learning", AAAI 2025.

    L = CE(z + log p, y)                                  calibrated loss, Eq. 2
      + λ · KL(q^g ‖ q) over the vacant classes           vacant-class distillation, Eq. 3
      + w · Σ_c p(c)·log mean_n 1[y_n≠c]·e^{z_{n,c}}      logit suppression, Eqs. 4–5

z are the logits, and p(c) is the share of class c in the client's samples. n is a sample of the batch. q and q^g are
the softmaxes of the client's model and of the teacher, the received global model. With the paper's w = 1, the loss has
no minimum. The published code has w = 0.005 and a variant of the last term with a lower bound (docs/fidelity.md).

Sent to the server: the model and the client's number of samples. Label counts stay on the client.
Extra compute: one forward pass of the teacher.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedskew.errors import expect
from fedskew.losses import SuppressVariant, calibrated_cross_entropy, logit_suppression, vacant_distillation
from fedskew.methods.catalogue import method
from fedskew.methods.parts import Client, Mode, Objective, Outputs


@method("fedvls", "feded", paper="Guo et al., AAAI 2025")
@dataclass(frozen=True)
class FedVLS(Objective):
    """Calibrated loss, vacant-class distillation and logit suppression."""

    distill_weight: float = 0.1
    """λ, the weight of the distillation; the paper's value for CIFAR-100 and Tiny-ImageNet is 0.5."""
    suppress_weight: float = 0.005
    """w, the weight of the logit suppression."""
    suppress_variant: SuppressVariant = "lade"
    """`lade`: the last term of the published code, from the method LADE. `paper`: Eqs. 4–5."""
    teacher_mode: Mode = "train"
    """With `train`, the teacher's BatchNorm uses the batch's statistics, as in the published code. With `eval`, it uses
    its running statistics."""

    extra_compute = "1 teacher forward"
    takes_class_weights = True

    def __post_init__(self) -> None:
        expect(self.distill_weight >= 0, "distill_weight", self.distill_weight, "a number ≥ 0")
        expect(self.suppress_weight >= 0, "suppress_weight", self.suppress_weight, "a number ≥ 0")

    def companions(self) -> dict[str, Mode]:
        return {"teacher": self.teacher_mode}

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        z, counts = out.logits, client.label_counts
        return (
            calibrated_cross_entropy(z, y, counts, client.class_weights)
            + self.distill_weight * vacant_distillation(z, out.teacher.logits, counts, y)
            + self.suppress_weight * logit_suppression(z, y, counts, self.suppress_variant)
        )
