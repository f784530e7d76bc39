"""Train a linear head on the server, on labelled features that the server has made."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedskew.accurate_sums import ACCURATE
from fedskew.randomness import permutation


@dataclass(frozen=True)
class HeadTraining:
    """SGD on the cross entropy of a linear head, in float64 if the device has it."""

    lr: float
    epochs: int
    batch_size: int
    momentum: float = 0.0

    def train(
        self, weight: Tensor, bias: Tensor | None, x: Tensor, y: Tensor, key: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return the head's weight [C, d] and bias [C], trained on features x [n, d] with labels y [n].

        A head without a bias stays without one. `key` decides the order of the samples.
        """
        accurate = ACCURATE[weight.device.type]
        head, x = weight.to(accurate, copy=True), x.to(accurate)
        if bias is not None:
            head = torch.cat([head, bias.to(accurate).unsqueeze(-1)], dim=1)
            x = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
        velocity, targets = torch.zeros_like(head), torch.nn.functional.one_hot(y, len(weight)).to(accurate)
        for epoch in range(self.epochs):
            order = torch.from_numpy(permutation(len(x), key, "head training", epoch)).to(x.device)
            shuffled = (torch.split(t[order], self.batch_size) for t in (x, targets))
            for rows, goals in zip(*shuffled, strict=True):
                error = (rows @ head.T).softmax(dim=-1).sub_(goals)
                velocity.mul_(self.momentum).addmm_(error.T, rows, alpha=1 / len(rows))
                head.sub_(velocity, alpha=self.lr)
        return (head, None) if bias is None else (head[:, :-1], head[:, -1])
