"""Federations that the runs of one process share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from fedskew.experiment.config import Config, with_values
from fedskew.experiment.shared_federations import shared_federation


def _write_cinic10(folder: Path, images: int) -> None:
    for part in ("train", "test"):
        for number, name in enumerate(("airplane", "bird")):
            (folder / part / name).mkdir(parents=True)
            for image in range(images):
                pixels = np.full((32, 32, 3), 10 * number + image, dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{image}.png")


def test_runs_with_other_data_folders_get_other_data(tmp_path: Path) -> None:
    def samples(folder: Path) -> int:
        values = {"data": "cinic10", "data_dir": str(folder), "partition.rule": "iid", "partition.clients": 2}
        return len(shared_federation(with_values(Config(), values)).dataset.train)

    _write_cinic10(tmp_path / "small", images=3)
    _write_cinic10(tmp_path / "large", images=5)
    assert samples(tmp_path / "small") == 6
    assert samples(tmp_path / "large") == 10
