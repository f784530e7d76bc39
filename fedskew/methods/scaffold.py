"""SCAFFOLD: control variates that correct client drift.

Karimireddy et al., "SCAFFOLD: stochastic controlled averaging for federated learning", ICML 2020, option II.

    client   direction = ∇CE(v) − c_k + c;  c_k⁺ = c_k − c + (w − w_k)/(J·η)
    server   w ← w + η_g·Σ a_k·(w_k − w);   c ← c + (|S|/K)·mean(c_k⁺ − c_k)

v are the client's parameters, w is the global model, and w_k is the model that client k sends back. c_k and c are the
control variates of client and server, and η is the learning rate. S is the set of participants, K is the number of
clients, and a_k is client k's weight in the average. J is the number of local steps or, with momentum, the number of
steps without momentum that would move as far.

Sent to the server: the model, the client's number of samples, and the change of its control variate.
Extra compute: negligible.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedskew.errors import expect
from fedskew.methods.catalogue import register
from fedskew.methods.parts import (
    Client,
    Gradient,
    ServerRule,
    Solver,
    Tensors,
    Trained,
    Updates,
    pack,
    unpack,
)


def _zero_control(params: Tensors) -> Tensors:
    return pack("control", {name: torch.zeros_like(p) for name, p in params.items()})


@dataclass(frozen=True)
class ControlVariates(Solver):
    """The gradient minus the client's control variate plus the server's."""

    sends = "control variate (the size of one model)"
    needs_sgd = True

    def client_state(self, params: Tensors) -> Tensors:
        return _zero_control(params)

    def downlink(self, server_state: Tensors) -> Tensors:
        return pack("control", unpack("control", server_state))

    def direction(self, gradient: Gradient, params: Tensors, client: Client) -> Tensors:
        own, common = unpack("control", client.state), unpack("control", client.downlink)
        return {name: g - own[name] + common[name] for name, g in gradient(params).items()}

    def next_state(self, trained: Trained, client: Client) -> Tensors:
        own, common = unpack("control", client.state), unpack("control", client.downlink)
        path = trained.effective_steps().clamp(min=1) * trained.lr
        change = {name: (w - trained.params[name]) / path - common[name] for name, w in client.received.items()}
        has_stepped = trained.steps > 0  # a client without a trainable batch keeps its control variate
        return pack("control", {name: own[name] + torch.where(has_stepped, d, 0.0) for name, d in change.items()})

    def uplink(self, trained: Trained, client: Client) -> Tensors:
        old, new = unpack("control", client.state), unpack("control", self.next_state(trained, client))
        return pack("control_change", {name: new[name] - c for name, c in old.items()})


@dataclass(frozen=True)
class ControlledMean(ServerRule):
    """A step along the mean update.

    The server's control variate moves by the mean change of the clients' control variates, times the share of clients
    that took part.
    """

    server_lr: float = 1.0
    """η_g, the server's learning rate."""

    def __post_init__(self) -> None:
        expect(self.server_lr > 0, "server_lr", self.server_lr, "a number > 0")

    def server_state(self, params: Tensors) -> Tensors:
        return _zero_control(params)

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
        mean, control = updates.mean(), unpack("control", state)
        change = {name: t.mean(dim=0) for name, t in unpack("control_change", updates.uplink).items()}
        stepped = {name: w + self.server_lr * (mean[name] - w) for name, w in sent.items()}
        moved = {name: c + updates.participation * change[name] for name, c in control.items()}
        return stepped, {**state, **pack("control", moved)}


register(
    "scaffold",
    parts=(ControlVariates, ControlledMean),
    paper="Karimireddy et al., ICML 2020",
    summary="Control variates that cancel client drift.",
)
