"""FedDyn: each client's loss is modified so that its optimum agrees with the federation's.

Acar et al., "Federated learning based on dynamic regularization", ICLR 2021.

    client   direction = ∇L(v) − h_k + α·(v − w);  h_k ← h_k − α·(w_k − w)
    server   h ← h − (1/K)·Σ_S (w_k − w);          w ← Σ a_k·w_k − h

v is the client's model during training, and w_k is that model at the end. w is the received model, and a_k is client
k's weight in the average. h_k stays on the client, and h on the server; both start at 0. K is the number of clients,
and S is the set of participants. The server's h is the paper's h divided by α, so the server does not need to know α.

Sent to the server: the model and the client's number of samples.
Extra compute: negligible.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedskew.errors import expect
from fedskew.methods.catalogue import register
from fedskew.methods.parts import Client, Gradient, ServerRule, Solver, Tensors, Trained, Updates, pack, unpack


@dataclass(frozen=True)
class DynamicRegularisation(Solver):
    """The gradient, minus the client's linear term h_k, plus a pull towards the received model."""

    alpha: float = 0.1
    """α, the strength of the pull towards the received model."""

    def __post_init__(self) -> None:
        expect(self.alpha > 0, "alpha", self.alpha, "a number > 0")

    def client_state(self, params: Tensors) -> Tensors:
        return pack("linear_term", {name: torch.zeros_like(p) for name, p in params.items()})

    def direction(self, gradient: Gradient, params: Tensors, client: Client) -> Tensors:
        grads, linear = gradient(params), unpack("linear_term", client.state)
        return {n: grads[n] - linear[n] + self.alpha * (v - client.received[n]) for n, v in params.items()}

    def next_state(self, trained: Trained, client: Client) -> Tensors:
        linear, sent = unpack("linear_term", client.state), client.received
        return pack("linear_term", {n: h - self.alpha * (trained.params[n] - sent[n]) for n, h in linear.items()})


@dataclass(frozen=True)
class CorrectedMean(ServerRule):
    """The mean of the models, corrected by the accumulated updates."""

    def server_state(self, params: Tensors) -> Tensors:
        return pack("correction", {name: torch.zeros_like(p) for name, p in params.items()})

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
        mean, correction = updates.mean(), unpack("correction", state)
        updates_mean = {name: d.mean(dim=0) for name, d in updates.changes(sent).items()}
        correction = {name: h - updates.participation * updates_mean[name] for name, h in correction.items()}
        return {name: w - correction[name] for name, w in mean.items()}, {**state, **pack("correction", correction)}


register(
    "feddyn",
    parts=(DynamicRegularisation, CorrectedMean),
    paper="Acar et al., ICLR 2021",
    summary="Dynamic regularisation that aligns the clients' optima with the federation's.",
)
