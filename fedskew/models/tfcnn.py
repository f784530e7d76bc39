"""TFCNN, FedGR's network: three 3×3 convolutions."""

from __future__ import annotations

from torch import nn

from fedskew.models.base import Classifier, DataShape


def tfcnn(data: DataShape) -> Classifier:
    """Make TFCNN with a head without bias, as in FedGR's definition."""
    layers, features = _convolutions(data)
    return Classifier(nn.Sequential(*layers), nn.Linear(features, data.classes, bias=False))


def tfcnn_128(data: DataShape) -> Classifier:
    """Make TFCNN with a hidden layer of 128 units and a head with bias."""
    layers, features = _convolutions(data)
    encoder = nn.Sequential(*layers, nn.Linear(features, 128), nn.ReLU())
    return Classifier(encoder, nn.Linear(128, data.classes))


def _convolutions(data: DataShape) -> tuple[list[nn.Module], int]:
    """Return the layers up to the flat feature vector, and its length."""
    channels, height, width = data.shape
    layers: list[nn.Module] = []
    for before, after in ((channels, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return [*layers, nn.Flatten()], 64 * (height // 8) * (width // 8)
