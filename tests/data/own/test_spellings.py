"""The same category, class or column in another spelling: composed letters (NFC), 1.0 for 1, and columns lost by it."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import fedskew as fs
from fedskew.data.column_sums import CategorySums, fit_encoding_to_sums, sum_columns
from fedskew.data.table_encoding import TableEncoding
from fedskew.flower.contract import Contract
from fedskew.flower.site_run import hash_contract

ENCODING = [
    {"name": "age", "mean": 50, "std": 10},
    {"name": "grade", "categories": ["1", "2", "3"]},
    {"name": "sex", "categories": ["f", "m"]},
]


def nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def nfd(text: str) -> str:
    return unicodedata.normalize("NFD", text)


def german(rows: int = 40) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "Größe": np.arange(rows) % 7 + 0.5,
            "Beginn": [("früher", "später")[row % 2] for row in range(rows)],
            "Diagnose": [("Migräne", "gesund")[row % 3 == 0] for row in range(rows)],
        }
    )


def spelled(frame: pd.DataFrame, form: Any) -> pd.DataFrame:
    changed = frame.rename(columns=form)
    return changed.map(lambda value: form(value) if isinstance(value, str) else value)


def written(frame: pd.DataFrame, path: Path) -> Path:
    if path.suffix == ".parquet":
        frame.to_parquet(path)
    else:
        frame.to_csv(path, index=False)
    return path


@pytest.mark.parametrize("suffix", ["csv", "parquet", "frame"])
def test_decomposed_letters_are_read_as_composed_ones(tmp_path: Path, suffix: str) -> None:
    def load(form: Any, **options: Any) -> fs.Dataset:
        frame = spelled(german(), form)
        data = frame if suffix == "frame" else written(frame, tmp_path / f"{form.__name__}.{suffix}")
        return fs.load(data, label=nfd("Diagnose"), **options)

    known, other = load(nfc), load(nfd)
    assert (other.columns, other.classes) == (known.columns, known.classes)
    assert other.columns == tuple(map(nfc, ("Größe", "Beginn=früher", "Beginn=später")))
    assert (other.train.x == known.train.x).all()
    assert load(nfd, encoding=known.encoding).notes == known.notes
    assert load(nfc, columns=[nfd("Größe")]).columns == (nfc("Größe"),)
    assert load(nfd, rename={nfc("Größe"): "size"}, missing=[nfc("früher")]).columns[0] == "size"


@pytest.mark.parametrize(("ours", "theirs"), [(nfc, nfd), (nfd, nfc)])
def test_a_site_with_decomposed_letters_meets_the_contract(tmp_path: Path, ours: Any, theirs: Any) -> None:
    frame = german()
    contract = Contract.from_dataset(fs.load(spelled(frame, ours), label="Diagnose"))
    contract = Contract.from_json(_decomposed(contract.to_json()) if ours is nfd else contract.to_json())
    path = written(spelled(frame, theirs), tmp_path / "site.csv")
    dataset = contract.admit(fs.load(path, **contract.data_options(path, {"label": "Diagnose"})))
    assert dataset.notes == ()
    assert dataset.train.x[:, 1:].sum() == len(dataset.train)


def _decomposed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _decomposed(item) for key, item in value.items()}
    return [*map(_decomposed, value)] if isinstance(value, list) else nfd(value) if isinstance(value, str) else value


def test_sums_of_sites_have_one_category_for_both_forms() -> None:
    sites = [[CategorySums("Beginn", (form("früher"), "x"))] for form in (nfc, nfd)]
    assert fit_encoding_to_sums(sites).columns[0].categories == (nfc("früher"), "x")


def test_an_old_encoding_with_both_forms_of_a_category_is_still_read() -> None:
    both = sorted([nfc("früher"), nfd("früher")])
    encoding = TableEncoding.from_json([{"name": nfd("Größe"), "categories": both}])
    assert (encoding.columns[0].name, encoding.columns[0].categories) == (nfc("Größe"), tuple(both))


def test_class_folders_with_decomposed_names_are_the_same_classes(tmp_path: Path) -> None:
    for name in (nfd("Migräne"), nfc("Migräne"), "gesund", "__MACOSX", ".cache"):
        (tmp_path / name).mkdir()
        for i in range(5):
            Image.new("L", (4, 4), 50).save(tmp_path / name / f"{i}.png")
    (tmp_path / "gesund" / ".thumbnails").mkdir()
    Image.new("L", (4, 4), 50).save(tmp_path / "gesund" / ".thumbnails" / "0.png")
    data = fs.load(tmp_path)
    assert data.classes == (nfc("Migräne"), "gesund")
    assert np.bincount(np.concatenate([data.train.y, data.test.y])).tolist() == [10, 5]


def test_lists_of_classes_may_have_either_form(tmp_path: Path) -> None:
    path = written(spelled(german(), nfc), tmp_path / "data.csv")
    names = [nfd("Migräne"), "gesund"]
    assert fs.load(path, label="Diagnose", classes=names).classes == tuple(map(nfc, names))
    assert fs.load(path, label="Diagnose", keep=names).classes == tuple(map(nfc, names))
    np.savez(tmp_path / "data.npz", x=np.ones((10, 2)), y=[0, 1] * 5, classes=names)
    assert fs.load(tmp_path / "data.npz").classes == tuple(map(nfc, names))


def patients(**columns: Any) -> pd.DataFrame:
    rows = 40
    numbers = np.arange(rows)
    table = {"age": numbers % 9 + 40.5, "grade": numbers % 3 + 1, "sex": np.array(["f", "m"])[numbers % 2]}
    return pd.DataFrame({**table, **columns, "label": np.array(["ill", "well"])[numbers % 2]})


def with_gap() -> np.ndarray:
    """Grades with one gap, which pandas writes as 1.0, 2.0 and 3.0."""
    return np.where(np.arange(40) == 7, np.nan, np.arange(40) % 3 + 1)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("known", [["1", "2", "3"], ["1.0", "2.0", "3.0"]])
def test_whole_numbers_with_a_zero_after_the_point_are_the_known_categories(
    tmp_path: Path, suffix: str, known: list[str]
) -> None:
    encoding = [ENCODING[0], {"name": "grade", "categories": known}, ENCODING[2]]
    for grades, gaps in ((with_gap(), 1), (np.arange(40) % 3 + 1, 0)):
        path = written(patients(grade=grades), tmp_path / f"site{gaps}.{suffix}")
        dataset = fs.load(path, encoding=encoding)
        assert not any("not among its categories" in note for note in dataset.notes)
        assert sum(part.x[:, 1:4].sum() for part in (dataset.train, dataset.test)) == 40 - gaps


def test_a_fitted_encoding_spells_whole_numbers_without_a_zero(tmp_path: Path) -> None:
    (tmp_path / "both").mkdir()
    written(patients(grade=with_gap()), tmp_path / "both" / "train.csv")
    written(patients(), tmp_path / "both" / "test.csv")
    dataset = fs.load(tmp_path / "both", categorical="grade")
    assert dataset.columns[1:4] == ("grade=1", "grade=2", "grade=3")
    assert dataset.test.x[:, 1:4].sum() == 40
    draft = Contract.from_dataset(dataset).draft()
    sums = []
    for name in ("train", "test"):
        path = tmp_path / "both" / f"{name}.csv"
        raw = fs.load(path, **draft.data_options(path, {})).raw_train
        assert raw is not None
        sums.append(sum_columns(raw))
    assert fit_encoding_to_sums(sums).columns[1].categories == ("1", "2", "3")


def test_versions_and_texts_of_one_file_that_differ_stay_different(tmp_path: Path) -> None:
    for values in (["1.0", "1", "2.0"], ["1.0", "1.1", "2.0"]):
        grades = [values[row % 3] for row in range(40)]
        path = written(patients(grade=grades), tmp_path / "site.csv")
        columns = fs.load(path, categorical="grade").columns
        assert columns[1:4] == tuple(f"grade={value}" for value in sorted(values))
    grades = [("1.0", "1", "2")[row % 3] for row in range(40)]
    dataset = fs.load(written(patients(grade=grades), tmp_path / "site.csv"), encoding=ENCODING)
    assert any("not among its categories (1.0)" in note for note in dataset.notes)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize(
    ("column", "values", "known"),
    [
        ("sex", ("F", "M"), "f, m"),
        ("sex", ("F",), "f, m"),
        ("sex", ("0", "1"), "f, m"),
        ("sex", ("weiblich", "männlich"), "f, m"),
        ("grade", ("01", "02"), "1, 2, 3"),
        ("grade", ("I", "II", "III"), "1, 2, 3"),
    ],
)
def test_a_column_without_any_known_value_is_refused(
    tmp_path: Path, suffix: str, column: str, values: tuple[str, ...], known: str
) -> None:
    frame = patients(**{column: [values[row % len(values)] for row in range(40)]})
    path = written(frame, tmp_path / f"site.{suffix}")
    with pytest.raises(fs.UserError) as refused:
        fs.load(path, encoding=ENCODING)
    found = ", ".join(sorted(values))
    assert f"no value of column {column!r} ({found}) is among its categories ({known})" in str(refused.value)
    dataset = fs.load(path, encoding=ENCODING, missing=list(values))  # the way out that the message names
    inputs = slice(1, 4) if column == "grade" else slice(4, 6)
    assert not any(part.x[:, inputs].any() for part in (dataset.train, dataset.test))


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("texts", [("13,8", "14,25"), ("13,8", "14")])
def test_a_decimal_comma_where_numbers_are_expected_is_shown_with_its_line(
    tmp_path: Path, suffix: str, texts: tuple[str, ...]
) -> None:
    path = written(patients(age=[texts[row % 2] for row in range(40)]), tmp_path / f"site.{suffix}")
    with pytest.raises(fs.UserError) as refused:
        fs.load(path, encoding=ENCODING)
    place = "line 2" if suffix == "csv" else "row 0"
    assert f"'13,8' in column 'age', {place}; expected a number, as in" in str(refused.value)
    remedy = 'set decimal=","' if suffix == "csv" else "turn the texts into numbers"
    assert f"if the comma is the decimal mark, {remedy}" in str(refused.value)
    if suffix == "csv":
        fs.load(path, encoding=ENCODING, decimal=",")


def test_texts_where_numbers_are_expected_are_shown_with_their_line(tmp_path: Path) -> None:
    path = written(patients(age=["low", "high"] * 20), tmp_path / "site.csv")
    with pytest.raises(fs.UserError, match="'low' in column 'age', line 2; expected a number, as in the training"):
        fs.load(path, encoding=ENCODING)


def test_a_site_whose_rows_all_have_one_new_value_is_warned_that_the_column_is_lost(tmp_path: Path) -> None:
    path = written(patients(sex=["unknown"] * 40), tmp_path / "site.csv")
    (note,) = fs.load(path, encoding=ENCODING).notes
    assert "no value of column 'sex' (unknown) is among its categories (f, m); the whole column is lost" in note


def test_a_note_has_the_share_of_rows_with_unknown_values(tmp_path: Path) -> None:
    path = written(patients(sex=["f"] * 30 + ["F"] * 10), tmp_path / "site.csv")
    (note,) = fs.load(path, encoding=ENCODING).notes
    assert "not among its categories (F); they become 0 in 10 of 40 rows (25.0%)" in note


def test_a_site_that_hid_its_categories_from_the_sums_is_only_warned(tmp_path: Path) -> None:
    path = written(patients(sex=["Rome", "Oslo"] * 20), tmp_path / "site.csv")
    encoding = TableEncoding.from_json(ENCODING)
    complete = Contract.from_encoding(("ill", "well"), encoding).draft().complete(encoding)
    complete = Contract.from_json(complete.to_json())
    (note,) = fs.load(path, **complete.data_options(path, {})).notes
    assert "the whole column is lost" in note


def test_a_contract_that_is_completed_has_the_hash_that_sites_recorded_with_version_0_2() -> None:
    encoding = TableEncoding.from_json(ENCODING)
    complete = Contract.from_encoding(("ill", "well"), encoding).draft().complete(encoding)
    assert complete.from_sums
    assert hash_contract(complete) == "c09591d175c4739d49df79bb374d0b0163153f4ee9aceb0bb23a30f8d747df45"


def test_texts_given_in_python_are_composed_as_those_of_files_are() -> None:
    pairs = [(text, label) for text in ("grün", "größe", "tür") for label in (0, 1)] * 5
    one, other = (fs.load([(form(text), label) for text, label in pairs]) for form in (nfc, nfd))
    assert one.words == other.words
    assert (one.train.x == other.train.x).all()
