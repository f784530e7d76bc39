"""Write files that survive a killed process, a power cut and a full disk.

A file is written under a temporary name, forced to disk, and renamed. So the old file is replaced by the whole new one
or stays as it is. The temporary name is fixed, so that the next attempt overwrites an unfinished file. A lock keeps
other writers out of a folder.

Tensors are stored in safetensors files with a digest of their content, which detects damage. The safetensors library
reads the files, but this module writes them. The library's writer uses a memory map, which on a full disk ends the
process with a signal instead of raising an error.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open

from fedskew.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

_MAX_THREADS = 8
"""The maximum number of items that `in_parallel` works on at a time."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def temporary(path: Path) -> Path:
    """The temporary name under which `path` is written."""
    return path.with_name(f".{path.name}.tmp")


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Replace `path` atomically. `write` receives the temporary path."""
    replace_files({path: write})


def write_file(path: Path, content: bytes | str) -> None:
    """Write a file atomically. Text is encoded as UTF-8.

    If the text names a path with bytes that are not valid UTF-8, each of these bytes becomes `?`.
    """
    data = content.encode(errors="replace") if isinstance(content, str) else content

    def write(draft: Path) -> None:
        draft.write_bytes(data)

    replace_file(path, write)


def replace_files(writes: Mapping[Path, Callable[[Path], None]]) -> None:
    """Replace several files, each atomically. Each folder's list of names is forced to disk once."""

    def replace(path: Path) -> None:
        draft = temporary(path)
        with reporting_os_errors("write", path):
            try:
                writes[path](draft)
                sync(draft)
                _rename(draft, path)
            except BaseException:
                draft.unlink(missing_ok=True)  # frees space on a full disk
                raise

    in_parallel(replace, list(writes))
    for folder in {path.parent for path in writes}:
        with reporting_os_errors("write", folder):
            sync(folder)


_PAUSES = (0.01, 0.05, 0.2, 0.5, 1.0)
"""Seconds to wait after each failed attempt to rename a file on Windows."""


def _rename(draft: Path, path: Path) -> None:
    """Rename `draft` to `path`, over the old file. On Windows, retry while another process reads the old file."""
    for pause in _PAUSES if os.name == "nt" else ():
        try:
            os.replace(draft, path)
        except PermissionError:
            time.sleep(pause)
        else:
            return
    os.replace(draft, path)


def in_parallel(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """Apply a function to several items at a time, because most of the time is spent waiting for the disk."""
    if len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(_MAX_THREADS, len(items))) as pool:
        return list(pool.map(function, items))


def sync(path: Path) -> None:
    """Force a file's content, or a folder's list of names, to disk. Windows forces the names to disk by itself."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)  # Windows needs the right to write
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def reporting_os_errors(verb: str, path: Path) -> Iterator[None]:
    """Turn errors such as a full disk or a missing permission into one line with the path and the reason."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot {verb} {path}: {error.strerror or error}") from error


# -- one writer per folder ---------------------------------------------------------------------------------------------

_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}
"""Errors of file systems that do not support locks."""


class FolderLock:
    """Keeps other writers out of a folder until it is released or its process ends."""

    def __init__(self, path: Path) -> None:
        self.warning: str | None = None
        self._lock = FileLock(path, thread_local=False, fallback_to_soft=False)
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise UserError(
                f"{path.parent} is being written by another process{_holder(path)}; "
                "wait for it to end or choose another --out"
            ) from error
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise UserError(f"cannot lock {path}: {error.strerror or error}") from error
            self.warning = f"the file system of {path.parent} does not support locks; do not start the same run twice"
        else:
            with contextlib.suppress(OSError):  # the lock works without this text, which is for users
                path.write_text(f"{os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")

    def release(self) -> None:
        self._lock.release()


def wait_until_unlocked(path: Path, timeout: float) -> None:
    """Wait until no other process holds the lock, for at most `timeout` seconds."""
    with contextlib.suppress(Timeout, OSError), FileLock(path, fallback_to_soft=False).acquire(timeout=timeout):
        return


def _holder(path: Path) -> str:
    try:
        note = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        note = ""
    return f" ({note})" if note else ""


# -- named tensors -----------------------------------------------------------------------------------------------------

_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""torch's dtypes, with their names in safetensors files."""


class Unreadable(Exception):
    """Raised if a file cannot be used, for example because it is damaged. The message says why."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Write tensors, from any device, and the JSON value `meta` atomically."""
    write_tensor_files({path: (tensors, meta)})


def write_tensor_files(contents: Mapping[Path, tuple[Mapping[str, Tensor], Mapping[str, Any]]]) -> None:
    """Write several files, each atomically. Each has tensors and the JSON value `meta`."""
    replace_files({path: _writer(tensors, meta) for path, (tensors, meta) in contents.items()})


def _writer(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Callable[[Path], None]:
    text = json.dumps(meta, allow_nan=False)

    def write(draft: Path) -> None:
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        # Tensors with larger elements come first, so that each begins at a multiple of its element size.
        aligned = dict(sorted(plain.items(), key=lambda item: (-item[1].element_size(), item[0])))
        header = _header(aligned, {"fedskew": text, "sha256": _digest(plain, text)})
        with draft.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for tensor in aligned.values():
                file.write(_bytes(tensor))

    return write


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a file that `write_tensors` wrote, into CPU memory.

    Raise `Unreadable` if its content cannot be used. A `PermissionError` is passed on.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except PermissionError:
        raise
    except OSError as error:
        raise Unreadable(f"it cannot be read ({error})") from error
    except (SafetensorError, ValueError, RuntimeError) as error:
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
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise ValueError(f"tensor {name!r} has dtype {tensor.dtype}, which safetensors does not support")
        span = [offset, offset + tensor.nbytes]
        entries[name] = {"dtype": _DTYPES[dtype], "shape": list(tensor.shape), "data_offsets": span}
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
    import torch  # imported late, because text files can be written without it

    return memoryview(b"") if tensor.numel() == 0 else tensor.reshape(-1).view(torch.uint8).numpy().data
