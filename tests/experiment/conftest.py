"""Shared by the tests of rounds that overlap."""

from __future__ import annotations

import math

import pytest

from fedskew.experiment import overlap


@pytest.fixture
def every_round_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, a row is recorded while the next round trains."""
    monkeypatch.setattr(overlap, "_SHORT_ROUND_SECONDS", math.inf)
