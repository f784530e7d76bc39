"""Federations that the runs of one process share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
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


def test_changed_files_of_data_and_counts_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSKEW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("fedskew.experiment.shared_federations._MIN_CACHED_SECONDS", -1.0)
    table, counts = tmp_path / "table.csv", tmp_path / "counts.csv"
    values = {"data": str(table), "partition": {"rule": "counts", "path": str(counts)}}
    for rows, each in ((20, 3), (30, 3), (30, 4)):
        table.write_text("age,label\n" + "".join(f"{row % 7}.5,{'ab'[row % 2]}\n" for row in range(rows)))
        counts.write_text(f"client,a,b\nx,{each},1\ny,1,{each}\n")
        fed = shared_federation(with_values(Config(), values))
        assert (len(fed.dataset.train), fed.sizes.tolist()) == (rows * 4 // 5, [each + 1, each + 1])
        assert shared_federation(with_values(Config(), values)) is fed


def test_a_split_by_an_own_rule_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next process would read it, even if the rule's code has changed."""
    (tmp_path / "halves.py").write_text(
        "import numpy as np\nimport fedskew as fs\n\n"
        "class Halves(fs.Partition):\n"
        "    def draw(self, labels, seed):\n"
        "        return np.array_split(np.arange(len(labels)), 2)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FEDSKEW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("fedskew.experiment.shared_federations._MIN_CACHED_SECONDS", -1.0)
    for rule, saved in (("halves:Halves", 0), ("iid", 1)):
        config = with_values(Config(), {"data": "synthetic", "data.seed": 77, "partition.rule": rule})
        assert shared_federation(config).clients > 1
        assert len(list((tmp_path / "cache").glob("splits/*.json"))) == saved
