"""A dataset with digit datasets as domains: MNIST, USPS, SVHN and synthetic digits by default (benchmark of FPL)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import interpolate

from fedskew.data.dataset import Dataset, Samples
from fedskew.errors import UserError, unknown
from fedskew.randomness import permutation

DIGITS = ("mnist", "usps", "svhn", "syn-digits")

_SIDE = 32
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""ImageNet's statistics, which FPL's code uses."""
_BLOCK = 4096
"""How many images are resized at a time, which limits memory."""


def load_domains(
    load: Callable[[str], Dataset], *, domains: str | Sequence[str] = DIGITS, fraction: float = 1.0
) -> Dataset:
    """Load the chosen domains by name, at 3×32×32.

    `fraction` is the share of every domain's training samples that is kept, class by class. FPL uses 0.01. All test
    samples are kept.
    """
    if not isinstance(fraction, int | float) or isinstance(fraction, bool) or not 0 < fraction <= 1:
        raise UserError(f"fraction is {fraction!r}; expected a number > 0 and ≤ 1")
    parts = [load(name) for name in _domain_names(domains)]
    train = [_domain_samples(part.train, number, fraction) for number, part in enumerate(parts)]
    test = [_domain_samples(part.test, number, 1.0) for number, part in enumerate(parts)]
    names = tuple(part.name for part in parts)
    return Dataset(
        "digits-domains", "image", parts[0].classes, _concatenate(train), _concatenate(test), _MEAN, _STD, domains=names
    )


def _domain_names(domains: str | Sequence[str]) -> list[str]:
    listed = domains.split(",") if isinstance(domains, str) else domains
    if not isinstance(listed, list | tuple):
        raise UserError(f"domains is {domains!r}; expected two or more names from {', '.join(DIGITS)}")
    names = [str(name).strip() for name in listed]
    for name in names:
        if name not in DIGITS:
            raise unknown("domain", name, DIGITS)
    if len(names) < 2 or len(set(names)) < len(names):
        raise UserError(f"domains is {domains!r}; expected two or more different names from {', '.join(DIGITS)}")
    return names


def _domain_samples(samples: Samples, domain: int, fraction: float) -> Samples:
    kept = np.arange(len(samples)) if fraction == 1 else _class_shares(samples.y, fraction)
    x = _resize_to_colour(samples.x[kept])
    return Samples(x, samples.y[kept], np.full(len(kept), domain, dtype=np.int64))


def _class_shares(y: npt.NDArray[np.int64], fraction: float) -> npt.NDArray[np.int64]:
    """Choose a share of each class, but at least one sample. The choice does not depend on an experiment's seed."""
    members = (np.flatnonzero(y == label) for label in np.unique(y))
    chosen = [m[permutation(len(m), 0, "share", i)[: math.ceil(fraction * len(m))]] for i, m in enumerate(members)]
    return np.sort(np.concatenate(chosen))


def _resize_to_colour(x: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    """Resize images to 32×32 by bilinear interpolation, with three channels."""
    out = np.empty((len(x), 3, _SIDE, _SIDE), np.uint8)
    for first in range(0, len(x), _BLOCK):
        images = torch.from_numpy(np.ascontiguousarray(x[first : first + _BLOCK]))
        if images.shape[2:] != (_SIDE, _SIDE):
            images = interpolate(images.float(), (_SIDE, _SIDE), mode="bilinear", antialias=True).round()
        out[first : first + len(images)] = images.clamp(0, 255).to(torch.uint8).numpy()
    return out


def _concatenate(parts: Sequence[Samples]) -> Samples:
    domains = [part.domain for part in parts if part.domain is not None]
    return Samples(
        np.concatenate([part.x for part in parts]),
        np.concatenate([part.y for part in parts]),
        np.concatenate(domains),
    )
