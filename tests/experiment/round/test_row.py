"""Rows on disk keep their keys; rows from other versions stay readable."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import fedskew as fs
from fedskew.experiment.round.record import RoundRow
from fedskew.experiment.storage.run_folder import RoundsFile
from fedskew.metrics.confusion import Evaluation

LATER = [
    "round", "stage", "model", "model_round", "clients", "lr", "loss", "diverged", "visits", "tally", "compute",
    "notes", "bytes", "evaluation", "time", "seconds",
]  # fmt: skip


def test_a_row_on_disk_has_the_keys_that_readers_know_and_comes_back_the_same(tmp_path: Path) -> None:
    federation = fs.federation("digits", fs.Dirichlet(clients=4, beta=0.5), seed=0)
    result = fs.run(federation, "fedavg", rounds=2, local_epochs=1, eval_every=2, out=tmp_path)
    lines = (tmp_path / "rounds.jsonl").read_text().splitlines()
    keys = [list(json.loads(line)) for line in lines]
    assert keys == [["round", "evaluation", "seconds"], [key for key in LATER if key != "evaluation"], LATER]
    assert [RoundRow.from_json(json.loads(line)) for line in lines] == result.history
    assert [json.dumps(row.to_json(), separators=(",", ":")) for row in result.history] == lines


def test_what_an_older_version_did_not_record_has_a_default_and_what_a_newer_one_adds_is_ignored() -> None:
    row = RoundRow.from_json({"round": 3, "loss": None, "colour": "red"})
    assert row == RoundRow(round=3)
    assert (row.is_global, row.bytes_moved, row.diverged, row.time) == (True, 0, [], {})


def test_only_evaluations_of_the_global_model_count() -> None:
    tested = Evaluation(np.eye(2))
    assert RoundRow(round=1, evaluation=tested).is_evaluated
    assert not RoundRow(round=1).is_evaluated
    assert not RoundRow(round=1, model="expert.0", evaluation=tested).is_evaluated
    with pytest.raises(ValueError, match="round 1 was not evaluated"):
        _ = RoundRow(round=1).accuracy


@pytest.mark.parametrize(
    "damaged", ['{"round": 2, "evaluation": {}}', '{"round": true}', '{"round": 2, "evaluation": 1}']
)
def test_a_row_that_cannot_be_read_ends_the_history(damaged: str, tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_text(f'{{"round": 1}}\n{damaged}\n')
    rows, problem = RoundsFile(path).read()
    assert rows == [RoundRow(round=1)]
    assert problem is not None
    assert "damaged in line 2" in problem
