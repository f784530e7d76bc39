"""Drift diversity: 1/K for identical updates, 1 for orthogonal ones, infinite for cancelling ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedskew.metrics.drift import drift_diversity, finite_or_none


def test_identical_updates() -> None:
    assert drift_diversity(np.ones((5, 3))) == pytest.approx(1 / 5)


def test_orthogonal_updates() -> None:
    assert drift_diversity(np.diag([1.0, 2.0, 3.0])) == pytest.approx(1.0)


def test_updates_that_partly_cancel() -> None:
    assert drift_diversity([[3.0, 1.0], [-2.0, 1.0]]) == pytest.approx((10 + 5) / (1 + 4))


def test_updates_that_cancel_are_null_in_json() -> None:
    diversity = drift_diversity([[1.0, -2.0], [-1.0, 2.0]])
    assert diversity == math.inf
    assert finite_or_none(diversity) is None
    assert finite_or_none(0.5) == 0.5


def test_tensors_are_summed_in_float64() -> None:
    rows = torch.tensor([[1e8, 1.0], [-1e8, 1.0]], dtype=torch.float32)
    assert drift_diversity(rows) == pytest.approx((2e16 + 2) / 4)
