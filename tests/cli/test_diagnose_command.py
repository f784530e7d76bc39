"""`fedskew diagnose`: what it writes, and the command that it advises."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest
import yaml

COUNTS = "hospital;pneumonia;fracture\nRome;82;3\nOslo;0;61\n"


def test_the_users_counts_are_not_overwritten(cli):
    Path("hospitals.csv").write_text(COUNTS)
    for target in ("hospitals.yaml", f"../{Path.cwd().name}/hospitals.yaml"):
        assert cli("diagnose", "hospitals.csv", "--save", target).status == 0
        assert Path("hospitals.csv").read_text() == COUNTS
        assert yaml.safe_load(Path(target).read_text())["partition"]["path"] == str(Path(target).with_suffix(".csv"))


def test_the_advised_command_repeats_the_settings(cli):
    Path("hospitals.csv").write_text(COUNTS)
    settings = ("--set", "clients_per_round=null", "--set", "data.classes=[x, y z]", "--data", "synthetic")
    advice = cli("diagnose", "hospitals.csv", *settings).out.splitlines()[-1]
    words = shlex.split(advice.partition("best here: ")[2])
    assert "clients_per_round=null" in words
    assert 'data.classes=["x", "y z"]' in words


def test_the_advised_command_accepts_every_setting(cli):
    settings = ("method=fedprox", "method.mu=0.5", "eval_every=2", "eval_local=true", "save_predictions=true", "lr=0.1")
    assigned = [word for setting in settings for word in ("--set", setting)]
    advice = cli("diagnose", "--clients", "3", *assigned).out.splitlines()[-1]
    words = shlex.split(advice.partition("best here: ")[2])
    assert words[:4] == ["fedskew", "choose", "--clients", "3"]
    assert {"eval_every=2", "lr=0.1"} < set(words)
    assert "method" not in advice.partition("best here: ")[2]
    words[words.index("--budget") + 1] = "1r"
    assert "budget is 1 round;" in cli(*words[1:]).err  # all else is accepted


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such a name")
def test_a_name_that_is_not_utf8_is_written_with_question_marks(cli):
    name = os.fsdecode(b"h\xfc")
    assert cli("diagnose", "--clients", "3", "--save", f"{name}.yaml", "-o", f"{name}.html").status == 0
    assert cli("run", "--clients", "3", "--rounds", "1", "--out", name, "-q").status == 0
    assert cli("report", name, "--no-features").status == 0
    assert "h?" in Path("report.html").read_text(encoding="utf-8")


def test_with_several_labels_the_advised_command_compares_methods_that_take_them(cli):
    rows = [f"{i % 7},{i % 3},{int(i % 4 == 0)},{int(i % 3 == 0)}" for i in range(120)]
    Path("chest.csv").write_text("\n".join(["age,sex,edema,mass", *rows]))
    options = ("--data", "chest.csv", "--set", "data.label=[edema, mass]", "--partition", "iid", "--clients", "3")
    found = cli("diagnose", *options)
    assert "fedskew choose" not in found.out  # it needs one class per sample
    words = shlex.split(found.out.splitlines()[-1].partition("best here: ")[2])
    assert words[:2] == ["fedskew", "compare"]
    assert cli(*words[1:], "--rounds", "1", "--local-epochs", "1").status == 0


def test_the_first_line_of_a_saved_configuration_is_a_command_that_works(cli):
    Path("sites.csv").write_text("site,cat,dog\nBerlin,90,40\nParis,20,70\n")
    assert cli("diagnose", "sites.csv", "--save", "in a folder/start.yaml").status == 0
    words = shlex.split(Path("in a folder/start.yaml").read_text(encoding="utf-8").splitlines()[0])
    assert words[:2] == ["#", "fedskew"]
    assert cli(*words[2:], "--rounds", "1", "-q").status == 0
