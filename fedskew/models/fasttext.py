"""A text classifier like fastText: the mean of the token embeddings, then two linear layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedskew.models.base import Classifier, DataShape

_WIDTH = 32
_PADDING = 0
"""The token that fills up short texts."""


def fasttext(data: DataShape) -> Classifier:
    """Make PFLlib's text model, with the sizes of FedVLS's code. FedVLS's paper does not describe its text model."""
    encoder = nn.Sequential(MeanEmbedding(data.vocabulary, _WIDTH), nn.Linear(_WIDTH, _WIDTH))
    return Classifier(encoder, nn.Linear(_WIDTH, data.classes))


class MeanEmbedding(nn.Module):
    """Averages the embeddings of a text's tokens and ignores padding. A text without tokens gives zeros."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)

    def forward(self, tokens: Tensor) -> Tensor:
        vectors = self.embedding(tokens)
        present = (tokens != _PADDING).unsqueeze(-1).to(vectors.dtype)
        total = (vectors * present).sum(dim=-2)
        return torch.div(total, present.sum(dim=-2).clamp(min=1))
