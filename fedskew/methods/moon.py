"""MOON: features close to the global model's, far from those of the client's own last model.

Li et al., "Model-contrastive federated learning", CVPR 2021.

    L = CE + μ·ℓ,  ℓ = −log( e^{cos(h, h^g)/τ} / (e^{cos(h, h^g)/τ} + e^{cos(h, h^prev)/τ}) )

h are the features that the head sees, of the model in training, of the one received and of the one this client made
when it last took part; before that there is none, and ℓ has no gradient. Leaves the client: the model. The client
keeps one model. Extra compute: two forward passes of frozen models.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedskew.errors import expect
from fedskew.losses import cross_entropy, model_contrast
from fedskew.methods.catalogue import method
from fedskew.methods.parts import Client, Mode, Objective, Outputs, Tensors, Trained, pack


@method("moon", paper="Li et al., CVPR 2021")
@dataclass(frozen=True)
class MOON(Objective):
    """Cross entropy and a contrast between the global and the client's previous features."""

    mu: float = 0.01
    """0.01 in the FedVLS paper, 0.1 in FedLMD's."""
    temperature: float = 0.5
    """0.5 in the FedVLS paper, mostly 1 in FedLMD's."""
    teacher_mode: Mode = "train"
    """Of both frozen models: a client does not keep the BatchNorm statistics of its last model."""

    needs_features = True
    extra_compute = "2 teacher forwards"

    def __post_init__(self) -> None:
        expect(self.mu >= 0, "mu", self.mu, "a number ≥ 0")
        expect(self.temperature > 0, "temperature", self.temperature, "a number > 0")

    def companions(self) -> dict[str, Mode]:
        return {"teacher": self.teacher_mode, "state/previous": self.teacher_mode}

    def client_state(self, params: Tensors) -> Tensors:
        return pack("previous", params)

    def next_state(self, trained: Trained, client: Client) -> Tensors:  # noqa: ARG002
        return pack("previous", trained.params)

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:  # noqa: ARG002
        previous = out.companions["state/previous"]
        contrast = model_contrast(
            out.known_features, out.teacher.known_features, previous.known_features, y, self.temperature
        )
        return cross_entropy(out.logits, y) + self.mu * contrast
