"""Batches of a client, by hand and drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from loss_formulas import LOSSES, Rows
from torch import Tensor

from fedskew.losses import IGNORE


@dataclass(frozen=True)
class Batch:
    logits: Tensor
    teacher: Tensor
    targets: Tensor
    counts: Tensor

    def value(self, name: str) -> float:
        return float(LOSSES[name][0](self.logits, self.teacher, self.targets, self.counts))

    def expected(self, name: str) -> float:
        z, t = self.logits.tolist(), self.teacher.tolist()
        return LOSSES[name][1](z, t, self.targets.tolist(), self.counts.tolist())

    def gradient(self, name: str) -> Tensor:
        leaf = self.logits.detach().clone().requires_grad_()
        loss = LOSSES[name][0](leaf, self.teacher, self.targets, self.counts)
        (gradient,) = torch.autograd.grad(loss, leaf, materialize_grads=True)
        return gradient

    def to(self, dtype: torch.dtype) -> Batch:
        return Batch(self.logits.to(dtype), self.teacher.to(dtype), self.targets, self.counts)

    def padded(self) -> Batch:
        rows = torch.full((2, self.logits.shape[1]), 3.0, dtype=self.logits.dtype)
        rows[1, 0] = -5.0
        ignored = torch.tensor([IGNORE, IGNORE])
        return Batch(
            torch.cat([self.logits, rows]),
            torch.cat([self.teacher, -rows]),
            torch.cat([self.targets, ignored]),
            self.counts,
        )


def batch(
    logits: Rows, targets: Sequence[int], counts: Sequence[int], teacher: Rows | None = None, dtype: str = "float64"
) -> Batch:
    z = torch.tensor(logits, dtype=getattr(torch, dtype))
    t = torch.zeros_like(z) if teacher is None else torch.tensor(teacher, dtype=z.dtype)
    return Batch(z, t, torch.tensor(targets), torch.tensor(counts))


@st.composite
def batches(draw: st.DrawFn, size: float = 6.0, classes: int | None = None, rows: int | None = None) -> Batch:
    """A client's counts, none of them or all but one zero, and a batch of labels that it has."""
    c = draw(st.integers(2, 6)) if classes is None else classes
    b = draw(st.integers(1, 4)) if rows is None else rows
    counts = draw(st.lists(st.sampled_from([0, 0, 1, 2, 7, 500]), min_size=c, max_size=c).filter(any))
    targets = draw(st.lists(st.sampled_from(np.flatnonzero(counts).tolist()), min_size=b, max_size=b))
    numbers = arrays(np.float64, (b, c), elements=st.floats(-size, size))
    return Batch(
        torch.from_numpy(draw(numbers)), torch.from_numpy(draw(numbers)), torch.tensor(targets), torch.tensor(counts)
    )


GENERIC = batch(
    [[0.3, -1.2, 0.8, 2.0, -0.4], [1.1, 0.2, -0.7, 0.5, 0.9], [-0.6, 1.7, 0.1, -1.5, 0.6], [0.4, 0.25, -2.2, 1.3, 1.2]],
    [0, 2, 0, 1],
    [6, 2, 1, 0, 0],
    [[-0.2, 0.7, 1.4, -0.9, 0.3], [0.6, -1.1, 0.5, 0.2, 1.8], [1.0, 0.4, -0.3, 0.9, -1.6], [-0.8, 1.2, 0.1, 0.6, -0.5]],
)
