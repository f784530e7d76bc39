"""CCVR: after training, the server draws virtual features of each class and trains the head on them.

Luo et al., "No fear of heterogeneity: classifier calibration for federated learning with non-IID data", NeurIPS 2021.

    client   μ_ck, Σ_ck    mean and covariance of the features of its N_ck samples of class c, once
    server   μ_c = Σ_k N_ck/N_c·μ_ck
             Σ_c = Σ_k (N_ck − 1)/(N_c − 1)·Σ_ck + Σ_k N_ck/(N_c − 1)·(μ_ck − μ_c)(μ_ck − μ_c)ᵀ
             M features z ~ N(μ_c, Σ_c) of each class;  head ← SGD on CE(head(z), c), from the trained head

N_c is the sum of N_ck over all clients k. CCVR is the last round of a run. Any objective trains in the rounds before. A
class without samples has no virtual features. A class with one sample has Σ_c = 0.

Sent to the server: in the last round, the number of samples of each class, and the mean and covariance of their
features. The model is also sent, unchanged. With C classes and d features, the covariances are C·d² numbers per client:
105 MB in float32 for 100 classes and 512 features. A simulation holds those of all clients at once, also in float64,
which takes twice as much.
Extra compute: one forward pass of each sample in the last round, in which no client trains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedskew.accurate_sums import ACCURATE
from fedskew.errors import expect
from fedskew.losses import class_masks
from fedskew.methods.catalogue import register
from fedskew.methods.head_training import HeadTraining
from fedskew.methods.parts import Client, Reveals, Seen, Tensors, Trained, Updates
from fedskew.methods.stages import Calibration
from fedskew.randomness import fold, normal


@dataclass(frozen=True)
class VirtualFeatures(Calibration):
    """Trains the head on features that the server draws from one Gaussian per class."""

    virtual_features: int = 100
    """M, the number of virtual features per class. The paper uses 100 for CIFAR-10 and 500 for CIFAR-100."""
    head_lr: float = 0.01
    head_epochs: int = 10
    head_batch: int = 64
    head_momentum: float = 0.9

    sends = "number, mean and covariance of the features per class, once"
    reveals: ClassVar[Reveals] = "label counts, prototypes, feature covariance"
    extra_compute = "1 forward of each sample in the last round"
    needs_features = True
    needs_linear_head = True
    multi_label = False

    def __post_init__(self) -> None:
        for name in ("virtual_features", "head_lr", "head_batch"):
            expect(getattr(self, name) > 0, name, getattr(self, name), "a number > 0")
        expect(self.head_epochs >= 0, "head_epochs", self.head_epochs, "a whole number ≥ 0")
        expect(0 <= self.head_momentum < 1, "head_momentum", self.head_momentum, "a number ≥ 0 and < 1")

    def opening(self, seen: Seen, client: Client) -> Tensors:
        z = seen.out.required_features.flatten(1)
        z = z.to(ACCURATE[z.device.type])
        members = class_masks(seen.y, len(client.label_counts)).to(z)  # rows of padding are in no class
        z = torch.where(members.any(dim=1, keepdim=True), z, 0.0)
        return {"sums": members.T @ z, "products": torch.einsum("bc,bi,bj->cij", members, z, z)}

    def uplink(self, trained: Trained, client: Client) -> Tensors:
        dtype, counts = trained.params["head.weight"].dtype, client.label_counts.to(client.opening["sums"])
        mean = client.opening["sums"] / counts.clamp(min=1).unsqueeze(-1)
        spread = client.opening["products"] - counts.view(-1, 1, 1) * _outer(mean)
        covariance = spread / (counts - 1).clamp(min=1).view(-1, 1, 1)
        return {"counts": client.label_counts, "means": mean.to(dtype), "covariances": covariance.to(dtype)}

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
        counts, mean, covariance = self.class_statistics(updates.uplink)
        x, y = self.draw(counts, mean, covariance, updates.key)
        training = HeadTraining(self.head_lr, self.head_epochs, self.head_batch, self.head_momentum)
        weight, bias = training.train(sent["head.weight"], sent.get("head.bias"), x, y, updates.key)
        trained = {"head.weight": weight} if bias is None else {"head.weight": weight, "head.bias": bias}
        return {name: trained[name].to(w) if name in trained else w for name, w in sent.items()}, state

    def class_statistics(self, uplink: Tensors) -> tuple[Tensor, Tensor, Tensor]:
        """Return N [C], μ [C, d] and Σ [C, d, d] of all clients together, in float64 if the device has it."""
        accurate = ACCURATE[uplink["means"].device.type]
        counts, means, covariances = (uplink[name].to(accurate) for name in ("counts", "means", "covariances"))
        total = counts.sum(dim=0)
        mean = torch.einsum("kc,kci->ci", counts, means) / total.clamp(min=1).unsqueeze(-1)
        within = torch.einsum("kc,kcij->cij", (counts - 1).clamp(min=0), covariances)
        between = torch.einsum("kc,kci,kcj->cij", counts, means - mean, means - mean)
        return total, mean, (within + between) / (total - 1).clamp(min=1).view(-1, 1, 1)

    def draw(self, counts: Tensor, mean: Tensor, covariance: Tensor, key: int) -> tuple[Tensor, Tensor]:
        """Draw the virtual features of the classes that have samples. Return them with their labels."""
        classes, width = mean.shape
        shape = classes, self.virtual_features, width
        numbers = torch.arange(classes * self.virtual_features * width, device=mean.device).view(shape)
        noise = normal(fold(torch.tensor(key, device=mean.device), numbers))
        root = _square_root(covariance)
        present = counts > 0
        features = mean.unsqueeze(1) + noise @ root
        labels = torch.arange(classes, device=mean.device).unsqueeze(-1).expand(shape[:2])
        return features[present].flatten(0, 1), labels[present].flatten()


def _square_root(covariance: Tensor) -> Tensor:
    """Return the symmetric square root of each matrix, without the directions that have only rounding errors."""
    values, vectors = torch.linalg.eigh(covariance)
    values = torch.where(values > 1e-12 * values[:, -1:], values, 0.0)
    root: Tensor = (vectors * values.sqrt().unsqueeze(-2)) @ vectors.mT
    return root


def _outer(rows: Tensor) -> Tensor:
    """Return the product r·rᵀ of each row."""
    return rows.unsqueeze(-1) * rows.unsqueeze(-2)


register(
    "ccvr",
    parts=(VirtualFeatures,),
    paper="Luo et al., NeurIPS 2021",
    summary="After training, the server trains the head on features drawn from one Gaussian per class.",
)
