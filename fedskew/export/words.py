"""Turn texts into word indices. This module's source is exported with text models."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

PADDING, UNKNOWN = 0, 1
"""The indices of padding and of any word outside the vocabulary."""
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")


class Words:
    """Maps the words of the training vocabulary to indices, starting at 2."""

    def __init__(self, listed: Sequence[str], length: int) -> None:
        self.length = length
        self.numbers = {word: number for number, word in enumerate(listed, UNKNOWN + 1)}

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Return the indices of each text's first words, n × length. A text without words becomes one unknown word."""
        rows = torch.full((len(texts), self.length), PADDING, dtype=torch.int64)
        for row, text in zip(rows, texts, strict=True):
            found = _WORD.findall(text.lower())[: self.length]
            numbers = [self.numbers.get(word, UNKNOWN) for word in found] or [UNKNOWN]
            row[: len(numbers)] = torch.tensor(numbers)
        return rows
