"""LeNet-5 with ReLU and max-pooling, as PKD uses it, and NIID-Bench's variant without padding."""

from __future__ import annotations

from torch import nn

from fedskew.models.base import Classifier, DataShape


def lenet5(data: DataShape) -> Classifier:
    """Make LeNet-5. Its first convolution pads MNIST's 28×28 pixels to the 32×32 that LeNet-5 was designed for."""
    return _lenet(data, padding=2)


def simple_cnn(data: DataShape) -> Classifier:
    """Make NIID-Bench's "simple-cnn", which does not pad."""
    return _lenet(data, padding=0)


def _lenet(data: DataShape, padding: int) -> Classifier:
    channels, height, width = data.shape

    def final_side(side: int) -> int:
        """A 5×5 convolution removes 4 pixels, and pooling halves the rest. Both happen twice."""
        after_first = (side + 2 * padding - 4) // 2
        return (after_first - 4) // 2

    encoder = nn.Sequential(
        nn.Conv2d(channels, 6, kernel_size=5, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * final_side(height) * final_side(width), 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
    )
    return Classifier(encoder, nn.Linear(84, data.classes))
