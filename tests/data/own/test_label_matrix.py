"""Labels as a matrix of 0 and 1, from every form of data, and regression, which is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from findings import FINDINGS, findings, findings_file

import fedskew as fs
from fedskew.errors import UserError


def table() -> pd.DataFrame:
    x, y = findings()
    return pd.DataFrame({f"value {c}": x[:, c] for c in range(6)} | {name: y[:, c] for c, name in enumerate(FINDINGS)})


def forms(folder: Path) -> dict[str, tuple[Any, dict[str, Any]]]:
    x, y = findings()
    table().to_csv(folder / "findings.csv", index=False)
    items = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
    named = {"classes": list(FINDINGS)}
    return {
        "arrays": ((x, y), named),
        "lists": ((x.tolist(), y.tolist()), named),
        "tensors": ((torch.tensor(x), torch.tensor(y)), named),
        "booleans": ((x, y.astype(bool)), named),
        "torch Dataset": (items, named),
        "DataFrame": (table(), {"label": list(FINDINGS)}),
        "CSV": (str(folder / "findings.csv"), {"label": list(FINDINGS)}),
        "npz": (str(findings_file(folder)), {}),
        "fields": (({"values": x.astype(np.float32)}, y), named),
    }


@pytest.mark.parametrize(
    "form", ["arrays", "lists", "tensors", "booleans", "torch Dataset", "DataFrame", "CSV", "npz", "fields"]
)
def test_every_form_of_data_may_have_several_labels(form: str, tmp_path: Path) -> None:
    data, options = forms(tmp_path)[form]
    dataset = fs.load(data, **options)
    assert dataset.classes == FINDINGS
    assert dataset.task.name == "multi-label"
    assert dataset.train.y.shape == (len(dataset.train), 4)
    _, y = findings()
    assert (dataset.train.y.sum(axis=0) + dataset.test.y.sum(axis=0)).tolist() == y.sum(axis=0).tolist()
    assert dataset.train.y.dtype == np.int64


def test_the_labels_are_no_inputs(tmp_path: Path) -> None:
    assert fs.load(table(), label=list(FINDINGS)).columns == tuple(f"value {c}" for c in range(6))


X, Y = findings(40)


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (
            Y * 2,
            "label 2 in row .*; several columns of labels must be 0 or 1, because fedskew does classification only",
        ),
        (X[:, :3], "must be 0 or 1, because fedskew does classification only"),
        (np.where(Y, np.nan, 0.0), "no label in row"),
        (Y[:, :, None], r"labels have shape \(40, 4, 1\)"),
        (Y[:30], "40 inputs but 30 labels"),
        (np.eye(4, dtype=int)[Y.argmax(axis=1)], r"every row has exactly one 1.*such as y.argmax\(axis=1\)"),
        (Y.astype(str), "expected 0 or 1|no label"),
        (np.arange(40), "40 different numbers in 40 labels look like measurements; .* only, not regression"),
        (X[:, 0], "expected a whole number or a name, because fedskew does classification only, not regression"),
    ],
)
def test_other_matrices_and_regression_are_one_line(y: np.ndarray, message: str) -> None:
    if y.dtype.kind == "U":
        y = np.where(y == "1", "yes", "no")
        message = "several columns of labels that are not numbers; expected 0 or 1"
    with pytest.raises(UserError, match=message) as error:
        fs.load((X, y))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("cell", [np.array, list, torch.tensor])
def test_a_column_may_have_all_labels_of_a_sample_in_one_cell(cell: Any) -> None:
    labels = pd.Series([cell(row) for row in Y.tolist()])
    for data in ((pd.DataFrame(X), labels), (X, labels.to_numpy())):
        dataset = fs.load(data, classes=list(FINDINGS))
        assert dataset.task.name == "multi-label"
        assert (dataset.train.y.sum(axis=0) + dataset.test.y.sum(axis=0)).tolist() == Y.sum(axis=0).tolist()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((2 * Y).tolist(), "label 2 in row .*; several columns of labels must be 0 or 1"),
        ([["ill", "well"]] * 40, "several columns of labels that are not numbers; expected 0 or 1"),
        ([[1, 0], [1]] * 20, "labels of unequal length; expected one label per sample, or a matrix"),
        ([(1, 0), 1] * 20, "labels of unequal length; expected one label per sample, or a matrix"),
    ],
)
def test_bad_labels_in_one_cell_are_one_line(rows: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        fs.load((pd.DataFrame(X), pd.Series(rows)))


def test_names_must_fit_the_columns() -> None:
    with pytest.raises(UserError, match="4 columns of labels, but classes lists a, b; expected a different name"):
        fs.load((X, Y), classes=["a", "b"])
    with pytest.raises(UserError, match="columns of labels; expected the same number"):
        fs.load((X, Y), test=(X, Y[:, :3]))
    with pytest.raises(UserError, match="one class per sample in one part and several labels in the other"):
        fs.load((X, Y), test=(X, Y[:, 0]))
    with pytest.raises(UserError, match=r"column to read as a label.*did you mean 'cough'"):
        fs.load(table(), label=["caugh", "fever"])
    with pytest.raises(UserError, match=r"expected one column's name, or a list of several columns"):
        fs.load(table(), label=["cough"])
    named = table().rename(columns={"value 0": "labels"})
    with pytest.raises(UserError, match=r"the table has another column of that name; give it another name with rename"):
        fs.load(named, label=list(FINDINGS))
    assert fs.load(named, label=list(FINDINGS), rename={"labels": "value 0"}).columns[0] == "value 0"
    assert fs.load((X, Y)).classes == ("0", "1", "2", "3")
