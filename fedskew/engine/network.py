"""A model as a pure function of named tensors, in the two forms that the engines need.

Two kinds of layer carry hidden state that would tie a result to the engine: dropout draws from a global stream, and
BatchNorm sees the rows that pad a short batch. `Network` replaces the first by a keyed dropout in every engine, and
the second by a BatchNorm that counts valid rows only where clients are stacked.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedskew.methods.parts import Mode, Outputs, Tensors
from fedskew.models.base import Classifier
from fedskew.randomness import fold, uniform


@dataclass(frozen=True)
class ModelState:
    """The tensors of one model: what is trained, and BatchNorm's statistics."""

    params: Tensors
    buffers: Tensors


@dataclass
class _Step:
    """What the replaced layers must know of the step being computed."""

    key: Tensor | None = None
    dropouts: int = 0
    """How many masks were drawn: a layer may be called more than once."""
    valid: Tensor | None = None
    buffers: Tensors = field(default_factory=dict)


class Network:
    """A model whose parameters, buffers and randomness are arguments."""

    def __init__(
        self, model: nn.Module, dtype: torch.dtype = torch.float32, autocast: torch.dtype | None = None
    ) -> None:
        self._model = copy.deepcopy(model).to(dtype)
        self._dtype = dtype
        self._autocast = autocast
        self._step = _Step()
        self._plain = _WithFeatures(self._with_keyed_dropout(copy.deepcopy(self._model)))
        self._stackable = _WithFeatures(self._with_keyed_dropout(copy.deepcopy(self._model)))
        for name, layer in self._stackable.model.named_modules():
            if isinstance(layer, _BatchNorm) and type(layer).forward is _BatchNorm.forward:
                layer.forward = _ValidBatchNorm(layer, self._step, name).forward  # type: ignore[assignment, method-assign]

    def to(self, device: torch.device) -> Network:
        for module in (self._model, self._plain, self._stackable):
            module.to(device)
        return self

    @property
    def resolution(self) -> float:
        """The relative rounding error of one operation."""
        return torch.finfo(self._autocast or self._dtype).eps

    def state(self) -> ModelState:
        """A copy of the model's own tensors, by name; parameters that the user froze are no part of it."""
        trained = {n: p.detach().clone() for n, p in sorted(self._model.named_parameters()) if p.requires_grad}
        return ModelState(trained, {n: b.detach().clone() for n, b in sorted(self._model.named_buffers())})

    def module(self, state: ModelState) -> nn.Module:
        """An ordinary module with the given tensors."""
        module = copy.deepcopy(self._model).eval()
        module.load_state_dict({**state.params, **state.buffers}, strict=False)
        return module

    def forward(
        self, params: Tensors, buffers: Tensors, x: Tensor, mode: Mode = "eval", key: Tensor | None = None
    ) -> Outputs:
        """Logits and features of a batch; in train mode BatchNorm writes its statistics into `buffers`."""
        return self._call(self._plain, params, buffers, x, mode, key, None)

    def forward_padded(
        self, params: Tensors, buffers: Tensors, x: Tensor, valid: Tensor, mode: Mode, key: Tensor | None = None
    ) -> tuple[Outputs, Tensors]:
        """The same for a batch some of whose rows pad, without writing anywhere: also returns the new statistics."""
        outputs = self._call(self._stackable, params, buffers, x, mode, key, valid)
        return outputs, {**buffers, **self._step.buffers}

    def _call(
        self,
        module: nn.Module,
        params: Tensors,
        buffers: Tensors,
        x: Tensor,
        mode: Mode,
        key: Tensor | None,
        valid: Tensor | None,
    ) -> Outputs:
        module.train(mode == "train")
        self._step.key, self._step.dropouts = key, 0
        self._step.valid, self._step.buffers = valid, {}
        tensors = {f"model.{name}": t for name, t in (*params.items(), *buffers.items())}
        with self._precision(x.device):
            logits, features = torch.func.functional_call(module, tensors, (x,))
        if self._autocast is not None:
            logits, features = logits.float(), None if features is None else features.float()
        return Outputs(logits, features)

    def _precision(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self._autocast)

    def smallest_batch(self, sample: Tensor) -> int:
        """2 if a batch of one cannot be trained on: BatchNorm over a single value."""
        state = self.state()
        devices = [sample.device] if sample.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices):
                self.forward(state.params, state.buffers, sample[:1], "train", torch.zeros((), dtype=torch.int64))
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            return 2
        return 1

    def _with_keyed_dropout(self, model: nn.Module) -> nn.Module:
        for name, layer in list(model.named_modules(remove_duplicate=False)):
            if name and isinstance(layer, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, _KeyedDropout(layer, self._step))
        return model


class _WithFeatures(nn.Module):
    """Makes `forward` return logits and features; only a `Classifier` is known to have the latter."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if isinstance(self.model, Classifier) and type(self.model).forward is Classifier.forward:
            features = self.model.encoder(x)
            return self.model.head(features), features
        return self.model(x), None


class _KeyedDropout(nn.Module):
    """Dropout whose mask is a function of the step's key, of the masks before it and of the position in the batch."""

    def __init__(self, layer: nn.Module, step: _Step) -> None:
        super().__init__()
        self.p = float(layer.p)  # type: ignore[arg-type]
        self._whole_channels = not isinstance(layer, nn.Dropout)
        self._step = step

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if self._step.key is None:
            raise RuntimeError("a network with dropout was run in train mode without a key")
        if self.p == 1:
            return torch.zeros_like(x)
        self._step.dropouts += 1
        shape = x.shape[:2] + (1,) * (x.dim() - 2) if self._whole_channels else x.shape
        positions = torch.arange(shape.numel(), device=x.device)
        kept = uniform(fold(self._step.key, self._step.dropouts), positions).reshape(shape) >= self.p
        return x * kept.to(x.dtype) / (1 - self.p)


class _ValidBatchNorm:
    """The forward pass of a BatchNorm layer over the valid rows of a padded batch, without side effects.

    It takes the place of the layer's own method, so that a model which finds its BatchNorm layers by their class, for
    instance to freeze them, still does.
    """

    def __init__(self, layer: _BatchNorm, step: _Step, name: str) -> None:
        self._layer, self._step, self._name = layer, step, name

    def forward(self, x: Tensor) -> Tensor:
        layer = self._layer
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # as PyTorch's own does under autocast
        if not layer.training and layer.running_mean is not None and layer.running_var is not None:
            mean, var = layer.running_mean, layer.running_var
        else:
            mean, var, count = self._batch_statistics(wide)
            if layer.training:
                self._remember(mean, var * count / (count - 1))
        shape = (1, -1) + (1,) * (x.dim() - 2)
        out = (wide - mean.view(shape)) * (var.view(shape) + layer.eps).rsqrt()
        if layer.affine:
            out = out * layer.weight.view(shape) + layer.bias.view(shape)
        return out.to(x.dtype)

    def _batch_statistics(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        axes = (0, *range(2, x.dim()))
        assert self._step.valid is not None
        rows = self._step.valid.to(x.dtype).view((-1,) + (1,) * (x.dim() - 1))
        count = rows.sum() * x[0, 0].numel()
        mean = (x * rows).sum(axes) / count
        shape = (1, -1) + (1,) * (x.dim() - 2)
        var = ((x - mean.view(shape)).square() * rows).sum(axes) / count
        return mean, var, count

    def _remember(self, mean: Tensor, var: Tensor) -> None:
        layer = self._layer
        if not layer.track_running_stats:
            return
        seen = self._current("num_batches_tracked")
        factor = 1 / (seen + 1).to(mean.dtype) if layer.momentum is None else layer.momentum
        for statistic, value in (("running_mean", mean), ("running_var", var)):
            before = self._current(statistic)
            self._step.buffers[f"{self._name}.{statistic}"] = before + factor * (value.detach() - before)
        self._step.buffers[f"{self._name}.num_batches_tracked"] = seen + 1

    def _current(self, statistic: str) -> Tensor:
        """As this pass has it, should the layer be called more than once."""
        current: Tensor = self._step.buffers.get(f"{self._name}.{statistic}", getattr(self._layer, statistic))
        return current
