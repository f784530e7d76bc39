"""FPL: pulls features towards the prototypes of their class. A class can have several prototypes.

Huang et al., "Rethinking federated learning with domain shift: a prototype view", CVPR 2023.

    client   L = base − log( Σ_{p∈P_y} e^{cos(f, p)/τ} / Σ_{p∈P} e^{cos(f, p)/τ} ) + mean_i (f_i − m_{y,i})²
    server   P_c: the participants' mean features of class c, clustered by FINCH and averaged in each cluster
             m_c: the mean of P_c

f are the features of a sample of class y, and i is the index of a feature. P_y are the prototypes of class y, and P
those of all classes.

The base is cross entropy, or the loss of the objective that FPL is combined with. The other terms are 0 in the first
round, and for classes that no participant of the last round had. A client's prototypes are its mean features at the end
of its round. The published code accumulates them during the last epoch, while the model changes.

Sent to the server: the model, the client's number of samples, and the mean feature of each of its classes.
Extra compute: one forward pass of each sample per round.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedskew.errors import expect
from fedskew.losses import prototype_contrast, prototype_distance
from fedskew.methods.catalogue import method
from fedskew.methods.class_means import SendsClassMeans
from fedskew.methods.clustering import cluster_means, finch
from fedskew.methods.parts import Client, Outputs, Tensors, Updates


@method("fpl", paper="Huang et al., CVPR 2023")
@dataclass(frozen=True)
class FPL(SendsClassMeans):
    """Pulls features towards the prototypes of their class, which are clustered over clients."""

    temperature: float = 0.02
    """τ; the published value, for lr 0.01 and all clients in every round. Other settings may need a higher value
    (docs/fidelity.md)."""

    def __post_init__(self) -> None:
        expect(self.temperature > 0, "temperature", self.temperature, "a number > 0")

    def server_state(self, params: Tensors) -> Tensors:
        rows = params["head.weight"].detach().unsqueeze(1)
        return {"prototypes": torch.zeros_like(rows), "prototype_known": torch.zeros_like(rows[..., 0]).bool()}

    def downlink(self, server_state: Tensors) -> Tensors:
        return {name: server_state[name] for name in ("prototypes", "prototype_known")}

    def term(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        features, server = out.required_features, client.downlink
        prototypes, known = server["prototypes"], server["prototype_known"]
        contrast = prototype_contrast(features, y, prototypes, known, self.temperature)
        return contrast + prototype_distance(features, y, prototypes, known)

    def next_server_state(self, updates: Updates, server_state: Tensors) -> Tensors:
        sent, known = (updates.uplink[name].cpu().numpy() for name in ("prototypes", "prototype_known"))
        merged = [_merge_prototypes(sent[known[:, c], c].astype(np.float64)) for c in range(sent.shape[1])]
        before = server_state["prototypes"]
        # The number of prototypes per class is rounded up to a power of two and never shrinks, so shapes rarely change.
        width = max([before.shape[1], *(1 << (len(means) - 1).bit_length() for means in merged if len(means))])
        table = np.zeros((len(merged), width, sent.shape[-1]))
        exists = np.zeros(table.shape[:2], dtype=bool)
        for label, means in enumerate(merged):
            table[label, : len(means)], exists[label, : len(means)] = means, True
        return {
            "prototypes": torch.from_numpy(table).to(before),
            "prototype_known": torch.from_numpy(exists).to(before.device),
        }


def _merge_prototypes(points: np.ndarray) -> np.ndarray:
    """Return the means of FINCH's clusters, [clusters, d]. Without points there are no clusters."""
    return cluster_means(points, finch(points)) if len(points) else points
