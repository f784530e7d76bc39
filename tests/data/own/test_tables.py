"""A user's own CSV or Parquet table, with numbers, text or images."""

from __future__ import annotations

import lzma
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from own_data import encoded

from fedskew.data import Column, federation, load
from fedskew.data.own.columns import spell_booleans
from fedskew.data.own.labels import ClassesElsewhere
from fedskew.data.table_encoding import Strings
from fedskew.errors import UserError


def csv_file(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


IRIS = "width,height,label\n" + "".join(f"{i},{i * 0.5},{'ab'[i % 2]}\n" for i in range(10))


@pytest.mark.parametrize("packed", [False, True])
def test_a_csv_of_numbers_is_a_table(tmp_path: Path, packed: bool) -> None:
    path = csv_file(tmp_path / "iris.csv", IRIS)
    if packed:
        path = tmp_path / "iris.csv.xz"
        path.write_bytes(lzma.compress(IRIS.encode()))
    data = load(path)
    assert (data.kind, data.classes, data.input_shape) == ("table", ("a", "b"), (2,))
    assert data.columns == ("width", "height")
    assert (len(data.train), len(data.test)) == (8, 2)
    np.testing.assert_allclose(data.train.x[:, 0], data.train.x[:, 1], rtol=1e-6)


def test_the_label_column_is_told_or_found_by_its_usual_names(tmp_path: Path) -> None:
    assert load(csv_file(tmp_path / "1.csv", IRIS.replace("label", "Target"))).classes == ("a", "b")
    path = csv_file(tmp_path / "2.csv", IRIS.replace("label", "species"))
    assert load(path, label="species").classes == ("a", "b")
    with pytest.raises(UserError, match=r"label=NAME; columns: width, height, species"):
        load(path)
    with pytest.raises(UserError, match="'specis'; did you mean 'species'"):
        load(path, label="specis")


def test_numeric_labels_of_a_csv_are_sorted_as_numbers(tmp_path: Path) -> None:
    rows = "".join(f"{i},{(2, 10)[i % 2]}\n" for i in range(10))
    assert load(csv_file(tmp_path / "n.csv", "a,y\n" + rows)).classes == ("2", "10")


def test_labels_may_be_names_that_mostly_look_like_numbers(tmp_path: Path) -> None:
    rows = "".join(f"{i / 2},{('1', '2', 'other')[i % 3]}\n" for i in range(30))
    assert load(csv_file(tmp_path / "n.csv", "a,kind\n" + rows), label="kind").classes == ("1", "2", "other")


def test_a_column_of_strings_is_text(tmp_path: Path) -> None:
    rows = "".join(f'"some words, {i}","{"ab"[i % 2]}"\n' for i in range(10))
    data = load(csv_file(tmp_path / "t.csv", "review,label\n" + rows), length=4)
    assert (data.kind, data.input_shape) == ("text", (4,))
    assert data.train.x[:, :2].tolist() == [[2, 3]] * 8
    rows = "".join(f'{i},"some words","{"ab"[i % 2]}"\n' for i in range(10))
    path = csv_file(tmp_path / "u.csv", "id,review,label\n" + rows)
    assert load(path).kind == "table"  # beside another column, a text is a category
    assert load(path, text="review").kind == "text"
    with pytest.raises(UserError, match="'revue'; did you mean 'review'"):
        load(path, text="revue")


def test_a_folder_with_train_and_test_tables_is_the_split(tmp_path: Path) -> None:
    csv_file(tmp_path / "train.csv", IRIS)
    csv_file(tmp_path / "test.csv", "label,height,width\na,1,2\n")  # in another order
    data = load(tmp_path)
    assert (len(data.train), len(data.test)) == (10, 1)
    np.testing.assert_allclose(data.test.x[0], (np.array([2, 1]) - [4.5, 2.25]) / [8.25**0.5, 8.25**0.5 / 2], rtol=1e-6)
    csv_file(tmp_path / "test.csv", "label,height\na,1\n")
    with pytest.raises(UserError, match=r"test.csv: no column 'width', but the training data has one"):
        load(tmp_path)
    csv_file(tmp_path / "test.csv", "label,height,width\na,1,2\nb,2,3\nb,2,wide\n")
    with pytest.raises(UserError, match=r"test.csv: 'wide' in column 'width', line 4; expected a number"):
        load(tmp_path)


def test_the_two_tables_of_a_folder_may_have_different_formats(tmp_path: Path) -> None:
    csv_file(tmp_path / "train.csv", IRIS)
    pd.DataFrame({"label": ["a"], "height": [1], "width": [2]}).to_parquet(tmp_path / "test.parquet")
    data = load(tmp_path)
    assert (len(data.train), len(data.test)) == (10, 1)


@pytest.mark.parametrize("name", ["val.csv", "valid.csv.gz", "validation.parquet"])
def test_the_test_table_of_a_folder_may_have_any_name_of_a_test_part(tmp_path: Path, name: str) -> None:
    csv_file(tmp_path / "train.csv", IRIS)
    table = pd.DataFrame({"label": ["a"], "height": [1], "width": [2]})
    table.to_parquet(tmp_path / name) if name.endswith("parquet") else table.to_csv(tmp_path / name, index=False)
    assert len(load(tmp_path).test) == 1
    csv_file(tmp_path / "test.csv", IRIS)
    assert len(load(tmp_path).test) == 10  # test.csv comes first


@pytest.mark.parametrize("name", ["IRIS.CSV", "Iris.Csv.GZ", "IRIS.PARQUET"])
def test_the_suffix_of_a_table_may_be_in_upper_case(tmp_path: Path, name: str) -> None:
    path = csv_file(tmp_path / "iris.csv", IRIS)
    table = pd.read_csv(path)
    if name.endswith("PARQUET"):
        table.to_parquet(tmp_path / name)
    else:
        table.to_csv(tmp_path / name, index=False, compression="gzip" if name.endswith("GZ") else None)
    np.testing.assert_array_equal(load(tmp_path / name).train.x, load(path).train.x)


def test_columns_with_numbers_as_names_are_chosen_by_number(tmp_path: Path) -> None:
    table = pd.DataFrame({i: [(row * (i + 1)) % 7 for row in range(40)] for i in range(4)} | {4: ["a", "b"] * 20})
    csv_file(tmp_path / "numbered.csv", table.to_csv(index=False))
    for data in (table, tmp_path / "numbered.csv"):
        options = {"label": 4, "site": 3, "drop": [0], "categorical": 2, "rename": {1: "age"}}
        found = load(data, **options)
        assert found.columns == ("age", *(f"2={value}" for value in range(7)))
        assert (found.classes, found.site_column) == (("a", "b"), "3")
    assert federation(table, Column(3), label=4).clients == 7
    assert federation(table, Column(np.int64(3)), label=4).clients == 7


def test_the_test_table_may_be_at_another_path(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("a;y\n" + "1;x\n2;z\n" * 5)
    (tmp_path / "other.csv").write_text("a;y\n3;z\n")
    data = load(tmp_path / "train.csv", test=str(tmp_path / "other.csv"), delimiter=";")
    assert (len(data.train), data.test.y.tolist(), data.classes) == (10, [1], ("x", "z"))
    assert data.described["test"] == str(tmp_path / "other.csv")
    table = {"a": [3.0], "y": ["z"]}
    pq.write_table(pa.table(table), tmp_path / "other.parquet")
    assert load(tmp_path / "train.csv", test=tmp_path / "other.parquet").test.y.tolist() == [1]
    (tmp_path / "note.txt").write_text("a")
    both = tmp_path / "both"
    both.mkdir()
    for name in ("train.csv", "test.csv"):
        (both / name).write_text((tmp_path / "train.csv").read_text())
    for name, test, problem in (
        ("train.csv", "absent.csv", "absent.csv', which does not exist; expected a path like"),
        ("train.csv", "note.txt", "note.txt'; expected a table like"),
        ("train.csv", both, "which has two parts; expected one table"),
        ("train.csv", table, "test is of type dict; expected a path"),
        ("both", "train.csv", "both has a test part; leave out test"),
    ):
        with pytest.raises(UserError, match=re.escape(problem)):
            load(tmp_path / name, test=tmp_path / test if isinstance(test, str) else test)


def test_the_option_test_replaces_a_validation_table(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name, rows in (("data/train.csv", "1,x\n2,z\n" * 5), ("data/val.csv", "3,x\n"), ("other.csv", "4,z\n" * 2)):
        (tmp_path / name).write_text(f"a,y\n{rows}")
    assert len(load(folder).test) == 1
    assert len(load(folder, test=tmp_path / "other.csv").test) == 2
    assert len(load(folder, test=folder / "val.csv").test) == 1


def test_options_of_csv_files_are_refused_for_parquet(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1.0, 2.0], "y": ["x", "z"]}), tmp_path / "t.parquet")
    for option, value in (("delimiter", ";"), ("decimal", ",")):
        problem = f"{option} is {value!r}, but .*t.parquet is not a CSV file; leave out {option}"
        with pytest.raises(UserError, match=problem):
            load(tmp_path / "t.parquet", **{option: value})


def test_booleans_are_the_same_classes_from_every_source(tmp_path: Path) -> None:
    truth = [True, True, False] * 4
    frame = pd.DataFrame({"a": np.arange(12.0), "y": truth})
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_parquet(tmp_path / "t.parquet")
    sources = [tmp_path / "t.csv", tmp_path / "t.parquet", frame, frame.astype({"y": "boolean"})]
    sources += [frame.astype({"y": object}), (frame[["a"]].to_numpy(), np.array(truth)), (frame[["a"]], truth)]
    expected = load((frame[["a"]].to_numpy(), np.array(truth, int))).train.y
    for source in sources:
        data = load(source)
        listed = load(source, classes=["benign", "malignant"])  # as positions
        at_site = load(source, classes=ClassesElsewhere(("0", "1")))  # the agreement of an earlier version
        assert (data.classes, listed.classes, at_site.classes) == (
            ("False", "True"),
            ("benign", "malignant"),
            ("0", "1"),
        )
        for loaded in (data, listed, at_site):
            assert np.array_equal(loaded.train.y, expected)
        assert np.bincount(load(source, classes=["True", "False"]).train.y).tolist() == [6, 3]  # True is the first


def test_one_boolean_among_many_texts_takes_no_longer() -> None:
    compared = 0

    class Text(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    texts = tuple(map(Text, (*map(str, range(1000)), "true")))
    assert spell_booleans(Strings(texts, np.arange(1001))).values == (*texts[:-1], "True")
    assert compared < 20_000


def test_booleans_in_one_part_go_with_names_or_numbers_in_the_other(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("a,y\n1,True\n2,False\n3,unknown\n")
    (tmp_path / "test.csv").write_text("a,y\n1,True\n2,False\n")
    data = load(tmp_path)
    assert (data.classes, data.test.y.tolist()) == (("False", "True", "unknown"), [1, 0])
    x = np.arange(4.0)[:, None]
    assert load((x, [0, 1, 1, 0]), test=(x, [False, True, True, True])).test.y.tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (IRIS.replace("3,1.5", "x,1.5"), r"own.csv: 'x' in column 'width', line 5; expected a number"),
        (IRIS.replace("3,1.5", "inf,1.5"), r"own.csv: infinite value in column 'width', line 5"),
        (IRIS.replace("3,1.5", "3,1.5,1"), r"line 5 has 4 cells; expected 3"),
        (IRIS.replace("2.5,b", "2.5,"), r"no label in line 7"),
        (IRIS.replace("height", "width"), r"column 'width' appears twice"),
        ("a,label\n", r"no rows"),
        ("", r"no rows"),
        ("label\na\nb\n", r"no column besides the label 'label'"),
    ],
)
def test_a_bad_cell_is_named_with_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        load(csv_file(tmp_path / "own.csv", text))


def test_parquet_columns_keep_their_types(tmp_path: Path) -> None:
    table = pa.table(
        {
            "a": pa.array(range(10), pa.int16()),
            "b": pa.array([[i, -i] for i in range(10)], pa.list_(pa.float32())),
            "label": pa.array(["x", "y"] * 5).dictionary_encode(),
        }
    )
    pq.write_table(table, tmp_path / "own.parquet")
    data = load(tmp_path / "own.parquet")
    assert (data.kind, data.classes, data.input_shape) == ("table", ("x", "y"), (3,))
    np.testing.assert_allclose(data.train.x[:, 1], -data.train.x[:, 2], rtol=1e-6)


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ({"a": [1.0, 2.0, float("inf")], "y": [0, 1, 0]}, r"infinite value in column 'a', row 2"),
        ({"a": [[1], [2, 3], [4]], "y": [0, 1, 0]}, r"unequal length in column 'a', row 1"),
        ({"a": [[[1, 2]], [[3, 4]], [[5]]], "y": [0, 1, 0]}, r"unequal length in column 'a', row 2"),
        ({"a": pa.array([1, 2, 3], pa.timestamp("s")), "y": [0, 1, 0]}, r"column 'a' holds dates or times"),
    ],
)
def test_a_bad_parquet_value_is_named(tmp_path: Path, columns: dict[str, Any], complaint: str) -> None:
    pq.write_table(pa.table(columns), tmp_path / "own.parquet")
    with pytest.raises(UserError, match=complaint):
        load(tmp_path / "own.parquet")


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.parquet").write_bytes(b"hello")
    with pytest.raises(UserError, match=r"own.parquet: cannot be read"):
        load(tmp_path / "own.parquet")


def test_an_unreadable_image_in_a_table_is_named_by_row(tmp_path: Path) -> None:
    files = [encoded(i) for i in range(9)] + [b"broken"]
    pq.write_table(pa.table({"image": pa.array(files, pa.binary()), "label": [0, 1] * 5}), tmp_path / "own.parquet")
    with pytest.raises(UserError, match=r"own.parquet row 9: unreadable image"):
        load(tmp_path / "own.parquet")


HOSPITAL = """Nummer,Alter,Puls,Notiz,Diagnose
7,40,70,ok,well
8,50,80,ok,ill
9,60,90,ok,well
10,70,60,ok,ill
"""


@pytest.fixture
def hospital(tmp_path: Path) -> Path:
    (tmp_path / "hospital.csv").write_text(HOSPITAL)
    return tmp_path / "hospital.csv"


def test_columns_are_renamed_chosen_and_dropped(hospital: Path) -> None:
    names = {"Alter": "age", "Puls": "pulse", "Diagnose": "diagnosis"}
    chosen = load(str(hospital), rename=names, columns=["pulse", "age"], label="diagnosis", test_fraction=0.5)
    assert chosen.columns == ("pulse", "age")
    assert chosen.classes == ("ill", "well")
    dropped = load(str(hospital), rename=names, drop="Nummer, Notiz", label="diagnosis", test_fraction=0.5)
    assert dropped.columns == ("age", "pulse")
    ages = {round(value) for value in (chosen.train.x[:, 1] * chosen.scaling[1][1] + chosen.scaling[1][0]).tolist()}
    assert ages <= {40, 50, 60, 70}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"rename": {"Altr": "age"}}, "column to rename in .* 'Altr'; did you mean 'Alter'"),
        ({"rename": {"Alter": "Puls"}}, "two columns are called 'Puls' after rename"),
        ({"rename": ["Alter"]}, r"rename is \['Alter'\]; expected old and new names"),
        ({"columns": ["Alter", "pulse"]}, "column to keep in .* 'pulse'; did you mean 'Puls'"),
        ({"columns": 3.5}, "columns is 3.5; expected a list"),
        ({"columns": 3}, "column to keep in .* '3'"),
        ({"text": ["Notiz"]}, r"text is \['Notiz'\]; expected the name of a column"),
        ({"site": ["Notiz"]}, r"site is \['Notiz'\]; expected the name of a column"),
        ({"drop": ["Notizen"]}, "column to drop in .* 'Notizen'; did you mean 'Notiz'"),
        ({"drop": ["Diagnose"]}, "drop has 'Diagnose', which is the label"),
    ],
)
def test_mistakes_in_the_choice_of_columns_are_named(options: dict[str, object], problem: str, hospital: Path) -> None:
    with pytest.raises(UserError, match=problem):
        load(str(hospital), label="Diagnose", **options)
