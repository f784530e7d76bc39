"""FedGF: sharpness-aware local steps. The perturbation becomes more global if clients drifted far in recent rounds.

Lee and Yoon, "Rethinking the flat minima searching in federated learning", ICML 2024.

    client   v_a = v + ρ·g/‖g‖,  v_m = c·w̃ + (1 − c)·v_a,  direction = ∇L(v_m)
    server   w ← Σ a_k·w_k;  w̃ = w + ρ_g·(w_old − w)/‖w_old − w‖
             c = the share of the last W rounds in which mean_k ‖w_old − w_k‖ > T_D

v is the client's model during training, w_k is that model at the end, and a_k is client k's weight in the average. g is
the gradient at v. w is the global model after the round, w_old is the one before it, and w̃ is a perturbed w.

In the first round c = 0, which is FedSAM. Before W rounds are done, c is the share of all rounds so far.

Clients drift farther if they train longer. So by default, T_D is the published value (0.3 for 8 steps with a learning
rate of 0.01), scaled to the round's steps and learning rate. With momentum, a step moves farther, and counts
as the number of steps without momentum that would move as far.

Sent to the server: the model and the client's numbers of samples and steps.
Extra compute: one more forward and backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedskew.errors import expect
from fedskew.methods.catalogue import register
from fedskew.methods.fedsam import FedSAM, ascend
from fedskew.methods.parts import (
    Client,
    Gradient,
    ServerRule,
    Tensors,
    Trained,
    Updates,
    pack,
    squared_norms,
    unpack,
)

_DRIFT_PER_PATH = 0.3 / (8 * 0.01)
"""The published threshold, 0.3, per unit of path. The path is the number of steps, 8, times the learning rate, 0.01."""


@dataclass(frozen=True)
class InterpolatedPerturbation(FedSAM):
    """FedGF's solver: it steps along the gradient at a point between the client's perturbed point and the server's."""

    def direction(self, gradient: Gradient, params: Tensors, client: Client) -> Tensors:
        own, common = ascend(params, gradient(params), self.rho), unpack("perturbed", client.downlink)
        share = client.downlink["global_share"]
        return gradient({name: share * common[name] + (1 - share) * v for name, v in own.items()})


@dataclass(frozen=True)
class PerturbedMean(ServerRule):
    """FedGF's server: the mean of the models. It also keeps a perturbed copy, and counts the rounds with much drift."""

    global_rho: float = 0.1
    """ρ_g, the distance between w and w̃."""
    threshold: float | None = None
    """T_D (c_o in the authors' script). Rounds with a larger mean drift increase c. Default: 3.75 × lr × the mean
    number of steps."""
    window: int = 30
    """W, in rounds."""

    sends = "local steps (one number)"
    needs_sgd = True

    def __post_init__(self) -> None:
        expect(self.global_rho >= 0, "global_rho", self.global_rho, "a number ≥ 0")
        expect(self.threshold is None or self.threshold >= 0, "threshold", self.threshold, "a number ≥ 0")
        expect(self.window >= 1, "window", self.window, "a whole number ≥ 1")

    def uplink(self, trained: Trained, client: Client) -> Tensors:  # noqa: ARG002
        return {"local_steps": trained.effective_steps()}

    def server_state(self, params: Tensors) -> Tensors:
        like = next(iter(params.values()))
        return {"drifted": like.new_zeros(self.window), "rounds": like.new_zeros(()), **pack("perturbed", params)}

    def downlink(self, server_state: Tensors) -> Tensors:
        rounds = server_state["rounds"].clamp(1, self.window)
        share = server_state["drifted"].sum() / rounds
        return {"global_share": share, **pack("perturbed", unpack("perturbed", server_state))}

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
        mean = updates.mean()
        drift = squared_norms(updates.changes(sent)).sqrt().mean()
        path = updates.lr * updates.uplink["local_steps"].to(drift).mean()
        limit = _DRIFT_PER_PATH * path if self.threshold is None else self.threshold
        drifted = torch.cat([state["drifted"][1:], (drift > limit).to(state["drifted"].dtype).view(1)])
        perturbed = ascend(mean, {name: w - mean[name] for name, w in sent.items()}, self.global_rho)
        rounds = state["rounds"] + 1
        return mean, {**state, "drifted": drifted, "rounds": rounds, **pack("perturbed", perturbed)}


register(
    "fedgf",
    parts=(InterpolatedPerturbation, PerturbedMean),
    paper="Lee and Yoon, ICML 2024",
    summary="Sharpness-aware steps at a point between the client's perturbed point and the server's.",
)
