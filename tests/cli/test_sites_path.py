"""The README's path for sites: a CSV of counts, `diagnose`, `choose`, and the chosen configuration runs."""

from __future__ import annotations

from pathlib import Path

from doc_blocks import blocks

import fedskew as fs

README = Path(__file__).parents[2] / "README.md"
QUICK = (
    "--methods",
    "fedprox,fedvls",
    "--rounds",
    "2",
    "--local-epochs",
    "1",
    "--budget",
    "30r",
    "--out",
    "race",
    "--workers",
    "1",
)
"""What makes the race short."""


def test_from_counts_to_a_chosen_method(cli):
    read = list(blocks(README))
    (table,) = [block for block in read if block.file == "hospitals.csv"]
    commands = [command for block in read for command in block.commands]
    (diagnose,) = [command for command in commands if command[0] == "diagnose"]
    (choose,) = [command for command in commands if command[0] == "choose"]
    Path("hospitals.csv").write_text(table.text, encoding="utf-8")

    diagnosed = cli(*diagnose)
    assert diagnosed.status == 0
    race = choose[: choose.index("--budget")]
    assert f"fedskew {' '.join(race)}" in diagnosed.out, "diagnose prints the command that the README goes on with"

    chosen = cli(*race, *QUICK)
    assert chosen.status == 0, chosen.err
    assert "Use fed" in chosen.out
    assert cli("run", "-c", "race/chosen.yaml", "--out", "trained", "-q").status == 0
    run = fs.load_run("trained")
    assert run.client_labels == ("Rome", "Oslo", "Bonn")
    assert run.classes == ("pneumonia", "fracture", "stroke", "migraine")
    assert run.label_counts is not None
    assert run.label_counts.tolist() == [[820, 35, 0, 0], [0, 610, 12, 0], [4, 0, 390, 150]]


def test_choose_says_what_was_scaled(cli):
    Path("sites.csv").write_text("site,flu,cold\nRome,3000,40\nOslo,50,6000\n")
    split = ("--data", "digits", "--partition", "counts", "--set", "partition.path=sites.csv")
    outcome = cli("choose", *split, *QUICK)
    assert outcome.status == 0, outcome.err
    told = " ".join(outcome.err.split())
    assert "classes of digits stand in for yours: flu = 0, cold = 1" in told
    assert "counts scaled by 0.0" in told
