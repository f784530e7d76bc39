"""CSV files, read cell by cell."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from fedskew.data.csv_files import read_csv


def test_long_texts_are_read_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows, the limit is a C long of 32 bits."""
    set_limit = csv.field_size_limit

    def limit_of_32_bits(limit: int) -> int:
        if limit >= 2**31:
            raise OverflowError("Python int too large to convert to C long")
        return set_limit(limit)

    monkeypatch.setattr(csv, "field_size_limit", limit_of_32_bits)
    text = "x" * 200_000
    path = tmp_path / "long.csv"
    path.write_text(f"1,{text}\n", encoding="utf-8")
    assert read_csv(path) == [(1, ["1", text])]
    assert set_limit() < len(text)
