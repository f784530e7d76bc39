"""How much the clients' updates pull in different directions."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


def drift_diversity(updates: Iterable[npt.ArrayLike]) -> float:
    """Return Σ‖mᵢ‖² / ‖Σmᵢ‖² over the updates mᵢ (a client's model minus the model that it was sent).

    It is 1/K for K identical updates, 1 for orthogonal updates, and large for updates that cancel. It is infinite if
    their sum is zero. Updates are converted to float64 one at a time, so there is no second copy of all of them.
    """
    squares, total = 0.0, np.zeros(())
    for update in updates:
        flat = np.asarray(update).astype(np.float64).ravel()
        squares += float(flat @ flat)
        total = total + flat
    squared_norm = float(np.vdot(total, total))
    return squares / squared_norm if squared_norm != 0 else math.inf


def finite_or_none(value: float) -> float | None:
    """Return the value, or None for infinity and NaN, which JSON does not have."""
    return value if math.isfinite(value) else None
