"""FedLAW: the server learns the clients' weights, and a factor that shrinks their mean, on samples of its own.

Li et al., "Revisiting weighted aggregation in federated learning with neural networks", ICML 2023.

    server   w ← γ·Σ_k a_k·w_k;  a = softmax(λ) and γ = e^s minimise CE on the server's samples
             λ_k = log of the client's usual weight and s = 0 before Adam's steps, anew in each round

w is the global model, and w_k is the model that client k sends back. Weights that sum to less than 1 shrink the model,
which acts like weight decay. The server needs samples that no client trains on (`--server-data 0.02`). They come from
the training set, equally many of each class if there are enough.

Sent to the server: the model and the client's number of samples.
Extra compute: none on the clients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedskew.errors import expect
from fedskew.methods.catalogue import method
from fedskew.methods.parts import ServerRule, Tensors, Updates, weighted_mean
from fedskew.randomness import permutation

_HALVED_EVERY = 20
"""The number of epochs between two halvings of the learning rate, as in the authors' code."""


@method("fedlaw", paper="Li et al., ICML 2023")
@dataclass(frozen=True)
class FedLAW(ServerRule):
    """The clients' weights, and a shrinking factor, are learned on samples that the server holds (--server-data)."""

    weights_lr: float = 0.01
    """Adam's learning rate. The authors use 0.005 for other data than CIFAR-10."""
    server_epochs: int = 20
    """The epochs of Adam on the server's samples, in each round."""
    server_batch: int = 128
    """The batch size of Adam's steps."""

    needs_server_data = True

    def __post_init__(self) -> None:
        for name in ("weights_lr", "server_batch"):
            expect(getattr(self, name) > 0, name, getattr(self, name), "a number > 0")
        expect(self.server_epochs >= 0, "server_epochs", self.server_epochs, "a whole number ≥ 0")

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:  # noqa: ARG002
        data, device = updates.required_server_data, updates.weights.device
        usual = updates.weights.clamp(min=1e-12).log()
        learned = torch.cat([usual, torch.zeros_like(usual[:1])]).requires_grad_()
        optimiser = torch.optim.Adam([learned], lr=self.weights_lr, betas=(0.5, 0.999))  # β₁ as in the authors' code
        schedule = torch.optim.lr_scheduler.StepLR(optimiser, _HALVED_EVERY, gamma=0.5)
        for epoch in range(self.server_epochs):
            order = torch.from_numpy(permutation(len(data), updates.key, "learned weights", epoch)).to(device)
            for samples in torch.split(order, self.server_batch):
                with torch.enable_grad():
                    loss = data.loss(_shrunk_mean(updates.params, learned), samples)
                (learned.grad,) = torch.autograd.grad(loss, learned)
                optimiser.step()
            schedule.step()
        return _shrunk_mean(updates.params, learned.detach()), state


def _shrunk_mean(params: Tensors, learned: Tensor) -> Tensors:
    """Return e^s·Σ softmax(λ)_k·w_k. The last of the learned numbers is s."""
    return weighted_mean(params, learned[-1].exp() * learned[:-1].softmax(dim=0))
