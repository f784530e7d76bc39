"""Plain convolutional networks with 5×5 kernels: FedLMD's CNN, PKD's ConvNet-S and ConvNet-L."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fedskew.models.base import Classifier, DataShape

_HIDDEN = 512


def cnn(data: DataShape) -> Classifier:
    """Make FedLMD's CNN, which its code calls "fedavgnet". On 28×28 grey images, it is PKD's ConvNet-S."""
    return convnet(data, filters=(32, 64))


def convnet_l(data: DataShape) -> Classifier:
    """Make PKD's ConvNet-L: ConvNet-S and a third convolution, of width 128. The paper does not give this width."""
    return convnet(data, filters=(32, 64, 128))


def convnet(data: DataShape, filters: Sequence[int]) -> Classifier:
    """Make a network with one 5×5 convolution and 2×2 max-pooling for each number of filters, then one hidden layer."""
    channels, height, width = data.shape
    layers: list[nn.Module] = []
    for count in filters:
        layers += [nn.Conv2d(channels, count, kernel_size=5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
        channels, height, width = count, height // 2, width // 2
    layers += [nn.Flatten(), nn.Linear(channels * height * width, _HIDDEN), nn.ReLU()]
    return Classifier(nn.Sequential(*layers), nn.Linear(_HIDDEN, data.classes))
