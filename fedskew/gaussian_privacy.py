"""The ε of Gaussian mechanisms, alone and composed.

A mechanism that adds normal noise of deviation σ to a result of sensitivity Δ has the parameter μ = Δ/σ. Several
mechanisms together are as private as a single one whose μ² is the sum of their μ². This holds even if a mechanism
depends on the results of earlier ones. ε follows from μ exactly (Dong, Roth and Su, "Gaussian differential privacy",
JRSS B 2022).
"""

from __future__ import annotations

import math

DELTA = 1e-5
"""The δ of a reported ε, unless another one is set."""
_LARGEST_MU = 1e100
"""For a larger μ, ε counts as infinite. ε grows like μ²/2, which would soon exceed the largest float."""


def epsilon(mechanisms: int, noise_multiplier: float, delta: float, sensitivity: float = 1.0) -> float:
    """Compute the smallest ε for which this number of Gaussian mechanisms are together (ε, δ)-private.

    `sensitivity` and the noise's deviation, `noise_multiplier`, are in the same unit, such as the clip.
    """
    return gaussian_epsilon(math.sqrt(mechanisms) * sensitivity / noise_multiplier, delta)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Compute the smallest ε for which a Gaussian mechanism with parameter μ is (ε, δ)-private."""
    if mu == 0 or mu > _LARGEST_MU:
        return 0.0 if mu == 0 else math.inf
    low, high = 0.0, 1.0
    while _delta_at(high, mu) > delta:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _delta_at(middle, mu) > delta else (low, middle)
    return high


def _delta_at(epsilon: float, mu: float) -> float:
    """Compute the δ of a Gaussian mechanism with parameter μ at this ε."""
    exponent = epsilon + _log_normal(-mu / 2 - epsilon / mu)
    return _normal(mu / 2 - epsilon / mu) - math.exp(min(exponent, 0.0))  # only rounding can make the exponent positive


def _normal(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2


def _log_normal(x: float) -> float:
    """Compute log Φ(x), even where Φ itself is too small for a float."""
    if x > -30:
        return math.log(_normal(x))
    # For smaller x, the first two terms of the asymptotic series of Φ.
    return -x * x / 2 - math.log(-x) - math.log(2 * math.pi) / 2 + math.log1p(-1 / (x * x))
