"""Some clients' tensors, or one client's model, of a stack of all clients of a round."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from fedskew.engine import ModelState
from fedskew.methods.parts import Tensors


def of_rows(stacked: Tensors, rows: npt.NDArray[np.bool_]) -> Tensors:
    """Some clients' tensors; of all of them, without a copy."""
    if rows.all():
        return stacked
    return {name: t[torch.from_numpy(rows).to(t.device)] for name, t in stacked.items()}


def of_client(stacked: ModelState, row: int) -> ModelState:
    """One client's model, in the memory of the stack."""
    return ModelState(
        {name: t[row] for name, t in stacked.params.items()}, {name: t[row] for name, t in stacked.buffers.items()}
    )
