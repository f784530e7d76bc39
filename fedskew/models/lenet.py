"""LeNet-5 with ReLU and max-pooling, as PKD uses it, and NIID-Bench's variant without padding."""

from __future__ import annotations

from torch import nn

from fedskew.models.base import Classifier, DataShape


def lenet5(data: DataShape) -> Classifier:
    """Make LeNet-5. The first convolution pads MNIST's 28×28 to LeNet's 32×32."""
    return _lenet(data, padding=2)


def simple_cnn(data: DataShape) -> Classifier:
    """Make NIID-Bench's "simple-cnn", which does not pad."""
    return _lenet(data, padding=0)


def _lenet(data: DataShape, padding: int) -> Classifier:
    channels, height, width = data.shape

    def side(size: int) -> int:
        after_first = (size + 2 * padding - 4) // 2
        return (after_first - 4) // 2

    encoder = nn.Sequential(
        nn.Conv2d(channels, 6, kernel_size=5, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * side(height) * side(width), 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
    )
    return Classifier(encoder, nn.Linear(84, data.classes))
