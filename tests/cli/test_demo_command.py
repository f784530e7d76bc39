"""`fedskew demo`, with few rounds."""

from __future__ import annotations

import shlex
from pathlib import Path

from fedskew.cli.demo import next_commands
from fedskew.errors import UserError

DEMO = ("demo", "--seeds", "1", "--rounds", "1")


def test_the_demo_shows_keeps_and_reuses(cli):
    first = cli(*DEMO)
    assert first.status == 0
    for word in ("fedavg", "fedvls", "classes lost", "runs/demo/demo.png", "runs/demo/demo.yaml"):
        assert word in first.out
    assert max(map(len, first.out.splitlines())) <= 80
    assert Path("runs/demo/demo.png").read_bytes().startswith(b"\x89PNG")
    runs = {path for path in Path("runs/demo").iterdir() if path.is_dir()}
    assert len(runs) == 5

    second = cli(*DEMO, "--quiet")
    assert second.err.count("already finished") == 5
    assert second.out == first.out

    Path("runs/demo/mine.txt").write_text("not the demo's")
    third = cli(*DEMO, "--fresh", "--quiet")
    assert third.err == ""
    assert Path("runs/demo/mine.txt").is_file()


def test_an_earlier_figure_is_not_shown_if_drawing_fails(cli, monkeypatch):
    def fails(comparison, target):
        raise UserError("no matplotlib")

    cli(*DEMO)
    monkeypatch.setattr("fedskew.report.comparison_figure.save_comparison", fails)
    again = cli(*DEMO)
    assert "no figure: no matplotlib" in again.err
    assert "figure:" not in again.out


def test_what_to_try_next_works_even_with_a_space_in_the_path(cli):
    assert cli("demo", "--seeds", "1", "--rounds", "1", "--out", "a demo", "--quiet").status == 0
    for command in next_commands(Path("a demo/demo.yaml")):
        program, *arguments = shlex.split(command)
        assert program == "fedskew"
        if "compare" in arguments:
            arguments += ["--rounds", "1", "--quiet"]
        assert cli(*arguments).status == 0


def test_the_demos_settings_are_those_of_compare(cli):
    told = cli(*DEMO, "--json").json
    again = cli("compare", "-c", "runs/demo/demo.yaml", "--seeds", "1", "--rounds", "1", "--json", "--out", "runs/demo")
    assert again.err.count("already finished") == 5
    assert again.json == told


def test_changed_settings_are_kept(cli):
    settings = Path("runs/demo/demo.yaml")
    settings.parent.mkdir(parents=True)
    settings.write_text("lr: 0.07\n")
    outcome = cli(*DEMO)
    assert outcome.status == 2
    assert "to run it: fedskew compare -c runs/demo/demo.yaml" in outcome.err
    assert settings.read_text() == "lr: 0.07\n"
