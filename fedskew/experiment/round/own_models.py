"""Models that clients keep to themselves: as the states that a run holds for its clients."""

from __future__ import annotations

import torch

from fedskew.engine import ModelState
from fedskew.methods.parts import Tensors, pack, unpack


def as_state(model: ModelState) -> Tensors:
    """A model, or a stack of models, as a client's state."""
    return pack("params", model.params) | pack("buffers", model.buffers)


def own_model(kept: Tensors, initial: ModelState, device: torch.device) -> ModelState:
    """The inverse, there; a client that kept nothing yet has the initial model."""
    own = ModelState(unpack("params", kept), unpack("buffers", kept)) if kept else initial
    return ModelState(
        {n: t.to(device) for n, t in own.params.items()}, {n: t.to(device) for n, t in own.buffers.items()}
    )
