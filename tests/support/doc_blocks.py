"""The fenced blocks of a Markdown document."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    line: int
    language: str
    marks: tuple[str, ...]
    text: str

    @property
    def file(self) -> str | None:
        return next((mark.removeprefix("file=") for mark in self.marks if mark.startswith("file=")), None)

    @property
    def commands(self) -> list[list[str]]:
        """The arguments of the `fedskew` commands in it."""
        if self.language != "bash":
            return []
        lines = self.text.replace("\\\n", " ").splitlines()
        words = [shlex.split(line, comments=True) for line in lines]
        return [line[1:] for line in words if line and line[0] == "fedskew"]


def blocks(document: Path) -> Iterator[Block]:
    text = document.read_text(encoding="utf-8")
    for match in re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        language, *marks = match[1].split() or [""]
        yield Block(text.count("\n", 0, match.start()) + 1, language, tuple(marks), match[2])
