"""VGG networks without BatchNorm: NIID-Bench's VGG-9, which PKD uses, and FedNTD's VGG-11."""

from __future__ import annotations

from torch import nn

from fedskew.models.base import Classifier, DataShape

_HIDDEN = 512


def vgg9(data: DataShape) -> Classifier:
    """Make VGG-9: six convolutions and three linear layers, with light dropout between them."""
    channels, height, width = data.shape
    encoder = nn.Sequential(
        *_stage(channels, 32, 64),
        *_stage(64, 128, 128),
        nn.Dropout2d(0.05),
        *_stage(128, 256, 256),
        nn.Flatten(),
        nn.Dropout(0.1),
        *_hidden(256 * (height // 8) * (width // 8)),
        nn.Dropout(0.1),
    )
    return Classifier(encoder, nn.Linear(_HIDDEN, data.classes))


def vgg11(data: DataShape) -> Classifier:
    """Make VGG-11: eight convolutions and three linear layers."""
    channels, height, width = data.shape
    encoder = nn.Sequential(
        *_stage(channels, 64),
        *_stage(64, 128),
        *_stage(128, 256, 256),
        *_stage(256, 512, 512),
        *_stage(512, 512, 512),
        nn.Flatten(),
        *_hidden(512 * (height // 32) * (width // 32)),
    )
    return Classifier(encoder, nn.Linear(_HIDDEN, data.classes))


def _stage(channels: int, *widths: int) -> list[nn.Module]:
    """Return 3×3 convolutions of these widths, then 2×2 max-pooling."""
    layers: list[nn.Module] = []
    for before, after in zip((channels, *widths), widths, strict=False):
        layers += [nn.Conv2d(before, after, kernel_size=3, padding=1), nn.ReLU()]
    return [*layers, nn.MaxPool2d(2)]


def _hidden(features: int) -> list[nn.Module]:
    return [nn.Linear(features, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, _HIDDEN), nn.ReLU()]
