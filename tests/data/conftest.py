"""Data tests look for files only where the test puts them."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty user's cache, and no FEDSKEW_DATA."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("FEDSKEW_DATA", raising=False)
    return tmp_path / "xdg" / "fedskew"
