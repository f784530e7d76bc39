"""Noise for privacy, which nobody can reproduce: normal and discrete Laplace samples.

Whoever can guess the state of the random generator can subtract the noise. The generators of torch and numpy are not
made for secrets. For example, torch's generator for CPUs has only 2³² different streams, and a server could try them
all. So the random numbers here come from the operating system, or from a cipher whose key comes from there.

The discrete Laplace samples are exact. They are computed with whole numbers only, so no rounding changes their
probabilities (Canonne, Kamath and Steinke, "The discrete Gaussian for differential privacy", NeurIPS 2020, algorithms 1
and 2). The normal samples are rounded to float64. The accounting of ε ignores this rounding.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from fedskew.flower.secure.masks import expand_seed

_KEY_BYTES = 32
_UNIFORM_BITS = 53
"""Bits of a float64's significand."""


def draw_normals(shape: Sequence[int]) -> Tensor:
    """Draw from the standard normal distribution, in float64, by the method of Box and Muller."""
    pairs = -(-math.prod(shape) // 2)
    words = expand_seed(secrets.token_bytes(_KEY_BYTES), 2 * pairs) >> np.uint64(64 - _UNIFORM_BITS)
    uniform = np.ldexp(words.astype(np.float64), -_UNIFORM_BITS).reshape(2, pairs)
    radius, angle = np.sqrt(-2 * np.log1p(-uniform[0])), 2 * np.pi * uniform[1]
    normals = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return torch.from_numpy(normals[: math.prod(shape)].reshape(shape))


def draw_discrete_laplace(rate: Fraction) -> int:
    """Draw a whole number x with a probability proportional to exp(-rate·|x|)."""
    while True:
        fine = secrets.randbelow(rate.denominator)
        if not _draw_exponential_event(Fraction(fine, rate.denominator)):
            continue
        coarse = 0
        while _draw_exponential_event(Fraction(1)):
            coarse += 1
        # The sum fine + coarse·denominator is n with a probability proportional to exp(-n/denominator).
        size, is_negative = (fine + coarse * rate.denominator) // rate.numerator, secrets.randbits(1)
        if size or not is_negative:  # otherwise, zero would be twice as likely
            return -size if is_negative else size


def _draw_exponential_event(exponent: Fraction) -> bool:
    """Return True with probability exp(-exponent). The exponent is from 0 to 1."""
    step = 1
    while secrets.randbelow(exponent.denominator * step) < exponent.numerator:
        step += 1
    return step % 2 == 1
