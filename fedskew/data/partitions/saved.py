"""Saved splits, and the partition rule that reads them. A split is saved as JSON, with hashes of split and labels."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedskew.data.partitions.rule import IntArray, Labels, Partition, check_path, register, split_hash
from fedskew.errors import UserError

FORMAT = "fedskew split 1"


def labels_hash(y: IntArray) -> str:
    """Return the SHA-256 of a dataset's training labels, in order."""
    return hashlib.sha256(y.astype("<i8").tobytes()).hexdigest()


def write_split(
    path: str | os.PathLike[str],
    indices: Sequence[IntArray],
    y: IntArray,
    partition: Mapping[str, object],
    seed: int,
) -> None:
    """Write a split to a file. An interrupted write leaves the old file, or none."""
    content = {
        "format": FORMAT,
        "hash": split_hash(indices),
        "labels_hash": labels_hash(y),
        "samples": len(y),
        "partition": dict(partition),
        "seed": seed,
        "clients": [part.tolist() for part in indices],
    }
    target = Path(path)
    if not target.name:
        raise UserError(f"cannot save a split as {str(path)!r}; expected a file name")
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")
        unfinished.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):  # on a read-only disk, this fails as well
            unfinished.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def read_split(path: str | os.PathLike[str], y: IntArray) -> list[IntArray]:
    """Read a split. Raise `UserError` if the file is damaged, or not a saved split of data with these labels."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; expected a saved split") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON; expected a saved split") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{path} is not a saved split; expected a JSON file with format {FORMAT!r}")
    if content.get("samples") != len(y) or content.get("labels_hash") != labels_hash(y):
        raise UserError(
            f"{path} is the split of another dataset, with {content.get('samples')} training samples; "
            f"this one has {len(y)}, with other labels"
        )
    indices = _parse_indices(content.get("clients"))
    if indices is None or split_hash(indices) != content.get("hash"):
        raise UserError(f"{path} is damaged: its split does not match its hash; save it again")
    return indices


def _parse_indices(clients: object) -> list[IntArray] | None:
    if not isinstance(clients, list) or not all(isinstance(part, list) for part in clients):
        return None
    if not all(type(index) is int and 0 <= index < 2**62 for part in clients for index in part):
        return None
    return [np.array(part, np.int64) for part in clients]


@register
@dataclass(frozen=True)
class Saved(Partition):
    """The split in a file that `fedskew partition --save` or `Federation.save_split` wrote. The seed has no effect."""

    name: ClassVar[str] = "saved"
    uses_all: ClassVar[bool] = False
    is_drawn: ClassVar[bool] = False
    path: str | os.PathLike[str]

    def __post_init__(self) -> None:
        check_path("path", self.path)

    def draw(self, labels: Labels, seed: int) -> list[IntArray]:  # noqa: ARG002 - the file has the whole split
        return read_split(self.path, labels.y)
