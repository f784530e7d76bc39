"""Shared by the tests of rounds that overlap."""

from __future__ import annotations

import math

import pytest

from fedskew.experiment import loop


@pytest.fixture
def every_round_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine: no row is written before the next round is under way."""
    monkeypatch.setattr(loop, "_SHORT", math.inf)
