"""From stacked client tensors to what the server works with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from fedskew.engine import ModelState
from fedskew.methods.parts import Tensors, weighted_mean


def of_rows(stacked: Tensors, rows: npt.NDArray[np.bool_]) -> Tensors:
    """Some clients' tensors; of all of them, without a copy."""
    if rows.all():
        return stacked
    return {name: t[torch.from_numpy(rows).to(t.device)] for name, t in stacked.items()}


def merged_buffers(sent: Tensors, stacked: Tensors, weights: torch.Tensor) -> Tensors:
    """The mean of BatchNorm's statistics; a constant that no client changed stays what it is, to the last bit.

    There are many small ones: those of one number type are merged as one.
    """
    merged: Tensors = {}
    for dtype in {b.dtype: None for b in sent.values()}:
        alike = {name: b for name, b in sent.items() if b.dtype == dtype}
        before = torch.cat([b.flatten() for b in alike.values()])
        after = torch.cat([stacked[name].reshape(len(weights), b.numel()) for name, b in alike.items()], dim=1)
        mean = weighted_mean({"": after}, weights)[""]
        whole = torch.where((after == before).all(dim=0), before, mean)
        for (name, b), part in zip(alike.items(), torch.split(whole, [b.numel() for b in alike.values()]), strict=True):
            merged[name] = part.view(b.shape).clone()
    return {name: merged[name] for name in sent}


def of_client(stacked: ModelState, row: int) -> ModelState:
    """One client's model."""
    return ModelState(
        {name: t[row] for name, t in stacked.params.items()}, {name: t[row] for name, t in stacked.buffers.items()}
    )
