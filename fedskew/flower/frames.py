"""Facts and bytes over a stream socket: two lengths, then JSON, then the bytes. Nothing is pickled."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct(">Q")


def send_frame(to: socket.socket, facts: dict[str, Any], payload: bytes = b"") -> None:
    body = json.dumps(facts).encode()
    to.sendall(_LENGTH.pack(len(body)) + _LENGTH.pack(len(payload)) + body)
    to.sendall(payload)


def receive_frame(from_: socket.socket) -> tuple[dict[str, Any], bytes]:
    """EOFError if the other side is gone before the frame is whole."""
    body, payload = (int(_LENGTH.unpack(_exactly(from_, _LENGTH.size))[0]) for _ in range(2))
    return json.loads(_exactly(from_, body)), bytes(_exactly(from_, payload))


def _exactly(from_: socket.socket, count: int) -> bytearray:
    content = bytearray(count)
    view = memoryview(content)
    while view:
        received = from_.recv_into(view)
        if not received:
            raise EOFError("the connection ended in the middle of a frame")
        view = view[received:]
    return content
