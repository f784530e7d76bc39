"""FedSOL computes its gradients at parameters that it perturbs along the gradient of a proximal loss.

Lee et al., "FedSOL: stabilized orthogonal learning with proximal restrictions in federated learning", CVPR 2024.

    client   g = ∇KL(σ(z^g/τ) ‖ σ(z/τ)),  ε = ρ·λ∘g/‖g‖,  direction = ∇CE(v + ε)
             λ = |v − w|, each tensor divided by its norms along the first axis; 1 without `adaptive`
    server   the weighted mean

v is the client's model during training, and z are its logits. z^g are those of the received model w, σ is the softmax,
and τ is the temperature.

Lowering the loss at v + ε makes the loss insensitive to moves along the proximal gradient g. So local steps become
nearly orthogonal to g, and forget less of w.

Sent to the server: the model and the client's number of samples.
Extra compute: one forward pass of the teacher, and one more forward and backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedskew.errors import expect
from fedskew.losses import distillation
from fedskew.methods.catalogue import register
from fedskew.methods.fedavg import CrossEntropy
from fedskew.methods.fedsam import norm_or_infinity
from fedskew.methods.parts import Client, Gradient, Mode, Outputs, Solver, Tensors


@dataclass(frozen=True)
class ProximalDistillation(CrossEntropy):
    """The cross entropy, and the divergence from the received model as proximal loss."""

    temperature: float = 3.0
    """τ."""

    multi_label = False
    sample_by_sample = True
    takes_class_weights = True
    extra_compute = "1 teacher forward"

    def __post_init__(self) -> None:
        expect(self.temperature > 0, "temperature", self.temperature, "a number > 0")

    def companions(self) -> dict[str, Mode]:
        return {"teacher": "eval"}

    def proximal(self, out: Outputs, y: Tensor, client: Client) -> Tensor:  # noqa: ARG002
        return distillation(out.logits, out.teacher.logits, y, self.temperature) / self.temperature**2


@dataclass(frozen=True)
class OrthogonalSteps(Solver):
    """The gradient at a point that is perturbed along the proximal gradient."""

    rho: float = 1.0
    """ρ; the value in the authors' configuration."""
    adaptive: bool = True
    """Whether parameters that have moved more are perturbed more."""

    extra_compute = "1 forward and backward"
    plain_gradient = False

    def __post_init__(self) -> None:
        expect(self.rho >= 0, "rho", self.rho, "a number ≥ 0")

    def gradients(self) -> int:
        return 2

    def direction(self, gradient: Gradient, params: Tensors, client: Client) -> Tensors:
        proximal = gradient(params, "proximal")
        norm = norm_or_infinity(proximal, params)
        scales = {name: self._scale(v, client.received[name]) for name, v in params.items()}
        return gradient({n: v + self.rho * scales[n] * proximal[n] / norm for n, v in params.items()})

    def _scale(self, param: Tensor, received: Tensor) -> Tensor:
        return normalize((param - received).abs(), dim=0) if self.adaptive else torch.ones_like(param)


register(
    "fedsol",
    parts=(ProximalDistillation, OrthogonalSteps),
    paper="Lee et al., CVPR 2024",
    summary="Local steps along the gradient at a point that is perturbed along the gradient of a distillation loss.",
)
