"""Convert named tensors to safetensors bytes and back, and check received tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedskew.flower.wire import Garbled
from fedskew.methods.parts import Tensors

_TYPES = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
)
"""The accepted number types. For some other types, torch cannot check whether numbers are finite."""


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """Convert tensors on any device to bytes. Equal tensors give equal bytes."""
    # A clone, because safetensors refuses tensors that share memory.
    plain = {name: tensors[name].detach().cpu().contiguous().clone() for name in sorted(tensors)}
    return bytes(save(plain))


def from_bytes(payload: bytes) -> Tensors:
    try:
        tensors = dict(sorted(load(payload).items()))
    except (SafetensorError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise Garbled(f"its tensors cannot be read ({error})") from error
    if strange := [name for name, tensor in tensors.items() if tensor.dtype not in _TYPES]:
        raise Garbled(f"tensor {strange[0]!r} is {_form(tensors[strange[0]])}, a type that is not supported")
    return tensors


def require_like(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Refuse names, shapes or number types other than those expected."""
    if missing := sorted(set(expected) - set(tensors)):
        raise Garbled(f"it lacks tensor {missing[0]!r}")
    if foreign := sorted(set(tensors) - set(expected)):
        raise Garbled(f"it has an unexpected tensor {foreign[0]!r}")
    for name, like in expected.items():
        tensor = tensors[name]
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise Garbled(f"tensor {name!r} is {_form(tensor)}, expected {_form(like)}")


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def forms(tensors: Mapping[str, Tensor]) -> tuple[tuple[str, str], ...]:
    """Return names, number types and shapes, to compare them."""
    return tuple((name, _form(tensors[name])) for name in sorted(tensors))
