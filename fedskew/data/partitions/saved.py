"""A split that was saved before, so that anyone can rerun it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

from fedskew.data.partitions.rule import IntArray, Labels, Partition, file_path, register
from fedskew.data.partitions.split_file import read_split


@register
@dataclass(frozen=True)
class Saved(Partition):
    """The split of a file that `Federation.save_split` wrote; the seed plays no part."""

    name: ClassVar[str] = "saved"
    uses_all: ClassVar[bool] = False
    path: str | os.PathLike[str]

    def __post_init__(self) -> None:
        file_path("path", self.path)

    def draw(self, labels: Labels, seed: int) -> list[IntArray]:  # noqa: ARG002 - all is in the file
        return read_split(self.path, labels.y)
