"""The reruns that ship: the same as the records in the repository, in the wheel, and as uncertain as we say."""

from __future__ import annotations

import re
import runpy
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fedskew.lab.diagnosis.advice import MARGIN
from fedskew.lab.diagnosis.reruns import SHIPPED, reruns_from_records, shipped_reruns, to_csv
from fedskew.lab.papers.map import federation_results
from fedskew.lab.sweep.records import Records, read_folder

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def records() -> Records:
    return read_folder(ROOT / "results")


def test_the_shipped_table_is_up_to_date(records: Records) -> None:
    built = to_csv(reruns_from_records(records))
    assert SHIPPED.read_text(encoding="utf-8") == built, "run: python tools/build_reruns.py"
    assert len(built) < 200_000


def test_what_is_read_is_what_was_written() -> None:
    assert to_csv(shipped_reruns()) == SHIPPED.read_text(encoding="utf-8")


def test_the_map_is_among_the_reruns(records: Records) -> None:
    (spot,) = [
        s for s in federation_results(records, [0]) if (s.dataset, s.beta, s.share) == ("fashion-mnist", 0.05, 0.1)
    ]
    (rerun,) = [
        one
        for one in shipped_reruns()
        if one.setting.label == "fashion-mnist, dirichlet 0.05, 20 clients, 2 per round" and one.method == "fedvls"
    ]
    assert rerun.gains[0] == pytest.approx(spot.gain("FedVLS"), abs=0.02), "FedVLS itself and not its loss alone"


def test_another_split_changes_a_gain_by_about_the_margin() -> None:
    gains = [one.gains for one in shipped_reruns() if len(one.gains) > 1]
    usual = [np.std(by_seed, ddof=1) for by_seed in gains if abs(np.mean(by_seed)) < 15]
    assert len(usual) > 50
    assert np.sqrt(np.mean(np.square(usual))) == pytest.approx(MARGIN, abs=0.5)


def test_the_wheel_has_the_reruns(tmp_path: Path) -> None:
    builder = pytest.importorskip("hatchling.builders.wheel")
    (wheel,) = builder.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read("fedskew/lab/diagnosis/reruns.csv")
    assert content == SHIPPED.read_bytes()


def test_the_readme_s_numbers_are_measured(records: Records) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    tool = runpy.run_path(str(ROOT / "tools" / "build_reruns.py"))
    rerun, confirmed, _, refuted, large, *_ = re.findall(r"\d+", tool["outcomes_of_printed_gains"]())
    assert f"**{refuted} of {rerun}**" in readme
    assert f"{confirmed} were confirmed. Only {large} of the {refuted} changed from at least +1 to" in readme
    paper = (ROOT / "paper.md").read_text(encoding="utf-8")
    assert f"reran {rerun} printed gains over FedAvg, mostly with one seed: {confirmed} were confirmed" in paper
    assert f"and {refuted} changed sign, {large} of these" in paper
    shown = [one for one in federation_results(records, [0, 1]) if (one.dataset, one.beta) == ("fashion-mnist", 0.05)]
    gains = {one.share: one.gain("FedVLS") or 0 for one in shown}
    assert f"**{gains[0.1]:+.0f} and {gains[1.0]:+.0f} points**".replace("-", "−") in readme


def test_the_readme_s_picture_is_drawn_from_the_records(tmp_path: Path) -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "draw_participation.py"))
    tool["main"](tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert tool["class_accuracy"](read_folder(ROOT / "results")).shape == (4, 10)
