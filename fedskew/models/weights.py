"""Initialise a model with weights from a file. Dense, finite tensors that match by name and shape are copied.

All other tensors keep their initial values. The file is in safetensors format, or is a state dict that `torch.save`
wrote (`.pt`, `.pth`, `.bin`). A state dict is read with `weights_only`, so that no code in it can run.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors
from torch import Tensor, nn

from fedskew.errors import UserError, nearest
from fedskew.models.adapter import own_module

_TORCH_SUFFIXES = (".pt", ".pth", ".bin")
_PREFIXES = ("", "module.", "model.")
"""Prefixes of the names in a file: none, torch's DataParallel (module.), Lightning and fedskew's adapter (model.)."""
_WRAPPERS = ("state_dict", "model_state_dict", "model")
"""Keys under which checkpoints of training programs hold the state dict."""
_LONGEST_LIST = 12
"""The maximum number of names in a message."""
_NOT_FINITE = "NaN or infinite values in the file"
_NOT_PLAIN = "sparse, quantised or without values in the file"


@dataclass(frozen=True)
class InitReport:
    """Which tensors a model took from a file of weights, and which it did not."""

    file: str
    sha256: str
    """The digest of the file."""
    taken: tuple[str, ...]
    """The names of the tensors that the file set."""
    left: Mapping[str, str]
    """The tensors that kept their initial values, each with the reason."""
    unused: tuple[str, ...]
    """Tensors of the file that the model does not have. If a prefix was stripped, names without it are not listed."""

    def to_json(self) -> dict[str, Any]:
        """Return the content as JSON values, for about.json."""
        lists = {"taken": list(self.taken), "left": dict(self.left), "unused": list(self.unused)}
        return {"file": self.file, "sha256": self.sha256, **lists}

    def lines(self) -> list[str]:
        """Describe for the user which tensors were taken, and why the others were not."""
        total = len(self.taken) + len(self.left)
        lines = [
            f"init {self.file}: {len(self.taken)} of {total} tensors taken",
            f"  taken: {_shortened(self.taken, ', ')}",
            *(f"  not taken: {name}, {reason}" for name, reason in list(self.left.items())[:_LONGEST_LIST]),
        ]
        if len(self.left) > _LONGEST_LIST:
            lines.append(f"  not taken: {len(self.left) - _LONGEST_LIST} more, which about.json lists")
        if self.unused:
            lines.append(f"  in the file only: {_shortened(self.unused, ', ')}")
        return lines


def _shortened(names: tuple[str, ...], separator: str) -> str:
    more = len(names) - _LONGEST_LIST
    return separator.join(names[:_LONGEST_LIST]) + (f" and {more} more" if more > 0 else "")


def start_from(file: str, model: nn.Module, sha256: str | None = None) -> tuple[nn.Module, InitReport]:
    """Return a copy of the model with the tensors of the file that fit, and a report of what was taken.

    Raise `UserError` if nothing fits, or if the file does not have the digest `sha256`.
    """
    content = _read(file)
    digest = hashlib.sha256(content).hexdigest()
    if sha256 is not None and digest != sha256:
        raise UserError(
            f"init {file} has SHA-256 {digest[:12]}…; expected {sha256[:12]}…, the digest in the configuration"
        )
    started = copy.deepcopy(model)
    targets = own_module(started).state_dict()
    tensors = _tensors(file, content)
    if not tensors:
        raise UserError(f"init {file} has no named tensors; expected a state dict, as model.state_dict() returns")
    tensors = _matching_names(tensors, targets)
    reasons = {name: _why_not_taken(name, target, tensors) for name, target in targets.items()}
    taken = tuple(name for name, reason in reasons.items() if reason is None)
    if not taken:
        if _NOT_FINITE in reasons.values():
            raise UserError(
                f"every tensor of init {file} that fits {type(own_module(model)).__name__} has NaN or infinite values; "
                "expected finite values"
            )
        if _NOT_PLAIN in reasons.values():
            raise UserError(
                f"every tensor of init {file} that fits {type(own_module(model)).__name__} is sparse, quantised or "
                "without values; expected dense tensors of plain numbers"
            )
        raise _nothing_fits(file, own_module(model), tensors, targets)
    with torch.no_grad():
        for name in taken:
            targets[name].copy_(tensors[name])
    left = {name: reason for name, reason in reasons.items() if reason is not None}
    return started, InitReport(file, digest, taken, left, tuple(sorted(tensors.keys() - targets.keys())))


def _read(file: str) -> bytes:
    path = Path(os.path.expanduser(file))  # unlike `Path.expanduser`, it accepts an unknown user
    if path.is_dir():
        found = sorted(p.name for p in path.glob("*.safetensors"))
        hint = f"; did you mean {str(path / found[-1])!r}?" if found else ""
        raise UserError(f"init is {file!r}, a folder; expected a file such as weights.safetensors{hint}")
    if path.suffix not in (".safetensors", *_TORCH_SUFFIXES):
        raise UserError(f"init is {file!r}; expected a file that ends in .safetensors, .pt, .pth or .bin")
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read init {file}: {error.strerror or error}") from error


def _tensors(file: str, content: bytes) -> dict[str, Tensor]:
    """Parse the file's content and return its named tensors. Raise `UserError` if it is damaged."""
    if Path(file).suffix == ".safetensors":
        try:
            return parse_safetensors(content)
        except SafetensorError as error:
            raise UserError(
                f"cannot read init {file}: it is not a safetensors file, or is damaged ({error})"
            ) from error
    import io

    try:
        loaded = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds of errors for damaged files and for other contents
        raise UserError(
            f"cannot read init {file}: it is damaged, or holds objects other than tensors, which are not loaded; "
            "expected a state dict, as torch.save(model.state_dict(), path) writes"
        ) from error
    for key in _WRAPPERS:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    named = loaded.items() if isinstance(loaded, Mapping) else ()
    return {name: t for name, t in named if isinstance(name, str) and isinstance(t, Tensor)}


def _matching_names(tensors: dict[str, Tensor], targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Strip the prefix of `_PREFIXES` with which most names match the model. Leave out tensors without this prefix."""
    renamed = [
        {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)} for prefix in _PREFIXES
    ]
    return max(renamed, key=lambda named: len(named.keys() & targets.keys()))


def _why_not_taken(name: str, target: Tensor, tensors: Mapping[str, Tensor]) -> str | None:
    """Return why a tensor of the model does not take its value from the file, or None if it does."""
    if name not in tensors:
        return "missing in the file"
    tensor = tensors[name]
    if tensor.shape != target.shape:
        return f"shape {tuple(tensor.shape)} in the file, {tuple(target.shape)} in the model"
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        return _NOT_PLAIN
    # PyTorch cannot test floats of 8 bits.
    if not bool(torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor).all()):
        return _NOT_FINITE
    return None


def _nothing_fits(
    file: str, model: nn.Module, tensors: Mapping[str, Tensor], targets: Mapping[str, Tensor]
) -> UserError:
    name = next(iter(targets))
    similar = nearest(name, tensors) or next(iter(tensors))
    return UserError(
        f"no tensor of init {file} fits {type(model).__name__} by name and shape; the model has, for example, "
        f"{name!r} {tuple(targets[name].shape)}, and the file {similar!r} {tuple(tensors[similar].shape)}"
    )
