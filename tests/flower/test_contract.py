"""What sites agree on: classes as a set of names, the form of inputs, normalisation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedskew.data import load
from fedskew.data.dataset import Dataset, Samples
from fedskew.errors import UserError
from fedskew.flower.contract import Contract

CONTRACT = Contract("image", ("cat", "dog", "owl"), (1, 2, 2), (0.3,), (0.2,))


def site(classes: tuple[str, ...], y: list[int], shape: tuple[int, ...] = (1, 2, 2)) -> Dataset:
    x = np.zeros((len(y), *shape), np.uint8)
    samples = Samples(x, np.array(y))
    return Dataset("site", "image", classes, samples, samples, mean=(0.9,) * shape[0], std=(0.9,) * shape[0])


def test_classes_are_numbered_by_name_whatever_their_order() -> None:
    admitted = CONTRACT.admit(site(("owl", "cat"), [0, 1, 1]))
    assert admitted.classes == ("cat", "dog", "owl")
    assert admitted.train.y.tolist() == [2, 0, 0]


def test_normalisation_is_the_federation_s_not_the_site_s() -> None:
    admitted = CONTRACT.admit(site(("cat", "dog"), [0, 1]))
    assert (admitted.mean, admitted.std) == ((0.3,), (0.2,))


def test_every_difference_is_told() -> None:
    with pytest.raises(UserError) as refused:
        CONTRACT.admit(site(("cat", "cow"), [0, 1], shape=(3, 2, 2)))
    assert "classes 'cow' are not among 'cat', 'dog', 'owl'" in str(refused.value)
    assert "inputs have shape [3, 2, 2], expected [1, 2, 2]" in str(refused.value)


def test_other_sizes_and_channels_get_a_next_step() -> None:
    for shape, remedy in (
        ((1, 48, 40), "image_size: 2x2)"),
        ((3, 2, 2), "(convert them to grey)"),
        ((3, 4, 4), "image_size: 2x2 and convert them to grey)"),
    ):
        with pytest.raises(UserError) as refused:
            CONTRACT.admit(site(("cat", "dog"), [0, 1], shape=shape))
        assert remedy in str(refused.value)


def test_grey_images_join_a_federation_in_colour() -> None:
    colour = Contract("image", ("cat", "dog"), (3, 2, 2), (0.3,) * 3, (0.2,) * 3)
    grey = site(("cat", "dog"), [0, 1], shape=(1, 2, 2))
    admitted = colour.admit(grey)
    assert admitted.train.x.shape == (2, 3, 2, 2)
    assert (admitted.train.x == grey.train.x).all()
    assert colour.warnings(grey) == [
        "the images are grey, but the federation's are in colour: each gets three equal channels"
    ]
    assert colour.warnings(admitted) == []
    with pytest.raises(UserError, match=r"inputs have shape \[1, 4, 4\].*image_size: 2x2 and convert them to colour"):
        colour.admit(site(("cat", "dog"), [0, 1], shape=(1, 4, 4)))


def test_other_kinds_are_told() -> None:
    table = Samples(np.zeros((2, 4), np.float32), np.array([0, 1]))
    with pytest.raises(UserError, match="they are of kind table, expected image"):
        CONTRACT.admit(Dataset("site", "table", ("cat", "dog"), table, table))


def table(raw: list[list[float]], scaling: tuple[tuple[float, float], ...]) -> Dataset:
    """As a loader standardises it."""
    mean, std = np.array(scaling or ((0.0, 1.0),)).T
    rows = Samples(((np.array(raw) - mean) / std).astype(np.float32), np.array([0, 1]))
    return Dataset("site", "table", ("cat", "dog"), rows, rows, scaling=scaling)


@pytest.mark.parametrize("own", [((7.0, 2.0), (100.0, 30.0)), ((0.0, 5.0), (-1.0, 0.5)), ()])
def test_a_table_s_columns_are_scaled_alike_at_all_sites(own: tuple[tuple[float, float], ...]) -> None:
    contract = Contract("table", ("cat", "dog"), (2,), mean=(5.0, 90.0), std=(4.0, 20.0))
    admitted = contract.admit(table([[9.0, 130.0], [5.0, 70.0]], own))
    np.testing.assert_allclose(admitted.train.x, [[1, 2], [0, -1]], rtol=1e-5, atol=1e-5)
    assert admitted.train.x.dtype == np.float32
    assert admitted.scaling == ((5.0, 4.0), (90.0, 20.0))


def test_a_table_that_is_scaled_so_already_keeps_its_bits() -> None:
    given = table([[0.1, 130.0], [5.0, 0.7]], ((5.0, 3.0), (90.0, 7.0)))
    assert Contract.from_dataset(given).admit(given).train.x is given.train.x


def test_without_the_federation_s_scaling_every_site_keeps_its_own() -> None:
    given = table([[9.0, 130.0], [5.0, 70.0]], ((5.0, 4.0), (90.0, 20.0)))
    admitted = Contract("table", ("cat", "dog"), (2,)).admit(given)
    assert np.array_equal(admitted.train.x, given.train.x)
    assert admitted.scaling == given.scaling


def test_the_scaling_of_a_table_survives_json_and_describes_a_dataset() -> None:
    contract = Contract("table", ("cat", "dog"), (2,), mean=(5.0, 90.0), std=(4.0, 20.0))
    assert Contract.from_json(json.loads(json.dumps(contract.to_json()))) == contract
    assert Contract.from_dataset(contract.blank()) == contract
    with pytest.raises(UserError, match="expected 2, one per input"):
        Contract("table", ("cat", "dog"), (2,), mean=(5.0,), std=(4.0,))
    for mean, std in ((5.0, 0.0), (5.0, -1.0), (5.0, float("inf")), (float("nan"), 4.0)):
        with pytest.raises(UserError, match="expected finite numbers, and each std above 0"):
            Contract("table", ("cat", "dog"), (1,), mean=(mean,), std=(std,))


def test_columns_are_known_by_name_whatever_their_order() -> None:
    contract = Contract("table", ("cat", "dog"), (2,), (5.0, 90.0), (4.0, 20.0), columns=("age", "pressure"))
    given = replace(table([[130.0, 9.0], [70.0, 5.0]], ((100.0, 30.0), (7.0, 2.0))), columns=("pressure", "age"))
    admitted = contract.admit(given)
    np.testing.assert_allclose(admitted.train.x, [[1, 2], [0, -1]], rtol=1e-5, atol=1e-5)
    assert admitted.columns == ("age", "pressure")
    assert Contract.from_dataset(contract.blank()) == contract
    assert Contract.from_json(json.loads(json.dumps(contract.to_json()))) == contract


def test_other_columns_are_told() -> None:
    contract = Contract("table", ("cat", "dog"), (2,), columns=("age", "pressure"))
    given = replace(table([[1.0, 2.0], [3.0, 4.0]], ()), columns=("age", "weight"))
    with pytest.raises(UserError) as refused:
        contract.admit(given)
    assert "columns 'weight' are not among 'age', 'pressure'; columns 'pressure' are missing" in str(refused.value)
    with pytest.raises(UserError, match="expected 2 different names"):
        Contract("table", ("cat", "dog"), (2,), columns=("age", "age"))


def test_texts_must_be_numbered_alike() -> None:
    words = Samples(np.zeros((2, 4), np.int64), np.array([0, 1]))
    contract = Contract("text", ("a", "b"), (4,), vocabulary=9, words="ag_news")
    with pytest.raises(UserError, match="words are numbered by 'mine', expected 'ag_news'"):
        contract.admit(Dataset("mine", "text", ("a", "b"), words, words, vocabulary=9))


def test_files_of_one_name_may_number_words_differently(tmp_path: Path) -> None:
    loaded = []
    for folder, words in (("a", "red green blue"), ("b", "one two three"), ("c", "red green blue")):
        (tmp_path / folder).mkdir()
        lines = "".join(f"{word} {word},{label}\n" for word in words.split() for label in "xyxy")
        (tmp_path / folder / "notes.csv").write_text(f"text,label\n{lines}")
        loaded.append(load(tmp_path / folder / "notes.csv"))
    contract = Contract.from_json(json.loads(json.dumps(Contract.from_dataset(loaded[0]).to_json())))
    with pytest.raises(UserError, match="words have other numbers, expected one numbering for all sites"):
        contract.admit(loaded[1])
    assert contract.admit(loaded[2]).vocabulary == 5
    larger = replace(loaded[2], vocabulary=6)
    with pytest.raises(UserError, match="the vocabulary has 6 entries, expected 5"):
        contract.admit(larger)


def test_it_survives_json_and_describes_a_dataset() -> None:
    assert Contract.from_json(json.loads(json.dumps(CONTRACT.to_json()))) == CONTRACT
    assert Contract.from_dataset(CONTRACT.blank()) == CONTRACT


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"kind": "sound"}, "contract.kind is 'sound'"),
        ({"classes": ["a"]}, "expected two or more different names"),
        ({"classes": ["a", "a"]}, "expected two or more different names"),
        ({"shape": [0, 2, 2]}, "expected sizes such as"),
        ({"mean": [0.1, 0.2]}, "expected 1, one per channel"),
        ({"shape": "many"}, "cannot be read"),
    ],
)
def test_a_contract_that_cannot_be_is_refused(changed: dict[str, object], line: str) -> None:
    with pytest.raises(UserError, match=line):
        Contract.from_json(CONTRACT.to_json() | changed)


def test_one_without_classes_is_refused() -> None:
    with pytest.raises(UserError, match="the contract has no 'classes'"):
        Contract.from_json({"kind": "image", "shape": [1, 2, 2]})


def test_a_column_in_other_units_is_warned_of() -> None:
    contract = Contract("table", ("cat", "dog"), (2,), mean=(5.0, 90.0), std=(4.0, 20.0), columns=("age", "weight"))
    near, far = ((7.0, 2.0), (100.0, 30.0)), ((90_000.0, 30.0), (7.0, 2.0))
    rows = [[9.0, 130.0], [5.0, 70.0]]
    assert contract.warnings(replace(table(rows, near), columns=("age", "weight"))) == []
    rows = [[90_010.0, 9.0], [89_990.0, 5.0]]
    (warning,) = contract.warnings(replace(table(rows, far), columns=("weight", "age")))
    assert "column 'weight' has mean 9e+04, but the federation's contract has 90 ± 20" in warning
