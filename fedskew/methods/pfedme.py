"""pFedMe: trains personal models near the global one, by Moreau envelopes.

T Dinh et al., "Personalized federated learning with Moreau envelopes", NeurIPS 2020.

    step     v are the client's parameters. θ ← v, then κ times on the same batch: θ ← θ − η_p·(∇L(θ) + λ·(θ − v))
             direction = λ·(v − θ)
    server   w ← (1 − β)·w + β·Σ a_k·w_k

w_k is the model of client k, and a_k is the client's weight in the average. The run evaluates and saves the global
model w. The personal models θ exist only within a step.

Sent to the server: the model and the client's number of samples.
Extra compute: κ − 1 more forward and backward passes.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedskew.errors import expect
from fedskew.methods.catalogue import register
from fedskew.methods.parts import Client, Gradient, ServerRule, Solver, Tensors, Updates


@dataclass(frozen=True)
class MoreauEnvelope(Solver):
    """The gradient of the Moreau envelope, at an approximate personal optimum."""

    pull: float = 15.0
    """λ, the strength of the pull of θ towards v."""
    inner_steps: int = 5
    """κ, the number of steps of θ per batch."""
    personal_lr: float = 0.05
    """η_p, the learning rate of θ. η_p·λ must stay below 2, or θ diverges."""

    extra_compute = "4 forwards and backwards"

    def __post_init__(self) -> None:
        expect(self.pull > 0, "pull", self.pull, "a number > 0")
        expect(self.inner_steps >= 1, "inner_steps", self.inner_steps, "a whole number ≥ 1")
        expect(self.personal_lr > 0, "personal_lr", self.personal_lr, "a number > 0")

    def gradients(self) -> int:
        return self.inner_steps

    def direction(self, gradient: Gradient, params: Tensors, client: Client) -> Tensors:  # noqa: ARG002
        personal = params
        for _ in range(self.inner_steps):
            grads = gradient(personal)
            personal = {n: t - self.personal_lr * (grads[n] + self.pull * (t - params[n])) for n, t in personal.items()}
        return {name: self.pull * (v - personal[name]) for name, v in params.items()}


@dataclass(frozen=True)
class PartialMean(ServerRule):
    """A step towards the mean of the models."""

    server_lr: float = 1.0
    """β. With 1, the step ends at the mean."""

    uses_only_mean = True

    def __post_init__(self) -> None:
        expect(self.server_lr > 0, "server_lr", self.server_lr, "a number > 0")

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
        mean = updates.mean()
        return {name: (1 - self.server_lr) * w + self.server_lr * mean[name] for name, w in sent.items()}, state


register(
    "pfedme",
    parts=(MoreauEnvelope, PartialMean),
    paper="T Dinh et al., NeurIPS 2020",
    summary="Local steps towards personal models near the global one.",
)
