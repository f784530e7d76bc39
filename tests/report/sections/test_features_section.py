"""The section with the features says what it does not draw."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedskew.report.sections import features as section
from fedskew.results import comparisons, load_runs


def test_methods_and_classes_that_are_not_drawn_are_counted(comparison: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(section, "MAX_PANELS", 1)
    monkeypatch.setattr(section, "MAX_CLASSES", 3)
    (loaded,) = comparisons(load_runs([comparison]).runs)
    found = section.features(loaded)
    assert f"only the first 1 of {len(loaded.methods)} methods are drawn" in found.missing
    assert "only the first 3 of 10 classes are drawn" in found.missing
