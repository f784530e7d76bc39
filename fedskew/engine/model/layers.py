"""Layers that replace PyTorch's dropout and BatchNorm, for one client.

PyTorch's dropout draws from a global generator. Every engine uses a keyed dropout instead. PyTorch's BatchNorm would
include the padding of short batches in its statistics. Padded batches use a BatchNorm that leaves padding out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedskew.methods.parts import Tensors
from fedskew.randomness import fold, uniform

Between = Callable[[Tensor], Tensor]
"""A function that changes the features between the encoder and the head."""


@dataclass
class LayerContext:
    """What these layers need to know about the current forward pass."""

    key: Tensor | None = None
    """The key of the dropout masks."""
    dropouts: int = 0
    """Number of dropout masks drawn so far. A layer may be called more than once."""
    valid: Tensor | None = None
    """[B]: False for rows of padding. None if there is no padding."""
    buffers: Tensors = field(default_factory=dict)
    """New running statistics of BatchNorm."""
    between: Between | None = None
    """Changes the features, if the objective needs that."""


class KeyedDropout(nn.Module):
    """Dropout whose mask depends on the key, on the number of earlier masks and on the position in the batch."""

    def __init__(self, layer: nn.Module, context: LayerContext) -> None:
        super().__init__()
        self.p = float(layer.p)  # type: ignore[arg-type]
        self.whole_channels = not isinstance(layer, nn.Dropout)
        self._context = context

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if self._context.key is None:
            raise RuntimeError("a network with dropout was run in train mode without a key")
        if self.p == 1:
            return torch.zeros_like(x)
        self._context.dropouts += 1
        shape = self.mask_shape(x)
        positions = torch.arange(shape.numel(), device=x.device)
        kept = uniform(fold(self._context.key, self._context.dropouts), positions).reshape(shape) >= self.p
        return x * kept.to(x.dtype) / (1 - self.p)

    def mask_shape(self, x: Tensor) -> torch.Size:
        """Return the shape of the mask for an input."""
        return x.shape[:2] + (1,) * (x.dim() - 2) if self.whole_channels else x.shape


class ValidBatchNorm:
    """The forward pass of a BatchNorm layer, with statistics over the rows of the batch that are not padding.

    It replaces the layer's `forward`, not the layer. A model can still find its BatchNorm layers by class, for instance
    to freeze them. The new running statistics go to the context, not to the layer's buffers.
    """

    def __init__(self, layer: _BatchNorm, context: LayerContext, name: str) -> None:
        self._layer, self._context, self._name = layer, context, name

    def forward(self, x: Tensor) -> Tensor:
        layer = self._layer
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # like PyTorch's BatchNorm under autocast
        if not layer.training and layer.running_mean is not None and layer.running_var is not None:
            mean, var = layer.running_mean, layer.running_var
        else:
            mean, var, count = self._batch_statistics(wide)
            if layer.training:
                self._update_running_statistics(mean, var * count / (count - 1))
        shape = (1, -1) + (1,) * (x.dim() - 2)
        out = (wide - mean.view(shape)) * (var.view(shape) + layer.eps).rsqrt()
        if layer.weight is not None:
            out = out * layer.weight.view(shape)
        if layer.bias is not None:
            out = out + layer.bias.view(shape)
        return out.to(x.dtype)

    def _batch_statistics(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        axes = (0, *range(2, x.dim()))
        assert self._context.valid is not None
        rows = self._context.valid.to(x.dtype).view((-1,) + (1,) * (x.dim() - 1))
        count = rows.sum() * x[0, 0].numel()
        mean = (x * rows).sum(axes) / count
        shape = (1, -1) + (1,) * (x.dim() - 2)
        var = ((x - mean.view(shape)).square() * rows).sum(axes) / count
        return mean, var, count

    def _update_running_statistics(self, mean: Tensor, var: Tensor) -> None:
        layer = self._layer
        if not layer.track_running_stats:
            return
        seen = self._current("num_batches_tracked")
        factor = 1 / (seen + 1).to(mean.dtype) if layer.momentum is None else layer.momentum
        for statistic, value in (("running_mean", mean), ("running_var", var)):
            before = self._current(statistic)
            self._context.buffers[f"{self._name}.{statistic}"] = before + factor * (value.detach() - before)
        self._context.buffers[f"{self._name}.num_batches_tracked"] = seen + 1

    def _current(self, statistic: str) -> Tensor:
        """Return the current value of a statistic, which an earlier call in the same pass may have changed."""
        current: Tensor = self._context.buffers.get(f"{self._name}.{statistic}", getattr(self._layer, statistic))
        return current
