"""The content of fedskew's Flower messages: facts as JSON in a config record, tensors as one array of bytes.

`site.py` decides what a site sends, and `remote_training.py` what the server sends for a round of training.

All tensors are in one array, because Flower sends every array in separate requests. A ClientApp passes the bytes on
without reading the tensors. Nothing here imports torch, so that a ClientApp starts quickly.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, TypeGuard

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

Facts = dict[str, Any]
"""The JSON part of a message."""

FORMAT = "safetensors"
"""The type of the array's serialisation. It is also the array's key in its record."""
_FACTS, _TENSORS = "facts", "tensors"
"""Keys of the two records of a message."""
MAX_SAMPLES = 2**40
"""The largest number of samples that is accepted in a message."""
_MAX_LENGTH = 300
"""Text from another machine is cut after this many characters."""


class Garbled(Exception):
    """A message has unexpected content. The error's text says what is wrong."""

    def __init__(self, text: str) -> None:
        super().__init__(one_line(text))


def one_line(text: str) -> str:
    """Prepare text from another machine for a log: short, on one line, and without control characters."""
    plain = "".join(c if c.isprintable() else " " for c in text[: 4 * _MAX_LENGTH])
    words = " ".join(plain.split())
    return words if len(words) <= _MAX_LENGTH else f"{words[:_MAX_LENGTH]} …"


def digest(payload: bytes) -> str:
    """A hash that identifies a payload."""
    return hashlib.sha256(payload).hexdigest()


def is_count(value: object, at_least: int = 0) -> TypeGuard[int]:
    """Whether a received value is a possible number of samples."""
    return isinstance(value, int) and not isinstance(value, bool) and at_least <= value <= MAX_SAMPLES


def tensors_record(payload: bytes) -> ArrayRecord | None:
    """Make a record of tensors. Several messages can share it, so that Flower splits and hashes it only once."""
    if not payload:
        return None
    return ArrayRecord({FORMAT: Array(dtype="uint8", shape=(len(payload),), stype=FORMAT, data=payload)})


def to_records(facts: Facts, tensors: bytes | ArrayRecord | None) -> RecordDict:
    """Make the content of a message."""
    records = RecordDict({_FACTS: ConfigRecord({"json": json.dumps(facts)})})
    record = tensors_record(tensors) if isinstance(tensors, bytes) else tensors
    if record is not None:
        records[_TENSORS] = record
    return records


def from_records(records: RecordDict) -> tuple[Facts, bytes]:
    """Read the content that `to_records` made. Raise `Garbled` for anything else."""
    try:
        names = {_FACTS} | ({_TENSORS} if _TENSORS in records else set())
        if set(records) != names:
            raise Garbled(f"it has records {sorted(records)}; expected {sorted(names)}")
        if (keys := list(records.config_records[_FACTS])) != ["json"]:
            raise Garbled(f"its facts have the keys {sorted(keys)}; expected ['json']")
        facts = json.loads(str(records.config_records[_FACTS]["json"]))
        payload = b""
        if _TENSORS in records:
            arrays = records.array_records[_TENSORS]
            if list(arrays) != [FORMAT] or arrays[FORMAT].stype != FORMAT:
                raise Garbled("its array does not hold safetensors bytes")
            payload = arrays[FORMAT].data
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise Garbled(f"it cannot be read ({error})") from error
    if not isinstance(facts, dict):
        raise Garbled("its facts are not a JSON object")
    return facts, payload
