"""Named tensors in a safetensors file, with a digest of its content.

safetensors notices a truncated file, but not a changed byte within a tensor; the digest does. Files are read by
safetensors itself. They are written here, because its writer fills a memory map, and on a full disk that ends the
process with a signal instead of an error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedskew.experiment.storage.atomic import replace_files

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's names of the number types."""


class Unreadable(Exception):
    """The file is damaged or not written by fedskew. The message says which."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Write `tensors`, from any device, and the JSON value `meta`, atomically."""
    write_files({path: (tensors, meta)})


def write_files(contents: Mapping[Path, tuple[Mapping[str, Tensor], Mapping[str, Any]]]) -> None:
    """Write several files, each atomically."""
    replace_files({path: _writer(tensors, meta) for path, (tensors, meta) in contents.items()})


def _writer(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Callable[[Path], None]:
    text = json.dumps(meta, allow_nan=False)

    def write(draft: Path) -> None:
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        aligned = dict(sorted(plain.items(), key=lambda item: (-item[1].element_size(), item[0])))
        header = _header(aligned, {"fedskew": text, "sha256": _digest(plain, text)})
        with draft.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for tensor in aligned.values():
                file.write(_bytes(tensor))

    return write


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `write_tensors` wrote, to the CPU. Raises `Unreadable` if the file is damaged."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except PermissionError:
        raise
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise Unreadable(f"it is damaged ({error})") from error
    if "fedskew" not in metadata or "sha256" not in metadata:
        raise Unreadable("it was not written by fedskew")
    if metadata["sha256"] != _digest(tensors, metadata["fedskew"]):
        raise Unreadable("its content does not match its digest")
    meta: dict[str, Any] = json.loads(metadata["fedskew"])
    return tensors, meta


def _header(tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"tensor {name!r} is of {tensor.dtype}, which safetensors files do not hold")
        span = [offset, offset + tensor.nbytes]
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        offset = span[1]
    header = json.dumps(entries, separators=(",", ":")).encode()
    return header + b" " * (-len(header) % 8)


def _digest(tensors: Mapping[str, Tensor], meta: str) -> str:
    digest = hashlib.sha256(json.dumps([meta, len(tensors)]).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(b"") if tensor.numel() == 0 else tensor.reshape(-1).view(torch.uint8).numpy().data
