"""FedVLS's dense network for MNIST: 784-200-200-C."""

from __future__ import annotations

from math import prod

from torch import nn

from fedskew.models.base import Classifier, DataShape


def dnn(data: DataShape, width: int = 200) -> Classifier:
    """Make a network with two hidden layers on the flattened sample, for samples of any shape."""
    encoder = nn.Sequential(
        nn.Flatten(),
        nn.Linear(prod(data.shape), width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
    )
    return Classifier(encoder, nn.Linear(width, data.classes))
