"""Federations: label counts, words for a client's classes, restriction, saved splits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedskew.data import IID, Counts, Dirichlet, Federation, Saved, federation
from fedskew.data.dataset import Dataset, Samples
from fedskew.errors import UserError


def dataset(labels: np.ndarray, classes: int) -> Dataset:
    samples = Samples(np.zeros((len(labels), 1), np.float32), np.asarray(labels, np.int64))
    return Dataset("toy", "table", tuple(f"c{c}" for c in range(classes)), samples, samples)


LABELS = np.random.default_rng(0).integers(0, 5, 1000)
TOY = dataset(LABELS, 5)


def by_counts(rows: list[list[int]], tmp_path: Path) -> Federation:
    path = tmp_path / "counts.csv"
    path.write_text("\n".join(",".join(map(str, row)) for row in rows))
    return federation(TOY, Counts(path))


def test_label_counts_are_those_of_each_clients_samples() -> None:
    fed = federation(TOY, Dirichlet(8, 0.2), seed=3)
    expected = [np.bincount(LABELS[part], minlength=5).tolist() for part in fed.indices]
    assert fed.label_counts.tolist() == expected
    assert fed.sizes.tolist() == [len(part) for part in fed.indices]
    assert fed.clients == 8
    assert fed.unused == 0
    assert fed.partition == {"name": "dirichlet", "clients": 8, "beta": 0.2, "min_size": 10}
    assert fed.seed == 3


def test_vacant_minority_and_majority_split_at_an_even_share(tmp_path: Path) -> None:
    fed = by_counts([[0, 10, 20, 10, 60], [20, 20, 20, 20, 20], [0, 0, 7, 0, 0], [1, 2, 3, 4, 5]], tmp_path)
    assert (fed.vacant(0), fed.minority(0), fed.majority(0)) == ((0,), (1, 2, 3), (4,))
    assert (fed.vacant(1), fed.minority(1), fed.majority(1)) == ((), (0, 1, 2, 3, 4), ())
    assert (fed.vacant(2), fed.minority(2), fed.majority(2)) == ((0, 1, 3, 4), (), (2,))
    assert (fed.vacant(3), fed.minority(3), fed.majority(3)) == ((), (0, 1, 2), (3, 4))


def test_restriction_keeps_held_out_and_server_samples_of_its_labels() -> None:
    fed = federation(TOY, Dirichlet(4, 0.5), seed=1).give_server(0.1).hold_out(0.25)
    restricted = fed.restrict([0, 3])
    for before, after in zip(fed.held_out, restricted.held_out, strict=True):
        assert after.tolist() == [row for row in before.tolist() if LABELS[row] in (0, 3)]
    given_rows = [row for row in fed.server_samples.tolist() if LABELS[row] in (0, 3)]
    assert restricted.server_samples.tolist() == given_rows
    assert fed.unused == 0
    assert restricted.unused == np.isin(LABELS, (1, 2, 4)).sum()


def test_the_smallest_share_that_a_message_names_gives_the_server_a_sample_of_each_class() -> None:
    fed = federation(dataset(np.arange(100) % 29, 29), IID(2))
    with pytest.raises(UserError, match=r"expected at least 0\.29$"):
        fed.give_server(0.28)
    assert len(fed.give_server(0.29).server_samples) == 29  # 0.29 · 100 is 28.999… in floating point


def test_a_share_too_small_to_hold_out_a_sample_is_refused() -> None:
    with pytest.raises(UserError, match="no client holds out a sample; expected more samples"):
        federation(TOY, Dirichlet(4, 0.5), seed=1).hold_out(1e-9)


@pytest.mark.parametrize("change", [lambda fed: fed.hold_out(0.25), lambda fed: fed.give_server(0.1)])
def test_a_federation_with_other_samples_than_the_clients_is_not_split_again(
    change: Callable[[Federation], Federation],
) -> None:
    fed = change(federation(TOY, Dirichlet(4, 0.5), seed=1))
    assert fed.resplit(1) is fed
    with pytest.raises(UserError, match=r"cannot be split again with seed 2; .* client_test or server_data"):
        fed.resplit(2)


@given(seed=st.integers(0, 1000), labels=st.sets(st.integers(0, 4)))
def test_restriction_keeps_clients_and_drops_other_labels(seed: int, labels: set[int]) -> None:
    fed = federation(TOY, Dirichlet(12, 0.1, min_size=1), seed=seed)
    restricted = fed.restrict(sorted(labels))
    kept = np.isin(np.arange(5), list(labels))
    assert restricted.clients == 12
    assert (restricted.label_counts == fed.label_counts * kept).all()
    assert all(np.isin(new, old).all() for new, old in zip(restricted.indices, fed.indices, strict=True))


def test_restriction_refuses_an_unknown_label() -> None:
    with pytest.raises(UserError, match="label is 5; expected 0 to 4"):
        federation(TOY, IID(2)).restrict([0, 5])


def test_a_hundred_thousand_clients() -> None:
    labels = np.arange(300_000) % 5
    fed = federation(dataset(labels, 5), IID(100_000))
    assert fed.label_counts.shape == (100_000, 5)
    assert fed.restrict([0]).sizes.sum() == 60_000


def test_a_federation_by_name() -> None:
    fed = federation("digits", Dirichlet(clients=10, beta=0.1), seed=1)
    assert fed.dataset.name == "digits"
    assert fed.label_counts.shape == (10, 10)


def test_a_seed_may_be_a_numpy_number(tmp_path: Path) -> None:
    fed = federation("digits", IID(clients=2), seed=np.int64(3))  # type: ignore[arg-type]
    fed.save_split(tmp_path / "split.json")
    assert json.loads((tmp_path / "split.json").read_text())["seed"] == 3
    assert repr(fed).endswith("seed=3)")


def test_a_rule_by_its_bare_name_is_refused() -> None:
    with pytest.raises(UserError, match="expected a rule, for example"):
        federation(TOY, "dirichlet")  # type: ignore[arg-type]


def test_a_saved_split_comes_back_whatever_the_seed(tmp_path: Path) -> None:
    fed = federation(TOY, Dirichlet(8, 0.2), seed=3)
    fed.save_split(tmp_path / "new folder" / "split.json")
    again = federation(TOY, Saved(tmp_path / "new folder" / "split.json"), seed=99)
    assert again.hash == fed.hash
    assert all((a == b).all() for a, b in zip(again.indices, fed.indices, strict=True))
    assert [path.name for path in (tmp_path / "new folder").iterdir()] == ["split.json"]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "split.json"
    federation(TOY, IID(4)).save_split(path)
    return path


def test_a_split_of_other_data_is_refused(saved: Path) -> None:
    with pytest.raises(UserError, match="with 1000 training samples; this one has 1000, with other labels"):
        federation(dataset(LABELS[::-1], 5), Saved(saved))
    with pytest.raises(UserError, match="this one has 999"):
        federation(dataset(LABELS[1:], 5), Saved(saved))


def damage(content: dict[str, object], how: str) -> str:
    clients = content["clients"]
    assert isinstance(clients, list)
    if how == "moved":
        clients[0].append(clients[1].pop())
    elif how == "text":
        clients[0][0] = "zero"
    elif how == "truth":
        clients[0][0] = True
    elif how == "flat":
        content["clients"] = [1, 2, 3]
    elif how == "foreign":
        content["format"] = "something else"
    text = json.dumps(content)
    return text[: len(text) // 2] if how == "cut" else text


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("moved", "does not match its hash"),
        ("text", "does not match its hash"),
        ("truth", "does not match its hash"),
        ("flat", "does not match its hash"),
        ("foreign", "not a saved split"),
        ("cut", "not JSON"),
    ],
)
def test_a_damaged_split_is_refused(saved: Path, how: str, reason: str) -> None:
    saved.write_text(damage(json.loads(saved.read_text()), how))
    with pytest.raises(UserError, match=reason):
        federation(TOY, Saved(saved))


def test_a_missing_split_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        federation(TOY, Saved(tmp_path / "none.json"))
    with pytest.raises(UserError, match="cannot write"):
        federation(TOY, IID(2)).save_split(tmp_path)
    with pytest.raises(UserError, match=r"cannot save a split as ''; expected a file name"):
        federation(TOY, IID(2)).save_split("")
