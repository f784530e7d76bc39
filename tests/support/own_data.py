"""Small arrays and files in the forms that a user's own data may have."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

Y = np.arange(20) % 4


def grey(n: int = 20) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (n, 6, 5), dtype=np.uint8)


def colour(n: int = 20) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (n, 3, 6, 5), dtype=np.uint8)


def npz(tmp_path: Path, **arrays: Any) -> Path:
    np.savez(tmp_path / "own.npz", **arrays)
    return tmp_path / "own.npz"


def encoded(value: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (5, 6), (value, 0, 0)).save(file, "PNG")
    return file.getvalue()
