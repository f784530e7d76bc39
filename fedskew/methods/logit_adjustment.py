"""Logit adjustment shifts the logits by the log of the classes' shares in the whole federation.

Menon et al., "Long-tail learning via logit adjustment", ICLR 2021.

    L = CE(z_c + τ·log π_c, y)

z_c is the logit of class c, and π_c is the class's share of all samples. The server estimates it from the label counts
of each earlier round's participants, so a client counts once for each round in which it took part. With all clients in
every round, the estimate is exact from the second round on. In the first round π is uniform, which changes nothing. A
class that no participant had so far counts as one sample, so that π has no zero.

Sent to the server: the model and the label counts.
Extra compute: none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedskew.errors import expect
from fedskew.losses import cross_entropy
from fedskew.methods.catalogue import method
from fedskew.methods.parts import Client, Objective, Outputs, Reveals, Tensors, Trained, Updates


@method("logit-adjustment", paper="Menon et al., ICLR 2021")
@dataclass(frozen=True)
class LogitAdjustment(Objective):
    """Cross entropy with logits shifted by the log of the classes' shares in the whole federation."""

    tau: float = 1.0
    """τ, the scale of the shift. With 0, the loss is the cross entropy."""

    sends = "label counts"
    reveals: ClassVar[Reveals] = "label counts"
    needs_linear_head = True
    sample_by_sample = True
    takes_class_weights = True

    def __post_init__(self) -> None:
        expect(self.tau >= 0, "tau", self.tau, "a number ≥ 0")

    def server_state(self, params: Tensors) -> Tensors:
        return {"federation_counts": torch.zeros_like(params["head.weight"].detach()[:, 0])}

    def downlink(self, server_state: Tensors) -> Tensors:
        counts = server_state["federation_counts"].clamp(min=1)
        return {"prior": counts / counts.sum()}

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        return cross_entropy(out.logits + self.tau * client.downlink["prior"].log(), y, client.class_weights)

    def uplink(self, trained: Trained, client: Client) -> Tensors:  # noqa: ARG002
        return {"label_counts": client.label_counts}

    def next_server_state(self, updates: Updates, server_state: Tensors) -> Tensors:
        before = server_state["federation_counts"]
        return {"federation_counts": before + updates.uplink["label_counts"].sum(dim=0).to(before)}
