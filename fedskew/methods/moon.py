"""MOON keeps features close to the global model's features and far from those of the client's previous model.

Li et al., "Model-contrastive federated learning", CVPR 2021.

    L = CE + μ·ℓ,  ℓ = −log( e^{cos(h, h^g)/τ} / (e^{cos(h, h^g)/τ} + e^{cos(h, h^prev)/τ}) )

The features h, h^g and h^prev are the inputs of the head in three models: the model being trained, the received model,
and the model that this client trained when it last took part. In a client's first round, the received model serves as
the previous one, so ℓ = log 2 has no gradient.

Sent to the server: the model and the client's number of samples. The client keeps one model.
Extra compute: two forward passes of frozen models.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedskew.errors import expect
from fedskew.losses import model_contrast
from fedskew.methods.catalogue import method
from fedskew.methods.parts import Client, Mode, Objective, Outputs, Tensors, Trained, pack
from fedskew.task import task_for


@method("moon", paper="Li et al., CVPR 2021")
@dataclass(frozen=True)
class MOON(Objective):
    """Cross entropy and a contrast of the features with those of the global and of the client's previous model."""

    mu: float = 0.01
    """μ. The default is the value in the FedVLS paper. The FedLMD paper uses 0.1."""
    temperature: float = 0.5
    """τ. The default is the value in the FedVLS paper. The FedLMD paper mostly uses 1."""
    teacher_mode: Mode = "train"
    """The mode of both frozen models. In `train` mode, dropout is active, and BatchNorm uses the batch's statistics. In
    `eval` mode, both models use the received running statistics, because a client does not keep those of its previous
    model."""

    needs_features = True
    multi_label = True
    sample_by_sample = True
    takes_class_weights = True
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

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        previous = out.companions["state/previous"]
        contrast = model_contrast(
            out.required_features, out.teacher.required_features, previous.required_features, y, self.temperature
        )
        return task_for(y).loss(out.logits, y, client.class_weights) + self.mu * contrast
