"""Adapt models of other libraries to fedskew's form: one tensor of samples in, logits out.

Other libraries' models may take several inputs by name, such as token ids and an attention mask. They may return a
tuple, a dictionary or an object such as transformers' `ModelOutput`. fedskew stores the inputs of a sample side by side
in one row, so that engines, checkpoints and sites handle a single tensor. The adapter splits the row into the named
inputs.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedskew.errors import UserError
from fedskew.models.base import DataShape, Field
from fedskew.user_code import describe

Output = int | str
"""The position or the name of one of a model's outputs."""


class ModelAdapter(nn.Module):
    """Calls `model` with the inputs that it expects, and returns the logits among its outputs.

    `output` is the position or the name of the logits. By default, the logits are the output called `logits`, or the
    only output with one column per class. `fields` are the inputs of a sample, if there are several. fedskew sets them.
    """

    def __init__(self, model: nn.Module, output: Output | None = None, fields: Sequence[Field] = ()) -> None:
        super().__init__()
        self.model = model
        self.output = output
        self.fields = tuple(fields)
        self._by_name = _takes_names(model, [field.name for field in fields])

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = select_output(self._call(x), self.output)
        return logits

    def _call(self, x: Tensor) -> Any:
        if not self.fields:
            return self.model(x)
        named = self.split(x)
        return self.model(**named) if self._by_name else self.model(named)

    def split(self, x: Tensor) -> dict[str, Tensor]:
        """Split rows of samples into the model's inputs, by name."""
        parts = torch.split(x, [field.size for field in self.fields], dim=-1)
        return {
            field.name: (part.long() if field.is_integer else part).reshape(*x.shape[:-1], *field.shape)
            for field, part in zip(self.fields, parts, strict=True)
        }


def own_module(model: nn.Module) -> nn.Module:
    """Return the user's module without its adapter."""
    return model.model if isinstance(model, ModelAdapter) else model


def select_output(returned: Any, output: Output | None) -> Any:
    """Return the logits among the values that a model returned. A single tensor is returned unchanged.

    `torch.fx` traces this function with proxies, so it must not check whether a value is a tensor.
    """
    if not isinstance(returned, Mapping | tuple | list):
        return returned
    name = "logits" if output is None else output
    if isinstance(name, str) and hasattr(returned, "_fields"):
        return getattr(returned, name)  # a named tuple, as torchvision returns
    if isinstance(name, int) and isinstance(returned, Mapping):
        return list(returned.values())[name]
    return returned[name]  # type: ignore[index]


def adapt(model: nn.Module, name: str, data: DataShape) -> nn.Module:
    """Return the model if it takes one tensor and returns logits. Otherwise, return an adapter around it.

    Raise `UserError` if the model does not accept these inputs, or if it is unclear which output is the logits.
    """
    own = own_module(model)
    adapter = ModelAdapter(own, model.output if isinstance(model, ModelAdapter) else None, data.fields)
    outputs = _trial_outputs(adapter, name, data)
    expected = (2, data.classes)
    for returned in outputs:
        if adapter.output is None and isinstance(returned, Mapping | tuple | list):
            adapter.output = _find_logits(returned, expected, name)
    for returned in outputs:
        _check_logits(returned, adapter.output, expected, name)
    needs_adapter = data.fields or any(isinstance(returned, Mapping | tuple | list) for returned in outputs)
    return adapter if needs_adapter else own


def _trial_outputs(adapter: ModelAdapter, name: str, data: DataShape) -> list[Any]:
    """Return the model's outputs for two samples in eval mode, and also in train mode if it accepts them there.

    torchvision's Inception and GoogLeNet return one tensor in eval mode and several in train mode.
    """
    integers = bool(data.vocabulary) and all(field.is_integer for field in data.fields)
    dtype = torch.int64 if integers else torch.get_default_dtype()
    # One of several inputs may be an attention mask, in which zeros would hide every token.
    samples = torch.full((2, *data.shape), 1 if data.fields else 0, dtype=dtype)
    try:
        trial = copy.deepcopy(adapter).to("cpu", torch.get_default_dtype())
    except Exception as error:
        raise UserError(f"model {name!r} cannot be copied: {describe(error)}") from error
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            outputs = [trial.eval()._call(samples)]
        except Exception as error:
            form = " and ".join(f.name for f in data.fields) or f"of shape {data.shape}"
            raise UserError(f"model {name!r} does not accept inputs {form}: {describe(error)}") from error
        try:
            return [*outputs, trial.train()._call(samples)]
        except Exception:  # for example BatchNorm on a single value; the run reports that with its real batch size
            return outputs


def _find_logits(returned: Any, expected: tuple[int, int], name: str) -> Output:
    """Return the position or name of the logits: `logits`, or the only output with a column per class."""
    named = _named(returned)
    if "logits" in named:
        return "logits"
    fitting = [key for key, value in named.items() if getattr(value, "shape", None) == expected]
    if len(fitting) != 1:
        choice = f"; choose the logits with fedskew.ModelAdapter(model, output={fitting[0]!r})" if fitting else ""
        raise UserError(
            f"model {name!r} returns {_listed(named)} for a batch of 2; expected one output of shape {expected}{choice}"
        )
    return fitting[0]


def _check_logits(returned: Any, output: Output | None, expected: tuple[int, int], name: str) -> None:
    try:
        logits = select_output(returned, output)
    except (KeyError, IndexError, AttributeError, TypeError) as error:
        raise UserError(
            f"model {name!r} has no output {output!r}; expected one of {', '.join(map(repr, _named(returned)))}"
        ) from error
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if shape != expected:
        raise UserError(f"model {name!r} returns {shape} for a batch of 2; expected {expected}, samples × classes")


def _named(returned: Any) -> dict[Output, Any]:
    """Return the outputs by name, or by position if they have no names."""
    if isinstance(returned, Mapping):
        return dict(returned)
    fields = getattr(returned, "_fields", None)
    return dict(zip(fields or range(len(returned)), returned, strict=True))


def _listed(named: Mapping[Output, Any]) -> str:
    shapes = (f"{key}: {tuple(v.shape) if isinstance(v, Tensor) else type(v).__name__}" for key, v in named.items())
    return ", ".join(shapes) or "nothing"


def _takes_names(model: nn.Module, names: Sequence[str]) -> bool:
    """Return whether the model's `forward` accepts these names as keywords. If not, the model gets one dictionary."""
    parameters = inspect.signature(model.forward).parameters
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return accepts_any or all(name in parameters for name in names)
