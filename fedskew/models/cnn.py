"""Plain convolutional networks with 5×5 kernels: FedLMD's CNN, PKD's ConvNet-S and ConvNet-L."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fedskew.models.base import Classifier, Inputs

_HIDDEN = 512


def cnn(inputs: Inputs) -> Classifier:
    """Make FedLMD's CNN ("fedavgnet"). On 28×28 grey images it is PKD's ConvNet-S."""
    return convnet(inputs, filters=(32, 64))


def convnet_l(inputs: Inputs) -> Classifier:
    """Make PKD's ConvNet-L: ConvNet-S with one more convolution. The paper does not give its width."""
    return convnet(inputs, filters=(32, 64, 128))


def convnet(inputs: Inputs, filters: Sequence[int]) -> Classifier:
    """Make a network with one 5×5 convolution and 2×2 max-pooling for each number of filters, then one hidden layer."""
    channels, height, width = inputs.shape
    layers: list[nn.Module] = []
    for out in filters:
        layers += [nn.Conv2d(channels, out, kernel_size=5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
        channels, height, width = out, height // 2, width // 2
    layers += [nn.Flatten(), nn.Linear(channels * height * width, _HIDDEN), nn.ReLU()]
    return Classifier(nn.Sequential(*layers), nn.Linear(_HIDDEN, inputs.classes))
