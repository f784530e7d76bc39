"""Ditto trains the global model by FedAvg and, on every client, a personal model near the global one.

Li et al., "Ditto: fair and robust federated learning through personalization", ICML 2021.

    client   w_k ← SGD on the cross entropy, from w
             v_k ← v_k − η·(∇CE(v_k) + λ·(v_k − w)), for the run's local epochs, from the client's v_k
    server   w ← Σ a_k·w_k

w is the received global model, a_k is client k's weight in the average, and η is the learning rate. v_k starts at the
initial global model and never leaves the client. Both models are tested. An objective that Ditto is combined with
trains both models. A solver or a server rule concerns w only.

Sent to the server: the model and the client's number of samples.
Extra compute: the local training of a second model in each round.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedskew.errors import expect
from fedskew.methods.catalogue import method
from fedskew.methods.fedprox import FedProx
from fedskew.methods.parts import Solver
from fedskew.methods.personal import Personal


@method("ditto", paper="Li et al., ICML 2021")
@dataclass(frozen=True)
class Ditto(Personal):
    """Every client also trains a model of its own, near the global model."""

    pull: float = 1.0
    """λ, the pull towards the global model."""

    has_global_model = True
    extra_compute = "local training of a second model per round"

    def __post_init__(self) -> None:
        expect(self.pull >= 0, "pull", self.pull, "a number ≥ 0")

    def own_solver(self) -> Solver:
        return FedProx(mu=self.pull)
