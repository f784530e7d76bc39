"""From texts to word indices. Its source is exported with text models."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

PADDING, UNKNOWN = 0, 1
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")


class Words:
    """Maps words to indices from 2 on, in the order of the vocabulary that the model was trained with."""

    def __init__(self, listed: Sequence[str], length: int) -> None:
        self.length = length
        self.numbers = {word: number for number, word in enumerate(listed, UNKNOWN + 1)}

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """The indices of each text's first words, n × length; a text without words is one unknown word."""
        rows = torch.full((len(texts), self.length), PADDING, dtype=torch.int64)
        for row, text in zip(rows, texts, strict=True):
            found = _WORD.findall(text.lower())[: self.length]
            numbers = [self.numbers.get(word, UNKNOWN) for word in found] or [UNKNOWN]
            row[: len(numbers)] = torch.tensor(numbers)
        return rows
