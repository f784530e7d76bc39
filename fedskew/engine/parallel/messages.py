"""Messages between processes of one machine. A message has JSON values, called facts, and tensors.

On Linux, the facts are sent over a socket, together with the descriptor of anonymous shared memory. The sender copies
the tensors into this memory once, and each receiver maps it. Elsewhere, `PortableParcel` sends the tensors as bytes.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from fedskew.methods.parts import Tensors

Facts = dict[str, Any]

_ALIGNMENT = 64
"""Tensors start at multiples of this many bytes."""
_LENGTH = 8
"""The number of bytes at the start of a message, which hold the length of its JSON."""


class Parcel:
    """Tensors in shared memory, written once for any number of receivers."""

    def __init__(self, tensors: Mapping[str, Tensor | Sequence[Tensor]]) -> None:
        """A list of tensors of one shape becomes one tensor with a leading axis."""
        self._memory = os.memfd_create("fedskew", os.MFD_CLOEXEC)
        self._table, end = _lay_out(tensors, self._write)
        os.ftruncate(self._memory, max(end, 1))

    def _write(self, content: memoryview, position: int) -> None:
        while content:
            written = os.pwrite(self._memory, content, position)
            position, content = position + written, content[written:]

    def send(self, to: socket.socket, facts: Facts) -> None:
        body = json.dumps({"facts": facts, "tensors": self._table}).encode()
        socket.send_fds(to, [len(body).to_bytes(_LENGTH, "big")], [self._memory])
        to.sendall(body)

    def close(self) -> None:
        """Release the memory in this process. Receivers can still read it."""
        os.close(self._memory)


def send(to: socket.socket, facts: Facts, tensors: Mapping[str, Tensor | Sequence[Tensor]]) -> None:
    """Send one message to one receiver."""
    parcel = Parcel(tensors)
    try:
        parcel.send(to, facts)
    finally:
        parcel.close()


def receive(from_: socket.socket) -> tuple[Facts, Tensors] | None:
    """Wait for the next message and return it, or None if the sender is gone."""
    try:
        head, descriptors, _, _ = socket.recv_fds(from_, _LENGTH, 1)
        if not descriptors:
            return None
        try:
            body = _receive_exactly(from_, int.from_bytes(head + _receive_exactly(from_, _LENGTH - len(head)), "big"))
            memory = mmap.mmap(descriptors[0], 0, flags=mmap.MAP_PRIVATE)
        finally:
            os.close(descriptors[0])
    except (ConnectionError, EOFError):
        return None
    message = json.loads(body)
    return message["facts"], dict(_mapped(memory, message["tensors"]))


class PortableParcel:
    """Tensors as bytes, for receivers with which no memory is shared."""

    def __init__(self, tensors: Mapping[str, Tensor | Sequence[Tensor]]) -> None:
        self._content = bytearray()
        self._table, _ = _lay_out(tensors, self._write)

    def _write(self, content: memoryview, position: int) -> None:
        self._content += bytes(position - len(self._content))
        self._content += content

    def send(self, to: Connection, facts: Facts) -> None:
        to.send_bytes(json.dumps({"facts": facts, "tensors": self._table}).encode())
        to.send_bytes(self._content)

    def close(self) -> None:
        """Do nothing. The bytes are freed with this object."""


def receive_bytes(from_: Connection) -> tuple[Facts, Tensors] | None:
    """Wait for the next message of a `PortableParcel` and return it, or None if the sender is gone."""
    try:
        message, content = json.loads(from_.recv_bytes()), bytearray(from_.recv_bytes())
    except (OSError, EOFError):
        return None
    return message["facts"], dict(_mapped(content, message["tensors"]))


def _lay_out(
    tensors: Mapping[str, Tensor | Sequence[Tensor]], write: Callable[[memoryview, int], None]
) -> tuple[Facts, int]:
    """Write tensors one after another. Return a table with the dtype, shape and position of each, and the total size.

    The tensors are written as bytes, because numpy lacks some of torch's dtypes.
    """
    table: Facts = {}
    end = 0
    for name, tensor in tensors.items():
        rows = [tensor] if isinstance(tensor, Tensor) else tensor
        shape = tensor.shape if isinstance(tensor, Tensor) else (len(tensor), *tensor[0].shape)
        table[name] = (str(rows[0].dtype).removeprefix("torch."), list(shape), end)
        for row in rows:
            content = memoryview(row.detach().contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            write(content, end)
            end += len(content)
        end += -end % _ALIGNMENT
    return table, end


def _mapped(memory: mmap.mmap | bytearray, table: Facts) -> Iterator[tuple[str, Tensor]]:
    for name, (dtype, shape, start) in table.items():
        kind: torch.dtype = getattr(torch, dtype)
        count = int(torch.Size(shape).numel())
        empty = torch.empty(0, dtype=kind)
        yield name, (torch.frombuffer(memory, dtype=kind, count=count, offset=start) if count else empty).view(shape)


def _receive_exactly(from_: socket.socket, count: int) -> bytes:
    content = bytearray()
    while len(content) < count:
        piece = from_.recv(min(count - len(content), 1 << 20))
        if not piece:
            raise EOFError
        content += piece
    return bytes(content)
