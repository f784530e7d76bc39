"""AutoAugment with the policy learned on CIFAR-10 (Cubuk et al., CVPR 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from fedskew.data.augmentation import image_operations as ops
from fedskew.data.augmentation.per_sample import draw_uniforms, integers_below

_BINS = 10  # bins of equal width in each range of magnitudes
_RANGES = {
    # the lowest and the highest magnitude; operations that are not listed have no magnitude
    ops.SHEAR_X: (-0.3, 0.3),
    ops.SHEAR_Y: (-0.3, 0.3),
    ops.TRANSLATE_X: (-150 / 331, 150 / 331),  # a share of the side, as in torchvision: 150 of 331 pixels
    ops.TRANSLATE_Y: (-150 / 331, 150 / 331),
    ops.ROTATE: (-30.0, 30.0),
    ops.POSTERIZE: (4.0, 8.0),
    ops.SOLARIZE: (0.0, 256.0),
    ops.BRIGHTNESS: (0.1, 1.9),
    ops.CONTRAST: (0.1, 1.9),
    ops.COLOR: (0.1, 1.9),
    ops.SHARPNESS: (0.1, 1.9),
}

POLICY = (
    # A line is a sub-policy: two operations, applied in order, each with its probability and the bin of its magnitude.
    ((ops.INVERT, 0.1, 7), (ops.CONTRAST, 0.2, 6)),
    ((ops.ROTATE, 0.7, 2), (ops.TRANSLATE_X, 0.3, 9)),
    ((ops.SHARPNESS, 0.8, 1), (ops.SHARPNESS, 0.9, 3)),
    ((ops.SHEAR_Y, 0.5, 8), (ops.TRANSLATE_Y, 0.7, 9)),
    ((ops.AUTO_CONTRAST, 0.5, 8), (ops.EQUALIZE, 0.9, 2)),
    ((ops.SHEAR_Y, 0.2, 7), (ops.POSTERIZE, 0.3, 7)),
    ((ops.COLOR, 0.4, 3), (ops.BRIGHTNESS, 0.6, 7)),
    ((ops.SHARPNESS, 0.3, 9), (ops.BRIGHTNESS, 0.7, 9)),
    ((ops.EQUALIZE, 0.6, 5), (ops.EQUALIZE, 0.5, 1)),
    ((ops.CONTRAST, 0.6, 7), (ops.SHARPNESS, 0.6, 5)),
    ((ops.COLOR, 0.7, 7), (ops.TRANSLATE_X, 0.5, 8)),
    ((ops.EQUALIZE, 0.3, 7), (ops.AUTO_CONTRAST, 0.4, 8)),
    ((ops.TRANSLATE_Y, 0.4, 3), (ops.SHARPNESS, 0.2, 6)),
    ((ops.BRIGHTNESS, 0.9, 6), (ops.COLOR, 0.2, 8)),
    ((ops.SOLARIZE, 0.5, 2), (ops.INVERT, 0.0, 3)),
    ((ops.EQUALIZE, 0.2, 0), (ops.AUTO_CONTRAST, 0.6, 0)),
    ((ops.EQUALIZE, 0.2, 8), (ops.EQUALIZE, 0.6, 4)),
    ((ops.COLOR, 0.9, 9), (ops.EQUALIZE, 0.6, 6)),
    ((ops.AUTO_CONTRAST, 0.8, 4), (ops.SOLARIZE, 0.2, 8)),
    ((ops.BRIGHTNESS, 0.1, 3), (ops.COLOR, 0.7, 0)),
    ((ops.SOLARIZE, 0.4, 5), (ops.AUTO_CONTRAST, 0.9, 3)),
    ((ops.TRANSLATE_Y, 0.9, 9), (ops.TRANSLATE_Y, 0.7, 9)),
    ((ops.AUTO_CONTRAST, 0.9, 2), (ops.SOLARIZE, 0.8, 3)),
    ((ops.EQUALIZE, 0.8, 8), (ops.INVERT, 0.1, 3)),
    ((ops.TRANSLATE_Y, 0.7, 9), (ops.AUTO_CONTRAST, 0.9, 1)),
)


@dataclass(frozen=True)
class AutoAugment:
    """Applies one of the 25 sub-policies to each image. Magnitudes are drawn uniformly from their bins.

    Each image uses five random draws of its key. `first_draw` is the number of the first one.
    """

    first_draw: int

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        for operations, magnitudes in self.choices(keys):
            images = ops.apply_operations(images, operations, magnitudes)
        return images

    def choices(self, keys: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return two pairs (operations [N], magnitudes [N]), for the first and the second operation of each image.

        An operation is applied with its probability. Otherwise it is replaced by `IDENTITY`.
        """
        policy = _policy_tensor(keys.device)
        uniforms = draw_uniforms(keys, self.first_draw, 5)
        operation, probability, start, width = policy[integers_below(len(POLICY), uniforms[:, 0])].unbind(2)
        applied = uniforms[:, 1:3] < probability
        operations = torch.where(applied, operation, ops.IDENTITY).to(torch.int64)
        magnitudes = start + width * uniforms[:, 3:5]
        return list(zip(operations.unbind(1), magnitudes.unbind(1), strict=True))


@cache
def _policy_tensor(device: torch.device) -> Tensor:
    """Return all `_policy_row`s as a tensor [25, 2, 4]. The cache avoids a copy per batch, which stalls a GPU."""
    return torch.tensor([[_policy_row(*step) for step in pair] for pair in POLICY], device=device)


def _policy_row(operation: int, probability: float, magnitude_bin: int) -> tuple[float, float, float, float]:
    """Return the operation, its probability, and the start and width of its bin of magnitudes."""
    low, high = _RANGES.get(operation, (0.0, 0.0))
    width = (high - low) / _BINS
    return float(operation), probability, low + width * magnitude_bin, width
