"""MobileNetV2 for small images, as FedVLS uses it on CIFAR and Tiny-ImageNet."""

from __future__ import annotations

from torch import Tensor, nn

from fedskew.models.base import Classifier, DataShape

_BLOCKS = (
    # expansion, channels, repeats, stride of the first repeat
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
_FEATURES = 1280


def mobilenetv2(data: DataShape) -> Classifier:
    """Make MobileNetV2 with ReLU instead of ReLU6, and stride 1 in the stem and the first block of 24 channels."""
    before = 32
    layers = [*_conv_norm(data.shape[0], before, kernel=3), nn.ReLU()]
    for expansion, after, repeats, first_stride in _BLOCKS:
        for repeat in range(repeats):
            layers.append(InvertedResidual(before, after, expansion, first_stride if repeat == 0 else 1))
            before = after
    layers += [*_conv_norm(before, _FEATURES, kernel=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return Classifier(nn.Sequential(*layers), nn.Linear(_FEATURES, data.classes))


class InvertedResidual(nn.Module):
    """A 1×1 convolution makes `expansion` times as many channels, a 3×3 one filters each, and a 1×1 one reduces them.

    With stride 1, the input is added to the result. If the result has another number of channels, the input first
    passes through a 1×1 convolution.
    """

    def __init__(self, before: int, after: int, expansion: int, stride: int) -> None:
        super().__init__()
        wide = before * expansion
        self.residual = nn.Sequential(
            *_conv_norm(before, wide, kernel=1),
            nn.ReLU(),
            *_conv_norm(wide, wide, kernel=3, stride=stride, groups=wide),
            nn.ReLU(),
            *_conv_norm(wide, after, kernel=1),
        )
        self.shortcut: nn.Module | None = None
        if stride == 1:
            is_identity = before == after
            self.shortcut = nn.Identity() if is_identity else nn.Sequential(*_conv_norm(before, after, kernel=1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.residual(x)
        return out if self.shortcut is None else out + self.shortcut(x)


def _conv_norm(before: int, after: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    padding = kernel // 2
    conv = nn.Conv2d(before, after, kernel, stride=stride, padding=padding, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(after)]
