"""An exported table model takes the table's own columns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import fedskew as fs
from fedskew.data.own.columns import GAPS
from fedskew.export import export_run
from fedskew.export.rows import Rows

RANDOM = np.random.default_rng(0)
Y = np.arange(150) % 3
FRAME = pd.DataFrame(
    {
        "age": (40 + 9 * Y + RANDOM.normal(0, 5, 150)).round(1),
        "sex": np.array(["f", "m"])[RANDOM.integers(0, 2, 150)],
        "lactate": np.where(RANDOM.random(150) < 0.2, np.nan, (Y + RANDOM.normal(0, 0.3, 150)).round(2)),
        "code": RANDOM.integers(1, 4, 150),
        "ward": [None if i % 10 == 0 else "ab"[i % 2] for i in range(150)],
        "ill": np.array(["no", "yes", "dead"])[Y],
    }
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    fed = fs.federation(FRAME, fs.IID(clients=3), label="ill", categorical=["code"], test=FRAME)
    fs.run(fed, "fedavg", rounds=2, out=folder / "run", device="cpu")
    export_run(folder / "run", folder / "model")
    torch.save(torch.from_numpy(fed.dataset.test.x), folder / "expected.pt")
    return folder


def test_rows_make_the_inputs_that_training_made(exported: Path) -> None:
    form = json.loads((exported / "model" / "model.json").read_text())["inputs"]
    made = Rows(form["encoding"])(FRAME.to_dict("records"))
    mean, std = torch.tensor(form["scaling"], dtype=torch.float64).T
    expected = torch.load(exported / "expected.pt", weights_only=True)
    torch.testing.assert_close(((made - mean) / std).float(), expected, rtol=0, atol=0)


def test_no_rows_make_no_inputs(exported: Path) -> None:
    form = json.loads((exported / "model" / "model.json").read_text())["inputs"]
    assert Rows(form["encoding"])([]).shape == (0, *form["shape"])


def test_the_gap_of_pandas_is_one() -> None:
    columns = [{"name": "age", "mean": 61.0}, {"name": "sex", "categories": ["f", "m"], "marks_gaps": True}]
    assert Rows(columns)([{"age": pd.NA, "sex": pd.NA}]).tolist() == [[61.0, 0.0, 0.0, 1.0]]


@pytest.mark.parametrize("text", [*GAPS, "NaN", " N/A "])
def test_a_text_that_was_a_gap_in_training_is_one(text: str) -> None:
    columns = [{"name": "age", "mean": 61.0, "marks_gaps": True}, {"name": "sex", "categories": ["f", "NaN"]}]
    assert Rows(columns)([{"age": text, "sex": "NaN"}]).tolist() == [[61.0, 1.0, 0.0, 1.0]]


SCRIPT = """
import json, sys
from model import classes, load, rows
table = json.load(open("rows.json"))
print(json.dumps([classes()[c] for c in load()(rows()(table)).argmax(1)]))
print([name for name in sys.modules if name.startswith("fedskew")])
"""


def test_the_exported_code_predicts_from_a_table_without_fedskew(exported: Path) -> None:
    table = json.loads(FRAME.drop(columns="ill").to_json(orient="records"))
    (exported / "model" / "rows.json").write_text(json.dumps(table))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=exported / "model", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    predicted, imported = done.stdout.splitlines()
    assert imported == "[]"
    run = fs.load_run(exported / "run")
    right = np.mean(np.array(json.loads(predicted)) == FRAME["ill"].to_numpy())
    assert right == pytest.approx(run.accuracy)


def test_the_card_describes_the_columns(exported: Path) -> None:
    card = (exported / "model" / "README.md").read_text()
    assert "| code | category: 1, 2, 3 | not marked |" in card
    assert "| ward | category: a, b | marked by a further input |" in card
    assert 'inputs = rows()([{"age": ' in card


def test_unknown_categories_gaps_and_lacking_columns() -> None:
    rows = Rows([{"name": "age", "mean": 60.0, "std": 2.0}, {"name": "sex", "categories": ["f"], "marks_gaps": True}])
    made = rows([{"age": None, "sex": "x"}, {"age": 3, "sex": float("nan")}, {"age": "4", "sex": " f "}])
    assert made.tolist() == [[60, 0, 0], [3, 0, 1], [4, 1, 0]]
    with pytest.raises(ValueError, match="a row has no column 'sex'"):
        rows([{"age": 3}])


@pytest.mark.parametrize("spellings", [("False", "True"), ("false", "true"), ("0", "1")])
def test_booleans_are_the_categories_of_any_spelling(spellings: tuple[str, str]) -> None:
    rows = Rows([{"name": "smoker", "categories": list(spellings)}])
    values = (True, "TRUE", " true ", 1, 1.0, "1", False, 0)
    assert rows([{"smoker": value} for value in values]).tolist() == [[0, 1]] * 6 + [[1, 0]] * 2
    both = Rows([{"name": "smoker", "categories": ["0", "1", "False", "True"]}])
    assert both([{"smoker": value} for value in (True, 1)]).tolist() == [[0, 0, 0, 1], [0, 1, 0, 0]]


def test_categories_in_another_spelling_are_those_of_training() -> None:
    rows = Rows([{"name": "start", "categories": ["fr\u00fcher", "1", "2.0"]}])
    made = rows([{"start": text} for text in ("fru\u0308her", "fr\u00fcher", "1.0", "2.0", 1.0, "3.0")])
    assert made.int().tolist() == [[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 1, 0], [0, 0, 0]]
