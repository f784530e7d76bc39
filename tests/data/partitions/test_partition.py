"""What holds for every partition rule, and what each rule promises."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedskew.data import (
    IID,
    PARTITIONS,
    Balanced,
    Counts,
    Dirichlet,
    DomainDirichlet,
    DoubleImbalance,
    LabelImbalance,
    LabelsPerClient,
    OneClass,
    Quantity,
    QuantityImbalance,
    Shards,
    make_partition,
)
from fedskew.data.partitions import dirichlet
from fedskew.data.partitions.rule import IntArray, Labels, Partition, split_hash, stable_order
from fedskew.data.partitions.saved import write_split
from fedskew.errors import UserError

CIFAR10 = np.repeat(np.arange(10), 5000)
SHUFFLED = np.random.default_rng(0).integers(0, 10, 3000)


def counts_of(parts: list[IntArray], labels: IntArray, classes: int) -> IntArray:
    return np.array([np.bincount(labels[part], minlength=classes) for part in parts])


def files(folder: Path, labels: IntArray, classes: int, clients: int) -> dict[str, Path]:
    """Files for the rules that read one: an even share of each class, and an IID split."""
    share = np.bincount(labels, minlength=classes) // clients
    csv = folder / "counts.csv"
    header = ",".join(map(str, range(classes)))  # without one, a row that happens to list the classes would be it
    csv.write_text("\n".join([header, *[",".join(map(str, share))] * clients]))
    saved = folder / "split.json"
    write_split(saved, IID(clients).split(labels, classes, 0) if clients <= len(labels) else [], labels, {}, 0)
    return {"counts": csv, "saved": saved}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("partitions")


@pytest.mark.parametrize("name", sorted(PARTITIONS))
@given(data=st.data())
def test_every_rule_keeps_the_invariants_or_says_why_not(name: str, folder: Path, data: st.DataObject) -> None:
    classes = data.draw(st.integers(2, 12), "classes")
    sizes = data.draw(st.lists(st.integers(1, 60), min_size=classes, max_size=classes), "class sizes")
    labels = np.random.default_rng(sum(sizes)).permutation(np.repeat(np.arange(classes), sizes))
    clients = data.draw(st.integers(1, 15), "clients")
    if name in ("shards", "quantity"):  # which need a number of clients that the classes divide
        clients = classes * data.draw(st.integers(1, 3), "clients per class")
    offered: dict[str, object] = {
        "clients": clients,
        "beta": data.draw(st.floats(0.05, 10), "beta"),
        "min_size": data.draw(st.integers(1, 5), "min_size"),
        "shards": data.draw(st.integers(1, 6), "shards"),
        "labels_per_client": data.draw(st.integers(1, 12), "labels_per_client"),
        "exponent": data.draw(st.floats(0.1, 3), "exponent"),
        "upper": data.draw(st.floats(0.05, 1), "upper"),
        "path": files(folder, labels, classes, clients).get(name),
    }
    seed = data.draw(st.integers(0, 2**32), "seed")
    params = {key: value for key, value in offered.items() if key in PARTITIONS[name].__dataclass_fields__}
    rule = make_partition(name, **params)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dirichlet, "MAX_VALUES", 3_000_000)  # give up after a tenth of a second
            site = np.arange(len(labels)) % clients
            parts = rule.split(labels, classes, seed, domain=np.arange(len(labels)) % 2, site=site)
    except UserError:
        return

    assert len(parts) == min(clients, len(labels))
    everything = np.concatenate(parts)
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts)
    assert len(np.unique(everything)) == len(everything)
    assert min(map(len, parts)) >= rule.smallest
    if rule.uses_all:
        assert len(everything) == len(labels)
    again = rule.split(labels, classes, seed, domain=np.arange(len(labels)) % 2, site=site)
    assert split_hash(again) == split_hash(parts)


GOLDEN = {
    "dirichlet": (Dirichlet(10, beta=0.1), "af84e2133fb9a93d2382638b9edea8bfdd0c9ec0142c89804281c77741877230"),
    "domain-dirichlet": (DomainDirichlet(8, 0.1), "94195dd0602445bc368345a5d866366b2318875c7429deb12c405a13be6d2029"),
    "shards": (Shards(10), "625622a915a811f8da70a0e73a4e6ee7563a60e588e5b259dda7687bd0619c3e"),
    "quantity": (Quantity(10), "23b30192379c2cce13fd639957e85e28d0e3880f2b16d1f2f05446b9f97472ba"),
    "labels": (LabelsPerClient(10), "f9a6c06f4019fe0809f97127125fa078505dae25243c9d282e388782a01301c0"),
    "fedgr-label": (LabelImbalance(10, 3), "29253037a3d1e8f2a1f85f2fdbeeb1d97e2189e2828ac81fc382321a1975f2c7"),
    "fedgr-quantity": (QuantityImbalance(10), "dc20c28532db6310cdcdc39d5a0e4a16b15f6749b2760a3856b6c4744d1f7a5d"),
    "fedgr-double": (DoubleImbalance(10, 3), "e9976b3d86883dc6a65880d71cd2b593984c87d8303da4a7d4d975abe44cef47"),
    "one-class": (OneClass(20), "4685bcdda1caab58d3b8a2bca6053ebd61ad4d9274813877a9ef6e6b26fcce3e"),
    "balanced": (Balanced(10), "bc033c1c91005f1685f177f0dec96ecc004053c55df193eab3a7855a2f90097d"),
    "iid": (IID(10), "9123d868bdb4915d3b74b2b9dc40dc227418f2416ac9f61665f35d172defff29"),
}


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_the_same_seed_gives_the_same_split_on_every_machine(name: str) -> None:
    rule, expected = GOLDEN[name]
    labels = np.arange(1000) * 7 % 10
    assert split_hash(rule.split(labels, 10, seed=7, domain=np.arange(1000) % 3)) == expected


def test_every_rule_without_a_file_has_a_golden_hash() -> None:
    assert set(GOLDEN) == set(PARTITIONS) - {"column", "counts", "saved"}


@pytest.mark.parametrize(
    "rule",
    [rule for name, (rule, _) in sorted(GOLDEN.items())],
    ids=sorted(GOLDEN),
)
def test_another_seed_gives_another_split(rule: Partition) -> None:
    domain = np.arange(len(SHUFFLED)) % 2
    first, second = (rule.split(SHUFFLED, 10, seed, domain=domain) for seed in (0, 1))
    assert split_hash(first) != split_hash(second)


@pytest.mark.parametrize("shards", [2, 4, 5])
def test_shards_give_equal_sizes_and_few_labels(shards: int) -> None:
    counts = counts_of(Shards(100, shards).split(CIFAR10, 10, 3), CIFAR10, 10)
    assert (counts.sum(axis=1) == 500).all()
    assert (np.count_nonzero(counts, axis=1) <= shards).all()
    assert np.count_nonzero(counts, axis=1).max() == shards
    assert (counts % (500 // shards) == 0).all()


def test_shards_are_cut_in_file_order() -> None:
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(5), 40))
    for part in Shards(10, 2).split(labels, 5, 0):
        for c in np.unique(labels[part]):
            members = np.flatnonzero(labels == c)
            held = np.isin(members, part)
            assert all(
                (held[start : start + 10].all() or not held[start : start + 10].any()) for start in range(0, 40, 10)
            )


def test_quantity_lays_labels_out_in_pairs_as_the_fedvls_code() -> None:
    counts = counts_of(Quantity(10, 2).split(CIFAR10, 10, 0), CIFAR10, 10)
    for client in range(10):
        pair = client // 2 * 2
        assert np.flatnonzero(counts[client]).tolist() == [pair, pair + 1]
    assert (counts.sum(axis=0) == 5000).all()


def test_quantity_ranges_are_the_papers() -> None:
    wide = np.array([counts_of(Quantity(10, 2).split(CIFAR10, 10, s), CIFAR10, 10) for s in range(30)])
    first = wide[:, 0, 0]
    assert 250 <= first.min() < 1000
    assert 4000 < first.max() < 5000

    labels = np.repeat(np.arange(100), 500)
    narrow = counts_of(Quantity(10, 20, upper=0.5).split(labels, 100, 0), labels, 100)
    smaller = narrow[0][narrow[0] > 0]
    assert len(smaller) == 20
    assert smaller.min() >= 25
    assert smaller.max() < 250
    sizes = narrow.sum(axis=1)
    assert (sizes[0::2] < sizes[1::2]).all()


def test_labels_rule_gives_each_client_its_own_class_and_exactly_m() -> None:
    counts = counts_of(LabelsPerClient(30, 3).split(CIFAR10, 10, 0), CIFAR10, 10)
    assert (np.count_nonzero(counts, axis=1) == 3).all()
    assert (counts[np.arange(30), np.arange(30) % 10] > 0).all()
    assert counts.sum() == 50_000
    for column in counts.T:
        assert np.ptp(column[column > 0]) <= 1


@pytest.mark.parametrize("each", [1, 2, 3, 4, 7, 10])
def test_fedgr_deals_exactly_m_labels_and_every_class_about_equally_often(each: int) -> None:
    counts = counts_of(LabelImbalance(100, each).split(CIFAR10, 10, 0), CIFAR10, 10)
    assert (np.count_nonzero(counts, axis=1) == each).all()
    owners = np.count_nonzero(counts, axis=0)
    assert np.ptp(owners) <= 1
    assert counts.sum() == 50_000


def test_fedgr_double_imbalance_follows_the_power_law_within_each_client() -> None:
    counts = counts_of(DoubleImbalance(100, 2, exponent=1.0).split(CIFAR10, 10, 0), CIFAR10, 10)
    ranked = -np.sort(-counts, axis=1)
    assert (ranked[:, 0] == 250).all()  # 5,000 samples of a class among its 20 owners
    assert (ranked[:, 1] == 125).all()
    assert (ranked[:, 2:] == 0).all()


def test_fedgr_quantity_imbalance_gives_all_labels_in_a_power_law() -> None:
    labels = np.repeat(np.arange(10), 2520 * 10)
    counts = counts_of(QuantityImbalance(10, exponent=1.0).split(labels, 10, 0), labels, 10)
    assert (-np.sort(-counts, axis=1) == 2520 // np.arange(1, 11)).all()
    assert len({tuple(row) for row in counts.tolist()}) == 10  # each client has its own order


def test_pkd_splits_are_globally_balanced_by_the_smallest_class() -> None:
    labels = np.repeat(np.arange(3), [50, 42, 60])
    one = counts_of(OneClass(6).split(labels, 3, 0), labels, 3)
    assert (np.count_nonzero(one, axis=1) == 1).all()
    assert one.sum(axis=0).tolist() == [42, 42, 42]
    assert (counts_of(Balanced(4).split(labels, 3, 0), labels, 3) == 10).all()


def test_iid_sizes_differ_by_one_at_most() -> None:
    sizes = [len(part) for part in IID(7).split(SHUFFLED, 10, 0)]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (IID(3001), "at most 3000 clients"),
        (Dirichlet(301), "at most 300 clients"),
        (Dirichlet(250, beta=0.01), "use fewer clients, a larger beta or a smaller min_size"),
        (Dirichlet(2500, beta=0.01, min_size=1), "use fewer clients or a larger beta$"),
        (Shards(7, 2), "use a multiple of 5 clients, such as 5"),
        (Shards(1500, 2), "samples to share among 300 shards; expected at least one each"),
        (Quantity(10, 11), "but there are 10 classes"),
        (Quantity(3, 2), "use at least 5 clients"),
        (Quantity(9, 2), "use 5 clients"),
        (LabelsPerClient(10, 11), "but there are 10 classes"),
        (LabelsPerClient(3000, 5), "expected at least one each"),
        (LabelImbalance(10, 11), "but there are 10 classes"),
        (DoubleImbalance(3000, 2), "expected at least one each"),
        (QuantityImbalance(3000), "expected at least one each"),
        (OneClass(9), "use at least 10 clients"),
        (OneClass(3000), "expected at least one each"),
        (Balanced(400), "expected at least one each"),
    ],
)
def test_a_split_that_cannot_exist_is_refused_with_the_reason(rule: Partition, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        rule.split(SHUFFLED, 10, 0)


@pytest.mark.parametrize("rule", [Balanced(1), LabelsPerClient(11, 1), Shards(11, 1)])
def test_fewer_clients_are_not_advised_for_a_class_without_samples(rule: Partition) -> None:
    with pytest.raises(UserError, match=r"class '10' has no samples to share; .* or use another partition$"):
        rule.split(SHUFFLED, 11, 0)


def test_a_domain_that_is_too_small_is_named() -> None:
    domain = (np.arange(len(SHUFFLED)) < 15).astype(np.int64)
    with pytest.raises(UserError, match=r"'domain-dirichlet' \(clients=4, .*\): domain 1 .*use at most 1 client$"):
        DomainDirichlet(4).split(SHUFFLED, 10, 0, domain=domain)


def test_one_class_names_the_class_that_is_too_small() -> None:
    labels = np.repeat(np.arange(3), [50, 2, 60])
    with pytest.raises(UserError, match="class '1' has 2 samples to share among 3 clients"):
        OneClass(9).split(labels, 3, 0)


@pytest.mark.parametrize(
    ("name", "params", "reason"),
    [
        ("dirichelt", {"clients": 10}, "did you mean 'dirichlet'"),
        ("dirichlet", {"clients": 10, "bta": 1}, "did you mean 'beta'.*its parameters: clients, beta, min_size"),
        ("iid", {"clients": 10, "beta": 1}, "no parameter 'beta'; its parameters: clients"),
        ("dirichlet", {}, "needs 'clients'"),
        ("dirichlet", {"clients": 0}, "clients is 0; expected a whole number ≥ 1"),
        ("dirichlet", {"clients": 2.5}, "clients is 2.5"),
        ("dirichlet", {"clients": "10"}, "clients is '10'"),
        ("dirichlet", {"clients": True}, "clients is True"),
        ("dirichlet", {"clients": 10, "beta": 0}, "beta is 0; expected a finite number above 0"),
        ("dirichlet", {"clients": 10, "beta": float("inf")}, "beta is inf"),
        ("dirichlet", {"clients": 10, "beta": float("nan")}, "beta is nan"),
        ("dirichlet", {"clients": 10, "beta": "0.1"}, "beta is '0.1'"),
        ("dirichlet", {"clients": 10, "min_size": 0}, "min_size is 0"),
        ("shards", {"clients": 10, "shards": 0}, "shards is 0"),
        ("labels", {"clients": 10, "labels_per_client": -1}, "labels_per_client is -1"),
        ("quantity", {"clients": 10, "upper": 1.5}, "upper is 1.5; expected .* at most 1"),
        ("fedgr-double", {"clients": 10, "exponent": 0}, "exponent is 0"),
        ("domain-dirichlet", {"clients": 4, "per_domain": 4}, "per_domain is 4; expected a list"),
        ("counts", {"path": 3}, "path is 3"),
        ("saved", {"path": ""}, "path is ''"),
    ],
)
def test_a_wrong_parameter_is_named(name: str, params: dict[str, object], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        make_partition(name, **params)


@pytest.mark.parametrize(
    ("labels", "seed", "reason"),
    [
        (np.array([0, 1, 2]), 0, "labels range from 0 to 2; expected 0 to 1"),
        (np.array([0, -1]), 0, "labels range from -1"),
        (np.array([0.0, 1.0]), 0, "one whole number per sample"),
        (np.array([], np.int64), 0, "there are no labels; expected at least one sample"),
        (np.array([0, 1]), -1, "seed is -1"),
    ],
)
def test_labels_and_seed_are_checked(labels: np.ndarray, seed: int, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        IID(1).split(labels, 2, seed)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([[0, 1], [1, 2]], "sample 1 is assigned more than once"),
        ([[0, 1], [2]], "sample 3 goes to no client"),
        ([[0, 1, 2, 3], []], "client 1 gets 0 samples; expected at least 1$"),
        ([[0, 1, 2, 3, 4]], "the sample index 4 does not exist; expected 0 to 3"),
    ],
)
def test_a_rule_of_ones_own_is_checked_too(parts: list[list[int]], reason: str) -> None:
    class Own(Partition):
        name = "own"

        def draw(self, labels: object, seed: int) -> list[IntArray]:
            return [np.array(part, np.int64) for part in parts]

    with pytest.raises(UserError, match=reason):
        Own().split(np.array([0, 0, 1, 1]), 2, 0)


@pytest.mark.parametrize(
    ("drawn", "reason"),
    [
        (None, "draw returned None; expected a list with one array of"),
        ([0, 1], "draw returned a list .*; expected a"),
        ([np.array([True, False])], "draw returned an array of bool; expected sample indices: whole numbers"),
        ([[], np.array([0.0, 1.5])], "draw returned an array of float64; expected sample indices"),
    ],
)
def test_a_rule_that_draws_no_indices_is_refused(drawn: object, reason: str) -> None:
    class Own(Partition):
        name = "own"

        def draw(self, labels: object, seed: int) -> list[IntArray]:
            return drawn  # type: ignore[return-value]

    with pytest.raises(UserError, match=reason):
        Own().split(np.array([0, 0, 1, 1]), 2, 0)


@dataclass(frozen=True)
class Halves(Partition):
    """Half as many clients as the parameter says, as if two sites merged."""

    clients: object = None

    def draw(self, labels: Labels, seed: int) -> list[IntArray]:
        return np.array_split(np.arange(len(labels)), self.clients // 2 if isinstance(self.clients, int) else 4)


@pytest.mark.parametrize("clients", [8, ("a", "b")])
def test_a_rule_returns_as_many_clients_as_its_parameter_says(clients: object) -> None:
    """The configuration of a run repeats the parameter. With another number, it would not repeat the run."""
    with pytest.raises(UserError) as error:
        Halves(clients).split(SHUFFLED, 10, 0)
    assert str(error.value).endswith(f": draw returned 4 clients; expected {clients}, as clients={clients} says")
    assert len(Halves().split(SHUFFLED, 10, 0)) == 4, "without a number, the rule may choose one"


def test_a_module_that_ends_the_program_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script_that_exits.py").write_text("import sys\n\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="cannot import 'script_that_exits': SystemExit: 0"):
        make_partition("script_that_exits:Rule")


def test_a_description_builds_the_rule_again() -> None:
    for rule in itertools.chain((rule for rule, _ in GOLDEN.values()), [Counts(Path("a.csv"))]):
        described = {key: str(value) if key == "name" else value for key, value in rule.describe().items()}
        again = make_partition(str(described.pop("name")), **described)
        assert again.describe() == rule.describe()


def test_numpy_parameters_are_described_as_python_numbers() -> None:
    rule = DomainDirichlet(clients=np.int64(4), beta=np.float64(0.5), per_domain=(np.int64(1), 3))
    assert [type(value) for value in rule.describe().values()] == [str, int, float, int, tuple]
    assert json.loads(json.dumps(rule.describe()))["per_domain"] == [1, 3]


@dataclass(frozen=True)
class Cut(Partition):
    """Two clients, cut at the first of the places."""

    places: list[int] = field(default_factory=lambda: [2])

    def draw(self, labels: Labels, seed: int) -> list[IntArray]:
        return np.split(np.arange(len(labels)), self.places[:1])


def test_a_parameter_with_a_default_factory_need_not_be_given() -> None:
    assert make_partition(f"{__name__}:Cut") == Cut()


def test_a_parameter_called_name_is_refused_like_any_other() -> None:
    with pytest.raises(UserError, match="partition 'iid' has no parameter 'name'"):
        make_partition("iid", name="shards", clients=3)


@pytest.mark.parametrize("largest", [0, 9, 70_000, 2**40])
def test_stable_order_is_that_of_numpy(largest: int) -> None:
    keys = np.random.default_rng(0).integers(0, largest + 1, 5000) // 7 * 7
    assert (stable_order(keys) == np.argsort(keys, kind="stable")).all()
    assert len(stable_order(keys[:0])) == 0
