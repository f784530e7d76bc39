"""`fedskew.compare`: several methods on the same federations, from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import fedskew as fs
from fedskew.experiment.config import PartitionConfig, load_yaml
from fedskew.experiment.preparation import build_federation
from fedskew.methods.fedvls import FedVLS

SHORT: dict[str, Any] = {"rounds": 1, "local_epochs": 1, "clients_per_round": 2}
RULE = fs.Dirichlet(clients=4, beta=0.5)


@pytest.fixture(scope="module")
def comparison() -> fs.Comparison:
    return fs.compare("digits", ["fedavg", "fedvls"], seeds=2, partition=RULE, **SHORT)


def test_every_method_meets_every_seed(comparison: fs.Comparison) -> None:
    assert [method.label for method in comparison.methods] == ["fedavg", "fedvls"]
    assert [[run.seed for run in method.runs] for method in comparison.methods] == [[0, 1], [0, 1]]
    assert all(method.counted == method.counted_runs == method.runs for method in comparison.methods)
    first, second = (fs.federation("digits", RULE, seed=seed) for seed in (0, 1))
    for method in comparison.methods:
        counts = [run.label_counts for run in method.runs]
        np.testing.assert_array_equal(counts[0], first.label_counts)
        np.testing.assert_array_equal(counts[1], second.label_counts)


def test_a_comparison_has_what_its_runs_have_alone(comparison: fs.Comparison) -> None:
    alone = fs.run(fs.federation("digits", RULE, seed=1), "fedvls", **SHORT)
    assert comparison.methods[1].runs[1].accuracy == alone.accuracy


def test_a_comparison_as_a_table(comparison: fs.Comparison) -> None:
    frame = comparison.to_frame()
    assert frame[["method", "seed"]].values.tolist() == [["fedavg", 0], ["fedavg", 1], ["fedvls", 0], ["fedvls", 1]]
    assert frame["accuracy"].tolist() == [run.accuracy for run in comparison.runs]
    assert "fedvls" in repr(comparison)
    assert len(repr(comparison)) < 1000
    table, _, label_map = comparison._repr_html_().partition("</table>")
    assert table.count("<tr>") == 1 + len(comparison.methods)
    assert "</table>" in label_map


def test_a_federation_gives_the_first_seed_and_may_keep_its_split() -> None:
    fed = fs.federation("digits", RULE, seed=5)
    varied = fs.compare(fed, ["fedavg"], seeds=2, **SHORT)
    assert [run.seed for run in varied.runs] == [5, 6]
    kept = fs.compare(fed, ["fedavg"], seeds=[5, 6], same_split=True, **SHORT)
    for run in kept.runs:
        np.testing.assert_array_equal(run.label_counts, fed.label_counts)
    assert varied.runs[0].accuracy == kept.runs[0].accuracy
    assert varied.runs[1].label_counts.tolist() != kept.runs[1].label_counts.tolist()


@pytest.mark.parametrize("rule", [None, RULE])
def test_a_seed_of_the_partition_gives_all_seeds_one_split(rule: fs.Partition | None) -> None:
    config = fs.Config(partition=PartitionConfig("dirichlet", 4, 7, {"beta": 0.5}))
    drawn = fs.federation("digits", RULE, seed=7)
    found = fs.compare(fs.load("digits"), ["fedavg"], 2, partition=rule, config=config, **SHORT)
    assert [(run.seed, run.config.partition.seed) for run in found.runs] == [(0, 7), (1, 7)]
    for run in found.runs:
        np.testing.assert_array_equal(run.label_counts, drawn.label_counts)


def test_a_federation_that_is_already_split_has_one_seed_of_its_split() -> None:
    fed = fs.federation("digits", RULE, seed=5)
    found = fs.compare(fed, ["fedavg"], 2, **SHORT, **{"partition.seed": 5})
    assert [(run.seed, run.config.partition.seed) for run in found.runs] == [(5, 5), (6, 5)]
    with pytest.raises(fs.UserError, match=r"partition.seed is 7, but the federation is already split with seed 5"):
        fs.compare(fed, ["fedavg"], 2, **SHORT, **{"partition.seed": 7})


def test_the_configuration_of_a_given_federation_or_partition_does_not_limit_the_clients() -> None:
    config = fs.Config(partition=PartitionConfig(clients=1))
    for data, rule in ((fs.federation("digits", RULE), None), ("digits", RULE)):
        found = fs.compare(data, ["fedavg"], 1, partition=rule, config=config, **SHORT)
        assert found.config.partition.clients == 4


def test_the_options_for_other_data_are_not_recorded(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("x,other,label\n" + "".join(f"{i + 0.5},{'ab'[i % 2]},{'cd'[i // 30]}\n" for i in range(60)))
    config = fs.Config(data=str(table), data_params={"label": "other"})
    found = fs.compare(table, ["fedavg"], 1, partition=fs.IID(clients=2), config=config, **SHORT)
    assert found.classes == ("c", "d")
    assert found.config.data_params == {}


def test_a_table_is_split_by_its_column_of_sites(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("x,hospital,label\n" + "".join(f"{i + 0.5},{'AB'[i % 2]},{'cd'[i // 30]}\n" for i in range(60)))
    found = fs.compare(table, ["fedavg"], 1, partition=fs.Column("hospital"), out=tmp_path / "runs", **SHORT)
    assert found.client_labels == ("A", "B")
    [folder] = (tmp_path / "runs").iterdir()
    np.testing.assert_array_equal(build_federation(load_yaml(folder / "config.yaml")).label_counts, found.label_counts)


def test_methods_as_mappings_and_objects_and_a_model_of_ones_own() -> None:
    weights = [{"name": "fedvls", "distill_weight": weight} for weight in (0.1, 0.5)]
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    found = fs.compare("digits", [*weights, fs.make_method("fedprox")], 1, partition=RULE, model=model, **SHORT)
    assert len(found.methods) == 3
    assert [method.method for method in found.methods] == ["fedvls", "fedvls", "fedprox"]
    assert len({method.label for method in found.methods}) == 3


def test_methods_in_an_array() -> None:
    found = fs.compare("digits", np.array(["fedavg", "fedprox"]), 1, partition=RULE, **SHORT)
    assert [method.label for method in found.methods] == ["fedavg", "fedprox"]


def test_the_method_of_the_configuration_is_ignored_with_its_parameters() -> None:
    config = fs.Config(method="fedprox", method_params={"mu": 1.0})
    methods = [FedVLS(distill_weight=0.5), "fedvls", "fedprox"]
    found = fs.compare(fs.federation("digits", RULE), methods, 1, config=config, **SHORT)
    params = [run.config.method_params for run in found.runs]
    assert [values.get("distill_weight", values.get("mu")) for values in params] == [0.5, 0.1, 0.01]


def test_folders_are_found_again_and_their_configuration_repeats_the_run(tmp_path: Path) -> None:
    once = fs.compare("digits", ["fedavg"], 1, partition=RULE, out=tmp_path, **SHORT)
    [folder] = [path for path in tmp_path.iterdir() if path.is_dir()]
    again = fs.compare("digits", ["fedavg"], 1, partition=RULE, out=tmp_path, **SHORT)
    assert again.runs[0].accuracy == once.runs[0].accuracy
    assert len(list(tmp_path.iterdir())) == 1
    loaded = fs.load_run(folder)
    assert loaded.accuracy == once.runs[0].accuracy
    assert loaded.to_frame()["accuracy"].iloc[-1] == loaded.accuracy
    assert load_yaml(folder / "config.yaml").partition.params == {"beta": 0.5, "min_size": 10}
    assert sum(p.numel() for p in loaded.model.parameters()) == sum(p.numel() for p in once.runs[0].model.parameters())


def test_data_in_memory() -> None:
    y = np.arange(120) % 3
    x = np.random.default_rng(0).normal(size=(120, 4)) + y[:, None]
    found = fs.compare((x, y), ["fedavg"], 2, partition=fs.IID(clients=3), rounds=1)
    assert [run.config.data for run in found.runs] == ["arrays", "arrays"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"methods": "fedavg"}, "methods is 'fedavg'; expected a list, for example"),
        ({"methods": 5}, "methods is 5; expected a list, for example"),
        ({"methods": []}, r"methods is \[\]; expected a list"),
        ({"methods": iter(())}, "methods is .*; expected a list"),
        ({"methods": ["fedavg"], "config": "start.yaml"}, "config is 'start.yaml'; expected a fedskew.Config"),
        ({"methods": ["fedavg", "fedavg"]}, "method 'fedavg' is given twice with the same settings"),
        ({"methods": ["fedavgg"]}, "unknown method 'fedavgg'; did you mean 'fedavg'"),
        ({"methods": ["fedavg"], "seeds": 0}, "seeds is 0; expected a number of seeds, at least 1"),
        ({"methods": ["fedavg"], "seeds": [1, 1]}, r"seeds is \[1, 1\]; expected a number of seeds"),
        ({"methods": ["fedavg"], "seed": 3}, "seed is 3; expected seeds= in a comparison"),
        ({"methods": ["fedavg"], "method.mu": 3}, "method.mu is 3; expected methods= in a comparison"),
        ({"methods": ["fedavg"], "round": 3}, "unknown key 'round'; did you mean 'rounds'"),
    ],
)
def test_mistakes_get_one_line(arguments: dict[str, Any], line: str) -> None:
    with pytest.raises(fs.UserError, match=line):
        fs.compare("digits", partition=RULE, **arguments)
    with pytest.raises(fs.UserError, match="the federation is already split"):
        fs.compare(fs.federation("digits", RULE), ["fedavg"], partition=RULE)
