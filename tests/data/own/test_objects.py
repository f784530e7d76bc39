"""A user's data as Python objects: arrays, DataFrames, torch Datasets and Hugging Face Datasets."""

from __future__ import annotations

import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
import yaml
from PIL import Image
from scipy.sparse import csr_array
from sklearn.datasets import load_iris
from sklearn.utils import Bunch
from torch.utils.data import Subset, TensorDataset

import fedskew as fs
from fedskew.cli import main

RANDOM = np.random.default_rng(0)
Y = np.arange(60) % 3
TABLE = RANDOM.normal(size=(60, 4)) + Y[:, None]
IMAGES = RANDOM.integers(0, 256, (60, 3, 6, 5), dtype=np.uint8)
NAMES = ["low", "middle", "high"]


def frame(**changes: Any) -> pd.DataFrame:
    columns = {"age": TABLE[:, 0], "pulse": TABLE[:, 1], "ill": np.array(NAMES)[Y]}
    return pd.DataFrame({**columns, **changes})


class Pairs(torch.utils.data.Dataset[Any]):
    """A torch Dataset in its most general form."""

    def __init__(self, inputs: list[Any], labels: list[Any]) -> None:
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.inputs[index], self.labels[index]


def same(one: fs.Dataset, other: fs.Dataset) -> bool:
    """Whether two datasets have the same samples and classes."""
    parts = ((one.train, other.train), (one.test, other.test))
    equal = all(np.array_equal(a.x, b.x) and np.array_equal(a.y, b.y) for a, b in parts)
    return equal and one.classes == other.classes and one.kind == other.kind


# Arrays


def test_arrays_give_what_their_npz_file_gives(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", x=TABLE, y=Y, classes=NAMES)
    loaded = fs.load((TABLE, Y), classes=NAMES)
    assert same(loaded, fs.load(tmp_path / "own.npz"))
    assert len(loaded.test) == 12


def test_a_test_part_is_not_held_out_again() -> None:
    loaded = fs.load((IMAGES[:40], Y[:40]), test=(IMAGES[40:], Y[40:]))
    assert loaded.kind == "image"
    np.testing.assert_array_equal(loaded.test.x, IMAGES[40:])
    with pytest.raises(fs.UserError, match="test x is the test set; leave out test_fraction"):
        fs.load((IMAGES[:40], Y[:40]), test=(IMAGES[40:], Y[40:]), test_fraction=0.5)


def test_tensors_lists_and_names_of_labels_and_features() -> None:
    loaded = fs.load((torch.tensor(TABLE), [NAMES[y] for y in Y]), columns=list("abcd"), classes=NAMES)
    assert loaded.columns == tuple("abcd")
    assert same(loaded, fs.load((TABLE, Y), classes=NAMES))


# DataFrames


def test_a_frame_gives_what_its_csv_file_gives(tmp_path: Path) -> None:
    frame().to_csv(tmp_path / "own.csv", index=False)
    loaded = fs.load(frame(), label="ill")
    assert same(loaded, fs.load(tmp_path / "own.csv", label="ill"))
    assert loaded.columns == ("age", "pulse")
    assert loaded.classes == ("high", "low", "middle")


def test_features_and_labels_as_in_scikit_learn() -> None:
    apart = fs.load((frame()[["age", "pulse"]], frame()["ill"]))
    assert same(apart, fs.load(frame(), label="ill"))
    assert apart.columns == ("age", "pulse")


@pytest.mark.parametrize("label", [pd.Categorical(np.array(NAMES)[Y]), pd.array(Y, dtype="Int64"), Y > 1], ids=type)
def test_a_label_column_may_have_any_type(label: Any) -> None:
    assert len(fs.load(frame(ill=label), label="ill").train) == 48


def test_one_column_of_text() -> None:
    loaded = fs.load(pd.DataFrame({"note": [f"word{y} and more" for y in Y], "y": Y}), length=3)
    assert loaded.kind == "text"
    assert loaded.input_shape == (3,)


# Polars and Arrow


def test_a_polars_frame_gives_what_a_pandas_frame_gives() -> None:
    polars = pytest.importorskip("polars")
    towns = [None if i % 7 == 0 else "AB"[i % 2] for i in range(60)]
    mixed = frame(town=towns, gap=np.where(Y == 1, np.nan, TABLE[:, 2]))
    converted = polars.from_dicts(mixed.replace({np.nan: None}).to_dict("records"), infer_schema_length=None)
    loaded = fs.load(converted, label="ill")
    assert loaded.columns == fs.load(mixed, label="ill").columns
    assert same(loaded, fs.load(mixed, label="ill"))
    apart = fs.load((converted.drop("ill"), converted["ill"]))
    assert same(apart, loaded)
    with pytest.raises(fs.UserError, match="LazyFrame has no rows yet; expected a DataFrame: call collect"):
        fs.load(converted.lazy(), label="ill")
    letters = polars.Series(["a", "b"] * 10, dtype=polars.Categorical)
    kinds = polars.DataFrame({"x": letters, "z": [1.5, 2.5] * 10, "y": [0, 1] * 10})
    assert fs.load(kinds).columns == ("x=a", "x=b", "z")
    dates = kinds.with_columns(polars.date(2024, 1, 1).alias("day"))
    with pytest.raises(fs.UserError, match="column 'day' holds dates or times"):
        fs.load(dates)


def test_an_arrow_table_gives_what_a_frame_gives() -> None:
    assert same(
        fs.load(pa.Table.from_pandas(frame(), preserve_index=False), label="ill"), fs.load(frame(), label="ill")
    )


# scikit-learn


def test_a_bunch_has_names_of_classes_and_features() -> None:
    iris = load_iris()
    loaded = fs.load(iris)
    assert loaded.classes == ("setosa", "versicolor", "virginica")
    assert loaded.columns[0] == "sepal length (cm)"
    assert same(loaded, fs.load((iris.data, iris.target), classes=list(iris.target_names)))
    as_frame = fs.load(load_iris(as_frame=True))
    assert as_frame.columns == loaded.columns
    assert as_frame.classes == loaded.classes
    apart = fs.load(iris, test=iris, name="flowers")
    assert (len(apart.train), len(apart.test), apart.name) == (150, 150, "flowers")
    assert fs.load(iris, classes=list("abc")).classes == tuple("abc")


# torch Datasets


def test_a_tensor_dataset_and_a_subset() -> None:
    whole = TensorDataset(torch.tensor(TABLE), torch.tensor(Y))
    assert same(fs.load(whole), fs.load((TABLE, Y)))
    part = Subset(whole, range(30))
    assert same(fs.load(part), fs.load((TABLE[:30], Y[:30])))


def test_images_as_floats_as_pillow_gives_them_and_as_bytes() -> None:
    expected = fs.load((IMAGES, Y))
    floats = Pairs([torch.tensor(x) / 255 for x in IMAGES], Y.tolist())
    pillow = Pairs([Image.fromarray(x.transpose(1, 2, 0)) for x in IMAGES], Y.tolist())
    assert same(fs.load(floats), expected)
    assert same(fs.load(pillow), expected)
    assert fs.load(pillow, image_size="3x4").input_shape == (3, 3, 4)


def test_class_names_of_a_torch_dataset() -> None:
    data = Pairs(list(TABLE), Y.tolist())
    data.classes = NAMES  # type: ignore[attr-defined]
    assert fs.load(data).classes == tuple(NAMES)
    assert fs.load(Subset(data, range(30))).classes == tuple(NAMES)


def test_texts_of_a_torch_dataset() -> None:
    assert fs.load(Pairs([f"word{y} here" for y in Y], Y.tolist())).kind == "text"


# Hugging Face Datasets


def hugging_face() -> datasets.Dataset:
    features = datasets.Features(
        {"a": datasets.Value("float64"), "b": datasets.Value("float64"), "mood": datasets.ClassLabel(names=NAMES)}
    )
    return datasets.Dataset.from_dict({"a": TABLE[:, 0], "b": TABLE[:, 1], "mood": Y}, features=features)


def test_a_hugging_face_dataset_names_its_classes() -> None:
    loaded = fs.load(hugging_face())
    assert loaded.classes == tuple(NAMES)
    assert loaded.columns == ("a", "b")
    assert same(loaded, fs.load((TABLE[:, :2], Y), classes=NAMES))


def test_a_selection_of_a_hugging_face_dataset() -> None:
    chosen = hugging_face().select(range(30, 60))
    assert same(fs.load(chosen), fs.load((TABLE[30:, :2], Y[30:]), classes=NAMES))


def test_a_dataset_dict_has_its_own_test_part() -> None:
    parts = hugging_face().train_test_split(test_size=20, shuffle=False)
    loaded = fs.load(parts)
    assert (len(loaded.train), len(loaded.test)) == (40, 20)
    assert same(loaded, fs.load((TABLE[:40, :2], Y[:40]), test=(TABLE[40:, :2], Y[40:]), classes=NAMES))
    with pytest.raises(fs.UserError, match="DatasetDict has a split 'test'; leave out test"):
        fs.load(parts, test=hugging_face())


def test_images_of_a_hugging_face_dataset(tmp_path: Path) -> None:
    pictures = [Image.fromarray(x.transpose(1, 2, 0)) for x in IMAGES]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)})
    data = datasets.Dataset.from_dict({"image": pictures, "label": Y}, features=features)
    assert same(fs.load(data), fs.load((IMAGES, Y), classes=NAMES))


# The hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as the hub has it, and no network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "clinic" / "patients"
    (folder / "data").mkdir(parents=True)
    frame().iloc[:40].to_parquet(folder / "data" / "train-00000-of-00001.parquet", index=False)
    frame().iloc[40:].to_parquet(folder / "data" / "test-00000-of-00001.parquet", index=False)
    return folder


def test_a_dataset_of_the_hub_is_named_in_the_configuration(hub: Path, tmp_path: Path) -> None:
    loaded = fs.load("hf:clinic/patients", label="ill")
    assert same(loaded, fs.load(frame().iloc[:40], test=frame().iloc[40:], label="ill"))
    split = ["--data", "hf:clinic/patients", "--set", "data.label=ill", "--partition", "iid", "--clients", "2"]
    assert main(["run", *split, "--method", "fedavg", "--rounds", "1", "-q", "--out", "a"]) == 0
    assert yaml.safe_load(Path("a/config.yaml").read_text())["data"] == {"name": "hf:clinic/patients", "label": "ill"}
    assert main(["run", "-c", "a/config.yaml", "-q", "--out", "b"]) == 0
    assert fs.load_run("a").accuracy == fs.load_run("b").accuracy


def test_mistakes_with_the_hub_get_one_line(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, line in (
        ("hf:clinic/absent", "'hf:clinic/absent' cannot be loaded: "),
        ("hf:", "expected hf:owner/name"),
    ):
        with pytest.raises(fs.UserError) as caught:
            fs.load(name)
        assert line in str(caught.value)
        assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(fs.UserError, match="'hf:clinic/patients' needs the package datasets: pip install datasets"):
        fs.load("hf:clinic/patients")


# Types of arrays and columns


def test_masked_values_are_gaps() -> None:
    masked = np.ma.masked_greater(TABLE, 1)
    found, expected = fs.load((masked, Y)), fs.load((np.where(TABLE > 1, np.nan, TABLE), Y))
    assert "x0 missing" in found.columns
    np.testing.assert_array_equal(found.train.x, expected.train.x)
    unmasked = fs.load((np.ma.MaskedArray(TABLE), Y))
    np.testing.assert_array_equal(unmasked.train.x, fs.load((TABLE, Y)).train.x)


def test_masked_texts_are_gaps() -> None:
    names = np.ma.masked_equal(np.array(NAMES)[Y], NAMES[1])
    with pytest.raises(fs.UserError, match="y: no label in row 1"):
        fs.load((TABLE, names))


def test_tensors_in_bfloat16_are_read() -> None:
    short = torch.tensor(TABLE).bfloat16()
    expected = fs.load((short.float().numpy(), Y)).train.x
    for data in ((short, torch.tensor(Y).bfloat16()), TensorDataset(short, torch.tensor(Y))):
        np.testing.assert_array_equal(fs.load(data).train.x, expected)
    assert fs.load(({"vector": short}, Y)).train.x.dtype == np.float32


def test_labels_above_the_largest_int64_keep_their_names() -> None:
    largest = np.uint64(2**64 - 1)
    assert fs.load((TABLE, largest - Y.astype(np.uint64))).classes == tuple(str(2**64 - 1 - y) for y in (2, 1, 0))


@pytest.mark.parametrize("values", [[3, 1], [2.5, 1.0], [True, False]])
def test_categories_that_are_numbers_are_categories_in_every_form(tmp_path: Path, values: list[Any]) -> None:
    table = frame(ward=pd.Categorical(values * 30))
    table.to_parquet(tmp_path / "wards.parquet")
    expected = fs.load(table, label="ill")
    assert len(expected.columns) == 4
    for other in (pa.Table.from_pandas(table), tmp_path / "wards.parquet"):
        assert fs.load(other, label="ill").columns == expected.columns
    renamed = fs.load(tmp_path / "wards.parquet", label="ill", rename={"ward": "unit"})
    assert renamed.columns[-1].startswith("unit=")


def test_decimals_of_a_data_frame_are_numbers() -> None:
    prices = [Decimal("1.50"), None, Decimal("12")] * 20
    found, expected = (fs.load(frame(price=p), label="ill") for p in (prices, [1.5, None, 12.0] * 20))
    assert found.columns == expected.columns
    np.testing.assert_array_equal(found.train.x, expected.train.x)


def test_numpy_numbers_are_options() -> None:
    assert len(fs.load((TABLE, Y), test_fraction=np.float32(0.5)).test) == 30
    texts = pd.DataFrame({"text": ["good day", "bad day"] * 10, "label": [1, 0] * 10})
    assert fs.load(texts, length=np.int64(2), vocabulary=np.int64(4)).input_shape == (2,)


# Mistakes


@pytest.mark.parametrize(
    ("data", "options", "line"),
    [
        ((TABLE, Y[:-1]), {}, "x: 60 inputs but 59 labels; expected equal lengths"),
        ((TABLE, np.zeros(60)), {}, "'arrays' has one class (0); expected at least 2 classes"),
        ((np.where(TABLE > 3, np.inf, TABLE), Y), {}, "x: infinite value in row"),
        ((TABLE, [None, *Y[1:]]), {}, "y: no label in row 0; expected one for every sample"),
        ((TABLE, ["a", *Y[1:]]), {}, "label '1' in row 1; expected only whole numbers, or only strings"),
        ((TABLE, np.array([b"a", b"\xe9", b"\xe8"] * 20)), {}, r"y: label b'\xe9' in row 1 is not UTF-8; expected"),
        ((TABLE, Y), {"columns": ["a"]}, "columns has 1 name (1 distinct), but x has 4 features; expected"),
        ((TABLE, Y), {"colums": ["a"]}, "unknown option of ndarray: 'colums'; did you mean 'columns'?"),
        (((TABLE - 9).reshape(60, 2, 2), Y), {}, "above 255; expected 0 to 1 or 0 to 255 (fedskew normalises images"),
        (([[1, 2], [3]], [0, 1]), {}, "x: rows of unequal length"),
        (TABLE, {}, "data is a single ndarray; expected a pair (x, y) of inputs and labels"),
        ((TABLE, Y, TABLE, Y), {}, "data is of type tuple; expected a dataset's name, a path, a pair of arrays (x, y)"),
        (7, {}, "data is of type int; expected a dataset's name"),
        ((TABLE, Y), {"test": TABLE}, "test is of type ndarray; expected a pair (x, y), like the training part"),
        ((TABLE, Y), {"test": frame()}, "test is of type DataFrame; expected a pair (x, y), like the training part"),
        ((TABLE, Y), {"test": (TABLE, Y, Y)}, "test is of type tuple; expected a pair (x, y), like the training part"),
        (Pairs(list(TABLE), Y.tolist()), {"test": 7}, "test is of type int; expected a pair of arrays"),
        ((TABLE[:, :0], Y), {}, "x: shape (60, 0), so a sample has no values; expected at least one"),
        ((TABLE, Y), {"columns": "abcd"}, "columns is 'abcd'; expected a list with a name for each feature"),
        ((TABLE, Y), {"columns": 4}, "columns is 4; expected a list with a name for each feature"),
        ((torch.tensor(TABLE).to_sparse(), Y), {}, "x: a sparse Tensor; expected a dense one: call to_dense() first"),
        ((TABLE, np.ma.masked_equal(Y, 1)), {}, "y: label nan in row 1; expected a whole number or a name"),
        ({"a": 1}, {}, "the training part is of type int; expected a pair of arrays"),
        ({"a": 1, "b": 2}, {}, "dict: splits a, b; expected one named train"),
        ({}, {}, "dict: splits (none); expected one named train"),
        (None, {}, "data is of type NoneType; expected a dataset's name"),
        (frame(), {}, "DataFrame: no column named label, labels, class, target, y; name the label column"),
        (frame().rename(columns=str.upper), {"label": "ill"}, "column in DataFrame: 'ill'; did you mean 'ILL'"),
        (frame(), {"label": "il"}, "unknown label column in DataFrame: 'il'; did you mean 'ill'?"),
        (frame(ill=None), {"label": "ill"}, "DataFrame column 'ill': no label in row 0; expected one for every"),
        (frame(age=np.nan), {"label": "ill"}, "DataFrame: column 'age' has no value; leave it out with drop=age"),
        (frame(age=[np.inf, *Y[1:]]), {"label": "ill"}, "DataFrame: infinite value in column 'age', row 0"),
        (frame(born=pd.Timestamp("2020-01-01")), {"label": "ill"}, "column 'born' holds dates or times; expected num"),
        (frame(town=[f"t{i}" for i in range(60)]), {"label": "ill"}, "column 'town' has a different text in each row"),
        (frame(odd=[[1]] * 60), {"label": "ill"}, "column 'odd' holds values of type list; expected numbers"),
        (frame(**{"Unnamed: 0": Y}), {"label": "ill"}, "column 'Unnamed: 0' has no name, like the index that pandas"),
        (frame(number=range(60)), {"label": "ill"}, "column 'number' has a different whole number in each row"),
        (frame().iloc[:0], {"label": "ill"}, "no samples"),
        ((frame(), Y), {"label": "ill"}, "the labels are y of the pair (x, y); leave out label"),
        (Pairs(list(TABLE), Y.tolist()), {"label": "y"}, "unknown option of Pairs: 'label'"),
        (Pairs([*TABLE[1:], TABLE[0, :2]], Y.tolist()), {}, "Pairs: item 59 has shape (2,), item 0 (4,); expected the"),
        (torch.tensor(TABLE), {}, "data is a single Tensor; expected a pair (x, y)"),
        (TensorDataset(torch.tensor(TABLE)), {}, "TensorDataset: item 0 has type tuple; expected a pair"),
        (Pairs([], []), {}, "Pairs: no samples"),
        ((TABLE[:0], []), {}, "y: no samples"),
        ((TABLE[:0], np.zeros((0, 3))), {}, "y: no samples"),
        ((TABLE, Y), {"test": (TABLE[:0], [])}, "test y: no samples"),
        (hugging_face(), {"label": "moods"}, "unknown label column in Dataset: 'moods'; did you mean 'mood'?"),
        (hugging_face().to_iterable_dataset(), {}, "IterableDataset has no length, so it is a stream"),
        ("x" * 5000, {}, "unknown dataset or path"),
        ((csr_array(TABLE), Y), {}, "x: a sparse csr_array; expected a dense array: call toarray() first"),
        (fs.load((TABLE, Y)), {"label": "y"}, "option 'label' does not apply to a Dataset that is already loaded"),
    ],
)  # fmt: skip
def test_mistakes_get_one_line(data: Any, options: dict[str, Any], line: str) -> None:
    with pytest.raises(fs.UserError) as caught:
        fs.federation(data, fs.IID(clients=3), **options)
    assert line in str(caught.value)


# Runs on such data


def test_the_run_records_what_the_data_were(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = {"method": "fedavg", "rounds": 1, "out": tmp_path / "run"}
    fed = fs.federation(frame(), fs.IID(clients=3), label="ill", name="patients")
    result = fs.run(fed, **short)
    configuration = (tmp_path / "run" / "config.yaml").read_text()
    assert configuration.startswith("# To repeat this run: the same call in Python, with the same data")
    recorded = yaml.safe_load(configuration)["data"]
    assert recorded["name"] == "patients"
    assert (recorded["in_memory"], recorded["train"], recorded["test"]) == ("DataFrame", [48, 2], [12, 2])
    assert len(recorded["sha256"]) == 64

    again = fs.run(fs.federation(frame(), fs.IID(clients=3), label="ill", name="patients"), **short)
    assert again.accuracy == result.accuracy
    other = fs.federation(frame(age=TABLE[:, 2]), fs.IID(clients=3), label="ill", name="patients")
    with pytest.raises(fs.UserError, match=r"another configuration \(it differs in data.sha256\)"):
        fs.run(other, **short)

    status = main(["run", "-c", str(tmp_path / "run" / "config.yaml"), "--out", str(tmp_path / "again")])
    assert status == 2
    line = " ".join(capsys.readouterr().err.split())
    assert "the data of this run was a DataFrame in Python (train 48×2 and test 12×2, SHA-256" in line
    assert "pass it to fs.federation in Python" in line


def test_federations_and_datasets_have_a_short_repr() -> None:
    fed = fs.federation((TABLE, Y), fs.LabelsPerClient(clients=3, labels_per_client=1), seed=2)
    assert repr(fed) == "Federation('arrays', 3 clients, labels(labels_per_client=1), seed=2)"
    assert repr(fed.dataset) == "Dataset('arrays', table, 3 classes, 48 training and 12 test samples of shape (4,))"
    assert repr(fed.dataset.train) == "Samples(48 of shape (4,), float32)"


def test_lists_of_labels_are_not_inputs_beside_token_ids() -> None:
    columns = {"input_ids": RANDOM.integers(1, 9, (60, 4)).tolist(), "labels": RANDOM.integers(0, 2, (60, 3)).tolist()}
    dataset = fs.load(pa.table(columns))
    assert [name for name, _, _ in dataset.fields] == ["input_ids"]
    assert dataset.train.y.shape[1:] == (3,)


def test_a_table_with_token_ids_has_sites() -> None:
    ids = RANDOM.integers(1, 9, (60, 4))
    columns = {"input_ids": ids.tolist(), "label": Y.tolist(), "ward": [f"w{number}" for number in ids[:, 0]]}
    dataset = fs.load(pa.table(columns), site="ward")
    assert [name for name, _, _ in dataset.fields] == ["input_ids"]
    assert (dataset.site_column, dataset.sites) == ("ward", tuple(f"w{number}" for number in range(1, 9)))
    for part in (dataset.train, dataset.test):
        assert [dataset.sites[number] for number in part.site] == [f"w{number}" for number in part.x[:, 0]]
    fed = fs.federation(pa.table(columns), fs.Column(column="ward"), site="ward")
    assert fed.clients == 8
    with pytest.raises(fs.UserError, match="no value in the site column 'ward'"):
        fs.load(pa.table(columns | {"ward": [None, *columns["ward"][1:]]}), site="ward")


@pytest.mark.parametrize("test_labels", [pd.Series(Y, name="other"), Y, pd.DataFrame({"name": Y})])
def test_labels_of_a_pair_need_no_equal_names(test_labels: Any) -> None:
    x = frame().drop(columns="ill")
    loaded = fs.load((x, pd.Series(Y, name="outcome")), test=(x, test_labels))
    assert loaded.test.y.tolist() == Y.tolist()
    assert loaded.columns == ("age", "pulse")


@pytest.mark.parametrize("kind", ["string", "boolean"])
def test_missing_labels_of_pandas_types_are_refused(kind: str) -> None:
    labels = pd.Series((Y > 0).astype(str) if kind == "string" else Y > 0, dtype=kind).where(Y < 2)
    for x in (frame().drop(columns="ill"), TABLE):
        with pytest.raises(fs.UserError, match="no label in row 2"):
            fs.load((x, labels))


def test_columns_of_several_labels_have_names_and_an_order() -> None:
    labels = pd.DataFrame({"flu": Y > 0, "cough": Y > 1}).astype(int)
    for x in (frame(), TABLE):
        assert fs.load((x, labels)).classes == ("flu", "cough")
        assert fs.load((x, labels), classes=["a", "b"]).classes == ("a", "b")
        with pytest.raises(fs.UserError, match="test y has the columns cough, flu; expected flu, cough, as in y"):
            fs.load((x, labels), test=(x, labels[["cough", "flu"]]))


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (frame(), {"image_size": 8}),
        (frame(), {"length": 5}),
        (frame(), {"text": "ill", "label": "age", "missing": ["low"]}),
        ((TABLE, Y), {"layout": "nchw"}),
        (Pairs(["one text"] * 10, [0, 1] * 5), {"image_size": 8}),
        (Pairs([Image.new("L", (4, 4))] * 10, [0, 1] * 5), {"layout": "nhwc"}),
        (TensorDataset(torch.tensor(TABLE), torch.tensor(Y)), {"vocabulary": 9}),
        (({"ids": Y, "weight": TABLE[:, 0]}, Y), {"vocabulary": 9}),
        (datasets.Dataset.from_dict({"input_ids": [[1, 2]] * 60, "label": Y}), {"length": 5}),
    ],
)
def test_an_option_without_effect_is_refused(data: Any, options: dict[str, Any]) -> None:
    label = {"label": "ill"} if isinstance(data, pd.DataFrame) else {}
    with pytest.raises(fs.UserError, match=r"has no effect, because the inputs are .*; leave it out"):
        fs.load(data, **{**label, **options})


def test_floats_in_the_test_part_of_whole_numbers_are_refused() -> None:
    inputs = {"ids": np.stack([Y, Y], axis=1), "mask": np.ones((len(Y), 2))}
    whole = inputs | {"mask": np.ones((len(Y), 2), np.int64)}
    with pytest.raises(fs.UserError, match=r"test x\['mask'\] has floats, x\['mask'\] whole numbers"):
        fs.load((whole, Y), test=(inputs, Y))
    assert fs.load((inputs, Y), test=(whole, Y)).test.x.dtype == np.float32


def test_the_number_of_tokens_is_a_number() -> None:
    with pytest.raises(fs.UserError, match="vocabulary is 'many'; expected the number of tokens"):
        fs.load(({"ids": Y}, Y), vocabulary="many")


def test_columns_beside_token_ids_are_named_or_refused() -> None:
    tokens = {"input_ids": [[1, 2], [2, 3]] * 30, "age": TABLE[:, 0], "note": ["some words"] * 60, "label": Y}
    data = datasets.Dataset.from_dict(tokens)
    assert fs.load(data).notes == ("dataset: the inputs are 'input_ids'; not used: 'age', 'note'",)
    with pytest.raises(fs.UserError, match="columns lists 'age', which cannot be an input together with 'input_ids'"):
        fs.load(data, columns=["input_ids", "age"])
    assert fs.load(data, text="note").words == ("some", "words")


def test_a_bunch_may_name_its_label_column_instead_of_the_classes() -> None:
    bunch = Bunch(data=TABLE, target=Y + 1, target_names=["Cover_Type"])  # as in fetch_covtype()
    assert fs.load(bunch).classes == ("1", "2", "3")


@pytest.mark.parametrize("marker", [-999, -999.0, "-999"])
def test_a_number_marks_gaps_among_categories(marker: object) -> None:
    data = fs.load(frame(room=np.where(Y == 1, -999.0, Y)), label="ill", categorical="room", missing=[marker])
    assert data.columns == ("age", "pulse", "room=0", "room=2", "room missing")


def typed_columns(**columns: tuple[Any, Any]) -> datasets.Dataset:
    """A Dataset with these columns: their values and their type."""
    features = datasets.Features({name: kind for name, (_, kind) in columns.items()})
    return datasets.Dataset.from_dict({name: values for name, (values, _) in columns.items()}, features=features)


def test_class_names_of_other_columns_are_categories_and_sites() -> None:
    ward = datasets.ClassLabel(names=["north", "south", "west"])
    age = datasets.Value("float32")
    data = typed_columns(
        age=(TABLE[:, 0], age), ward=(np.where(Y == 2, -1, Y), ward), label=(Y, datasets.Value("int64"))
    )
    assert fs.load(data, label="label").columns == ("age", "ward=north", "ward=south", "ward missing")
    sited = typed_columns(age=(TABLE[:, 0], age), ward=(Y, ward), label=(Y, datasets.Value("int64")))
    assert fs.load(sited, label="label", site="ward").sites == ("north", "south", "west")


def test_a_column_called_label_is_no_input_beside_class_names() -> None:
    sex = datasets.ClassLabel(names=["f", "m"])
    data = typed_columns(
        sex=(Y % 2, sex), age=(TABLE[:, 0], datasets.Value("float32")), label=(Y, datasets.Value("int8"))
    )
    with pytest.raises(fs.UserError, match="column 'sex' has class names, but column 'label' has the name of a label"):
        fs.load(data)


def test_whole_numbers_beside_gaps_may_be_large() -> None:
    table = pa.table({"code": [2**53 + 1, None, 3] * 20, "age": TABLE[:, 0], "label": Y})
    assert fs.load(table).columns == ("code", "code missing", "age")
