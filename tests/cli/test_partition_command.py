"""`fedskew partition`."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fedskew as fs
from fedskew.report.sections.federation import federation
from fedskew.results import compare_runs


def test_json_has_counts_and_groups(cli):
    told = cli("partition", "--partition", "labels", "--labels-per-client", "3", "--clients", "10", "--json").json
    counts = np.array(told["label_counts"])
    assert counts.shape == (10, 10)
    assert counts.sum() == told["samples"] == 1438
    for group, row in zip(told["groups"], counts, strict=True):
        assert group["vacant"] == np.flatnonzero(row == 0).tolist()
        assert sorted(group["vacant"] + group["minority"] + group["majority"]) == list(range(10))
    assert told["mean_vacant"] == 7


def test_the_map_and_the_classes_of_the_first_clients(cli):
    outcome = cli("partition", "--clients", "30", "--beta", "0.5")
    assert outcome.status == 0
    assert "only the first 20 clients are listed" in outcome.out
    assert "30 clients, 1438 samples used, 0 unused" in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 80
    assert "are listed" not in cli("partition", "--clients", "30", "--beta", "0.5", "--all").out


def test_a_saved_split_and_saved_counts_are_read_again(cli):
    first = cli("partition", "--partition", "shards", "--seed", "7", "--save", "split.json", "--save", "counts.csv",
                "--save", "map.png", "--json").json  # fmt: skip
    assert Path("map.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(Path("split.json").read_text())["hash"] == first["hash"]
    again = cli("partition", "--partition", "saved", "--set", "partition.path=split.json", "--json").json
    assert again["hash"] == first["hash"]
    counted = cli("partition", "--partition", "counts", "--set", "partition.path=counts.csv", "--json").json
    assert counted["label_counts"] == first["label_counts"]


READ_ONLY = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
SAVE_EACH = "import sys; from fedskew.cli import main; print([main(['partition', '--save', f]) for f in sys.argv[1:]])"


def test_a_read_only_disk_is_one_line(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o ro none {tmp_path}"
    if shutil.which("unshare") is None or subprocess.run([*READ_ONLY, mount], capture_output=True).returncode:
        pytest.skip("this machine does not let users mount a file system")
    files = [str(tmp_path / f"split.{kind}") for kind in ("json", "csv", "png")]
    command = shlex.join([sys.executable, "-c", SAVE_EACH, *files])
    done = subprocess.run([*READ_ONLY, f"{mount} && {command}"], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[2, 2, 2]"
    assert done.stderr.splitlines() == [f"error: cannot write {file}: Read-only file system" for file in files]


def test_the_seed_decides_the_split(cli):
    hashes = [cli("partition", "--seed", seed, "--json").json["hash"] for seed in ("0", "1", "0")]
    assert hashes[0] == hashes[2] != hashes[1]


def test_the_split_is_that_of_a_run(cli):
    split = cli("partition", "--clients", "5", "--beta", "0.5", "--seed", "3", "--json").json["hash"]
    run = cli("run", "--clients", "5", "--beta", "0.5", "--seed", "3", "--rounds", "1", "--local-epochs", "1", "--json")
    assert run.json["split"] == split


def test_sites_keep_their_names_in_every_table_and_file(cli):
    Path("sites.csv").write_text("hospital,flu,cold,gout\nRome,300,4,0\nOslo,50,0,700\nBonn,0,90,20\n")
    split = ("partition", "--partition", "counts", "--set", "partition.path=sites.csv")
    shown = cli(*split, "--save", "map.csv", "--save", "map.svg")
    assert shown.out.count("Rome") == 2, "in the map and in the table of classes"
    text = " ".join(shown.out.split())
    assert "classes of digits stand in for yours: flu = 0, cold = 1, gout = 2" in text
    assert "counts scaled by 0.197, because digits has fewer samples" in text
    assert Path("map.csv").read_text().splitlines()[1].startswith("Rome,")
    assert "Oslo" in Path("map.svg").read_text(encoding="utf-8")
    assert [group["name"] for group in cli(*split, "--json").json["groups"]] == ["Rome", "Oslo", "Bonn"]


def test_sites_keep_their_names_in_the_report(cli):
    Path("sites.csv").write_text("hospital,flu,cold\nRome,30,4\nOslo,5,60\n")
    split = ("--data", "synthetic", "--partition", "counts", "--set", "partition.path=sites.csv")
    outcome = cli("run", *split, "--rounds", "1", "--local-epochs", "1", "-q")
    assert "stand in for yours: flu = 0, cold = 1" in " ".join(outcome.err.split())
    (folder,) = Path("runs").iterdir()
    run = fs.load_run(folder)
    assert run.client_labels == ("Rome", "Oslo")
    section = federation(compare_runs([run]))
    assert [row[0] for row in section.tables[0].rows] == ["Rome", "Oslo"]
    assert list(section.figures[0].charts[0].columns) == ["Rome", "Oslo"]
