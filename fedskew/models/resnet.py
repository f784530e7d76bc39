"""Residual networks of basic blocks: wide ones with 64 to 512 channels, and the CIFAR ResNets with 16 to 64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn
from torch.nn import functional

from fedskew.models.base import Classifier, DataShape

_WIDE = (64, 128, 256, 512)
_NARROW = (16, 32, 64)

Norm = Callable[[int], nn.Module]
Shortcut = Callable[[int, int, int, Norm], nn.Module]


def resnet18(data: DataShape) -> Classifier:
    """Make ResNet-18 with a stem for small images: a 3×3 convolution with stride 1."""
    return _resnet(data, _WIDE, blocks=2, shortcut=projection)


def resnet10(data: DataShape) -> Classifier:
    """Make FedNTD's ResNet-10, with one block per stage. Its BatchNorm uses batch statistics even in evaluation."""
    norm = partial(nn.BatchNorm2d, track_running_stats=False)
    return _resnet(data, _WIDE, blocks=1, shortcut=projection, norm=norm)


def resnet18_imagenet(data: DataShape) -> Classifier:
    """Make torchvision's ResNet-18 with its ImageNet stem, which FedVLS's code applies to small images."""
    stem = [
        nn.Conv2d(data.shape[0], 64, kernel_size=7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
    ]
    model = _resnet(data, _WIDE, blocks=2, shortcut=projection, stem=stem)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def resnet32(data: DataShape) -> Classifier:
    """Make the CIFAR ResNet with five blocks per stage and shortcuts without parameters (option A)."""
    return _kaiming_init(_resnet(data, _NARROW, blocks=5, shortcut=ZeroPadded))


def resnet8(data: DataShape) -> Classifier:
    """Make the CIFAR ResNet with one block per stage and shortcuts without parameters (option A)."""
    return _kaiming_init(_resnet(data, _NARROW, blocks=1, shortcut=ZeroPadded))


def resnet8_b(data: DataShape) -> Classifier:
    """Make the CIFAR ResNet with one block per stage and convolutional shortcuts (option B)."""
    return _kaiming_init(_resnet(data, _NARROW, blocks=1, shortcut=projection))


class BasicBlock(nn.Module):
    """Adds the result of two 3×3 convolutions to a shortcut from the input."""

    def __init__(self, before: int, after: int, stride: int, shortcut: Shortcut, norm: Norm) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(before, after, kernel_size=3, stride=stride, padding=1, bias=False),
            norm(after),
            nn.ReLU(),
            nn.Conv2d(after, after, kernel_size=3, padding=1, bias=False),
            norm(after),
        )
        is_identity = stride == 1 and before == after
        self.shortcut = nn.Identity() if is_identity else shortcut(before, after, stride, norm)
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.activation(self.residual(x) + self.shortcut(x))
        return out


class ZeroPadded(nn.Module):
    """The shortcut of option A in the ResNet paper: keeps every stride-th pixel, and adds channels of zeros."""

    def __init__(self, before: int, after: int, stride: int, norm: Norm) -> None:
        del norm  # this shortcut has no BatchNorm
        super().__init__()
        self.stride = stride
        self.padding = (after - before) // 2

    def forward(self, x: Tensor) -> Tensor:
        kept = x[..., :: self.stride, :: self.stride]
        return functional.pad(kept, (0, 0, 0, 0, self.padding, self.padding))


def projection(before: int, after: int, stride: int, norm: Norm) -> nn.Module:
    """Make the shortcut of option B in the ResNet paper: a 1×1 convolution and a normalisation."""
    return nn.Sequential(nn.Conv2d(before, after, kernel_size=1, stride=stride, bias=False), norm(after))


def _resnet(
    data: DataShape,
    widths: Sequence[int],
    blocks: int,
    shortcut: Shortcut,
    norm: Norm = nn.BatchNorm2d,
    stem: Sequence[nn.Module] | None = None,
) -> Classifier:
    before = widths[0]
    layers = _small_stem(data.shape[0], before, norm) if stem is None else list(stem)
    for stage, after in enumerate(widths):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(BasicBlock(before, after, stride, shortcut, norm))
            before = after
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return Classifier(nn.Sequential(*layers), nn.Linear(before, data.classes))


def _small_stem(channels: int, width: int, norm: Norm) -> list[nn.Module]:
    conv = nn.Conv2d(channels, width, kernel_size=3, padding=1, bias=False)
    return [conv, norm(width), nn.ReLU()]


def _kaiming_init(model: Classifier) -> Classifier:
    """Initialise the convolutions and the head as the original CIFAR ResNets do."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight)
    return model
