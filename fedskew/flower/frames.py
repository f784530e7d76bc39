"""Frames over a stream socket. A frame is two lengths, a JSON object (the facts) and bytes. Nothing is pickled."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct(">Q")
"""An unsigned 64-bit integer, big-endian."""
_PIECE = 2**20
"""Maximum number of bytes per read. Memory is allocated as bytes arrive, because the stated length may be wrong."""
_LARGEST_FACTS = 2**30
"""Maximum number of bytes of JSON in a frame."""


def send_frame(to: socket.socket, facts: dict[str, Any], payload: bytes = b"") -> None:
    body = json.dumps(facts).encode()
    to.sendall(_LENGTH.pack(len(body)) + _LENGTH.pack(len(payload)) + body)
    if payload:  # even an empty send would fail if the receiver has read the whole frame and closed the connection
        to.sendall(payload)


def receive_frame(from_: socket.socket) -> tuple[dict[str, Any], bytes]:
    """Read one frame. Raise EOFError if the connection ends early, and ValueError if the content is not a frame."""
    body_length, payload_length = (int(_LENGTH.unpack(_receive(from_, _LENGTH.size))[0]) for _ in range(2))
    if body_length > _LARGEST_FACTS:
        raise ValueError(f"facts of {body_length} bytes; expected at most {_LARGEST_FACTS}")
    facts = json.loads(_receive(from_, body_length))
    if not isinstance(facts, dict):
        raise ValueError("facts that are not a JSON object")
    return facts, bytes(_receive(from_, payload_length))


def _receive(from_: socket.socket, count: int) -> bytearray:
    content = bytearray()
    while len(content) < count:
        received = from_.recv(min(_PIECE, count - len(content)))
        if not received:
            raise EOFError("the connection ended in the middle of a frame")
        content += received
    return content
