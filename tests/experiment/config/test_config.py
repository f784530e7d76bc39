"""The configuration of a run: read, checked, overridden, written, named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fedskew.errors import UserError
from fedskew.experiment.config import (
    KEYS,
    Config,
    PartitionConfig,
    config_hash,
    differing_keys,
    load_yaml,
    parse_assignments,
    parse_method,
    run_folder,
    run_name,
    with_values,
)
from fedskew.experiment.config.values import parse_yaml

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
params = st.dictionaries(
    st.text("abcdefgh_", min_size=1).filter(lambda name: name not in ("name", "rule", "clients", "seed")),
    scalars | st.lists(scalars, max_size=3),
    max_size=3,
)
configs = st.builds(
    Config,
    partition=st.builds(PartitionConfig, clients=st.integers(5, 9), params=params),
    method_params=params,
    rounds=st.integers(1, 1000),
    clients_per_round=st.none() | st.integers(1, 5),
    lr=st.floats(1e-300, 1e300),
    momentum=st.floats(0, 1, exclude_max=True),
    clip_norm=st.none() | st.floats(1e-9, 1e9),
    augment=st.lists(st.sampled_from(["crop", "flip"])).map(tuple),
    precision=st.sampled_from(["float32", "float64", "tf32", "bf16"]),
    eval_local=st.booleans(),
    data_dir=st.none() | st.just("/some where"),
)


def refusal(mapping: Any) -> str:
    with pytest.raises(UserError) as caught:
        Config.from_mapping(mapping)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@given(configs)
def test_yaml_and_json_give_back_the_same_configuration(config: Config) -> None:
    mapping = config.to_mapping()
    assert Config.from_mapping(yaml.safe_load(yaml.safe_dump(mapping, sort_keys=False))) == config
    again = Config.from_mapping(json.loads(json.dumps(mapping, allow_nan=False)))
    assert again == config
    assert config_hash(again) == config_hash(config)
    assert differing_keys(again, config) == []


def test_the_mapping_is_complete() -> None:
    assert set(Config().to_mapping()) == set(KEYS)
    assert all(spec.metadata["help"] for spec in KEYS.values() if spec.name != "partition")


def test_a_file_as_people_write_it(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "data: cifar10\n"
        "partition: {rule: dirichlet, beta: 5e-2, clients: 100}\n"
        "method: {name: fedvls+fedprox, distill_weight: 1e-1, fedprox: {mu: 1e-3}}\n"
        "lr: 1e-2\nweight_decay: '1e-5'\nrounds: 2e2\naugment: [crop, flip]\n"
    )
    config = load_yaml(path)
    assert config.partition == PartitionConfig("dirichlet", 100, None, {"beta": 0.05})
    assert (config.method, config.method_params) == ("fedvls+fedprox", {"distill_weight": 0.1, "fedprox.mu": 0.001})
    assert (config.lr, config.weight_decay, config.rounds) == (0.01, 1e-5, 200)
    assert config.augment == ("crop", "flip")


def test_short_forms(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("method: fedavg\npartition: iid\naugment: crop,flip\n")
    config = load_yaml(path)
    assert (config.method, config.partition.rule, config.augment) == ("fedavg", "iid", ("crop", "flip"))
    path.write_text("# nothing\n")
    assert load_yaml(path) == Config()


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("rounds", 0, "at least 1"),
        ("rounds", 2.5, "a whole number"),
        ("rounds", True, "a whole number"),
        ("rounds", "many", "a whole number"),
        ("rounds", 10**400, "a whole number"),
        ("rounds", 2**63, "at most"),
        ("seed", -1, "at least 0"),
        ("batch_size", None, "a whole number"),
        ("lr", 0, "above 0"),
        ("lr", float("nan"), "finite"),
        ("lr", "inf", "finite"),
        ("lr", 10**400, "finite"),
        ("lr", False, "finite"),
        ("lr", [0.1], "finite"),
        ("lr_decay", 1.5, "above 0 and of at most 1"),
        ("momentum", 1, "below 1"),
        ("momentum", -0.1, "of at least 0"),
        ("weight_decay", -1e-9, "of at least 0"),
        ("clip_norm", 0, "above 0"),
        ("clients_per_round", 0, "at least 1"),
        ("average", "sample", "did you mean 'samples'"),
        ("engine", "stack", "did you mean 'stacked'"),
        ("device", "cuda:", "cuda:N"),
        ("device", "gpu", "did you mean 'cuda'"),
        ("device", "cuda:0,cpu", "a list such as cuda:0,cuda:1"),
        ("device", "cuda:1,cuda:1", "each device once"),
        ("precision", "fp32", "did you mean 'tf32'"),
        ("eval_local", "yes please", "true or false"),
        ("augment", {"crop": 4}, "a list of names"),
        ("augment", ["crop", 3], "a name"),
        ("data", "", "a name"),
        ("model", 3, "a name"),
        ("method", None, "a name or a mapping"),
        ("method", {"name": "fedvls", "distill_weight": float("inf")}, "finite"),
        ("method", {"name": ["fedvls"]}, "a name"),
        ("partition", {"clients": 0}, "at least 1"),
        ("partition", {"seed": -3}, "at least 0"),
        ("partition", 7, "a rule's name or a mapping"),
    ],
)
def test_a_bad_value_is_named_with_what_was_expected(key: str, value: Any, expected: str) -> None:
    message = refusal({key: value})
    assert key in message
    assert expected in message


def test_python_callers_get_the_same_checks() -> None:
    with pytest.raises(UserError, match=r"lr is -1; expected a finite number above 0"):
        Config(lr=-1)
    with pytest.raises(UserError, match=r"'name' is a configuration key, so it cannot be a method parameter"):
        Config(method_params={"name": "x"})
    with pytest.raises(UserError, match="data_dir is an option of data; expected it beside data"):
        with_values(Config(), {"data.data_dir": "/tmp"})
    with pytest.raises(UserError, match=r"partition is .*PartitionConfig"):
        Config(partition={"rule": "iid"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mapping", "hint"),
    [
        ({"round": 3}, "'rounds'"),
        ({"batch-size": 3}, "'batch_size'"),
        ({"LR": 3}, "'lr'"),
        ({"clients": 3}, "partition: {rule: …, clients: 3}?"),
        ({"beta": 0.1}, "partition: {rule: …, beta: 0.1}?"),
        ({"partition.seed": None}, "partition: {rule: …, seed: null}?"),
        ({"data.name": "mnist"}, "data: {name: mnist}?"),
        ({"mu": 1}, "method: {name: …, mu: 1}?"),
        ({"method_params": {}}, "'method'"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest(mapping: dict[str, Any], hint: str) -> None:
    message = refusal(mapping)
    assert repr(next(iter(mapping))) in message
    assert f"did you mean {hint}" in message


def test_what_is_no_mapping_is_refused() -> None:
    assert "expected a mapping" in refusal(["rounds", 3])
    assert "expected text" in refusal({3: "rounds"})


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("rounds: 3\nlr: [1, 2\n", "line 3, column 1"),
        ("rounds: 3\nlr: 'x\n", "line 3, column 1"),
        ("a: b: c\n", "line 1, column 5"),
        ("rounds: 3\nrounds: 4\n", "line 2, column 1: the key 'rounds' is repeated"),
        ("lr: !!python/object:os.system x\n", "line 1, column 5"),
        ("rounds: 3\x00\n", "expected YAML"),
        ("lr: 2024-99-99\n", "expected YAML"),
        ("[" * 5000, "expected YAML"),
        ("rounds: none\n", "rounds is 'none'"),
        ("3\n", "expected a mapping"),
    ],
)
def test_a_broken_file_is_one_line_with_file_and_place(tmp_path: Path, content: str, expected: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(content)
    with pytest.raises(UserError) as caught:
        load_yaml(path)
    message = str(caught.value)
    assert str(path) in message
    assert expected in message
    assert "\n" not in message


def test_a_key_that_replaces_a_merged_one_is_not_repeated() -> None:
    merged = "a: {b: &base {x: 0, y: 1}, c: &new {<<: *base, x: 1}}\nd: {<<: *new, y: 2}\n"
    assert parse_yaml(merged, "text") == {"a": {"b": {"x": 0, "y": 1}, "c": {"x": 1, "y": 1}}, "d": {"x": 1, "y": 2}}
    with pytest.raises(UserError, match="line 1, column 49: the key 'x' is repeated"):
        parse_yaml("{a: {b: &base {x: 0}, c: &new {<<: *base, x: 1, x: 2}}, d: {<<: *new}}", "text")


def test_the_positive_class_may_be_a_number(tmp_path: Path) -> None:
    assert [Config(positive=name).positive for name in (1, "1", np.int64(1))] == ["1", "1", "1"]  # type: ignore[arg-type]
    (tmp_path / "run.yaml").write_text("positive: yes\n")
    with pytest.raises(UserError, match="positive is True; expected a name, in quotes if YAML reads it as something"):
        load_yaml(tmp_path / "run.yaml")


def test_an_unreadable_file_is_one_line(tmp_path: Path) -> None:
    binary = tmp_path / "weights.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "absent.yaml", tmp_path, binary):
        with pytest.raises(UserError, match=path.name):
            load_yaml(path)


def with_assignments(config: Config, assignments: list[str]) -> Config:
    return with_values(config, parse_assignments(assignments))


def test_overrides() -> None:
    config = with_assignments(
        Config(),
        ["method.distill_weight=5e-1", "lr=0.1", "partition.beta=0.05", "augment=[crop, flip]", "clip_norm="],
    )
    assert config.method_params == {"distill_weight": 0.5}
    assert config.partition.params == {"beta": 0.05}
    assert (config.lr, config.augment, config.clip_norm) == (0.1, ("crop", "flip"), None)


def test_a_parameter_of_one_part_of_a_method() -> None:
    config = with_assignments(Config(method="fedlmd+fedprox"), ["method.fedprox.mu=0.1"])
    assert config.method_params == {"fedprox.mu": 0.1}


@pytest.mark.parametrize("key", ["partition", "partition.rule"])
def test_another_rule_keeps_the_clients_and_drops_the_old_rules_parameters(key: str) -> None:
    base = Config(partition=PartitionConfig("dirichlet", 100, 7, {"beta": 0.1}))
    for order in (1, -1):
        config = with_assignments(base, [f"{key}=shards", "partition.shards=2"][::order])
        assert config.partition == PartitionConfig("shards", 100, 7, {"shards": 2})
    assert with_assignments(base, [f"{key}=dirichlet"]) == base


@pytest.mark.parametrize("key", ["method", "method.name"])
def test_another_method_drops_the_old_methods_parameters(key: str) -> None:
    base = Config(method="fedvls", method_params={"distill_weight": 0.5})
    for order in (1, -1):
        config = with_values(base, dict([(key, "fedprox"), ("method.mu", 0.1)][::order]))
        assert (config.method, config.method_params) == ("fedprox", {"mu": 0.1})
    assert with_assignments(base, [f"{key}=fedvls"]) == base


@pytest.mark.parametrize(
    ("text", "name", "settings"),
    [
        ("fedprox:mu=1", "fedprox", {"mu": 1}),
        ("fedprox+fedvls:mu=1:distill_weight=1e+1", "fedvls+fedprox", {"mu": 1, "distill_weight": 10.0}),
        ("package.module:Class", "package.module:Class", {}),
        ("package.module:Class:strength=0.2", "package.module:Class", {"strength": 0.2}),
        ("mine:a+mine:b-server:strength=0.2", "mine:a+mine:b-server", {"strength": 0.2}),
    ],
)
def test_a_method_may_have_its_settings_wherever_it_is_named(text: str, name: str, settings: dict[str, Any]) -> None:
    for config in (
        Config(method=text),
        Config.from_mapping({"method": text}),
        Config.from_mapping({"method": {"name": text}}),
        with_assignments(Config(), [f"method={text}"]),
        with_values(Config(method="fedavgm", method_params={"server_momentum": 0.5}), {"method.name": text}),
    ):
        assert (config.method, config.method_params) == (name, settings)


def test_a_setting_may_have_a_plus() -> None:
    assert parse_method("mine:P:mode=a+b") == {"name": "mine:P", "mode": "a+b"}


def test_settings_in_the_text_of_a_method_count_as_those_of_a_mapping() -> None:
    base = Config(method="fedprox", method_params={"mu": 3})
    assert with_values(base, {"method": "fedprox:mu=1"}) == Config(method="fedprox", method_params={"mu": 1})
    assert with_values(base, {"method.mu": 2, "method": "fedprox:mu=1"}).method_params == {"mu": 2}
    assert config_hash(Config(method="fedprox:mu=1")) == config_hash(with_values(base, {"method.mu": 1}))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fedprox:mu=1+fedvls", "settings go after the whole combination, such as fedprox+fedvls:mu=1"),
        ("mine:a:x=1+mine:b-server:y=2", "after the whole combination, such as mine:a+mine:b-server:x=1:y=2"),
        ("fedprox:mu=1:2", "setting '2' lacks a key or '='"),
        ("mu=1", "method is 'mu=1'; expected the name of a method first, such as fedprox:mu=1"),
        ("fedprox:name=fedvls", "'name' is a configuration key"),
    ],
)
def test_a_wrong_text_of_a_method_is_one_line(text: str, expected: str) -> None:
    assert expected in refusal({"method": text})


def test_settings_that_replace_a_method_name_theirs() -> None:
    assert Config.from_mapping({"method": {"distill_weight": 0.5}}).method == "fedvls"  # a run's default method
    with pytest.raises(UserError, match=r"method is \{'mu': 1\}, without a name; expected a mapping such as \{name:"):
        with_values(Config(method="fedprox"), {"method": {"mu": 1}})


def test_a_combination_given_in_another_order_is_the_same_run() -> None:
    one, other = Config(method="fedvls+fpl"), Config.from_mapping({"method": " fpl + FedVLS"})
    assert one == other
    assert run_name(one) == run_name(other)
    assert differing_keys(one, other) == []
    base = Config(method="fpl+fedvls", method_params={"distill_weight": 0.5})
    for spelled in ("fpl+fedvls", "fedvls+fpl", "fpl+feded"):
        assert with_assignments(base, [f"method={spelled}"]) == base


@pytest.mark.parametrize("name", ["fedvls+fedlmd", "fedvls+fedpox", "no.such.module:Class+fedsam"])
def test_a_combination_that_is_refused_later_is_told_as_it_was_given(name: str) -> None:
    assert Config(method=name).method == name


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("lr", "expected key=value"),
        ("=3", "expected key=value"),
        ("rouns=3", "did you mean 'rounds'"),
        ("lr.x=3", "unknown key 'lr.x'"),
        ("lr=[1", "setting 'lr=[1': line 1"),
        ("lr=", "lr is None"),
        ("method.=3", "expected text"),
    ],
)
def test_a_bad_override_is_named(assignment: str, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        with_assignments(Config(), [assignment])
    assert expected in str(caught.value)


def test_the_hash_follows_what_the_run_is() -> None:
    base = Config()
    for key, value in [("data_dir", "/elsewhere"), ("checkpoint_every", 9), ("save_predictions", True)]:
        assert config_hash(with_values(base, {key: value})) == config_hash(base)
    changes = {
        "data": "mnist", "partition.rule": "iid", "partition.clients": 9, "partition.seed": 0, "partition.beta": 1,
        "method": "fedavg", "method.distill_weight": 0.2, "model": "cnn", "rounds": 61, "clients_per_round": 3,
        "local_epochs": 1, "batch_size": 9, "lr": 0.1, "lr_decay": 0.9, "momentum": 0.0, "weight_decay": 0.1,
        "optimizer": "adam", "clip_norm": 5.0, "average": "uniform", "augment": ["crop"], "engine": "plain",
        "device": "cpu", "precision": "bf16", "compile": "never", "seed": 1, "eval_every": 2, "eval_local": True,
        "mean_last": 5, "positive": "1", "specificity": 0.9, "client_test": 0.2, "server_data": 0.1,
        "task": "multi-label", "init_sha256": "0f", "train": "head", "class_weights": "balanced", "batches": "balanced",
        "head": "etf", "lora_rank": 4, "lora_alpha": 8.0, "lora_targets": ["encoder.1"],
    }  # fmt: skip
    changed = [with_values(base, {key: value}) for key, value in changes.items()]
    together = {"example_clip": 1.0, "example_noise": 2.0}
    changed_together = with_values(base, together)
    assert differing_keys(base, changed_together) == list(together)
    assert len({config_hash(config) for config in [base, *changed, changed_together]}) == len(changes) + 2
    changeable = {"data_dir", "init", "checkpoint_every", "save_predictions"}
    assert {key.partition(".")[0] for key in changes} | together.keys() == set(KEYS) - changeable
    expected = [{"data": "data.name", "method": "method.name"}.get(key, key) for key in changes]
    assert [differing_keys(base, config) for config in changed] == [[key] for key in expected]


def test_one_and_one_point_zero_and_the_order_of_parameters_are_the_same_run() -> None:
    one = Config(method_params={"a": 1, "b": [2, 3]})
    other = Config(method_params={"b": [2.0, 3.0], "a": 1.0})
    assert config_hash(one) == config_hash(other)
    assert differing_keys(one, other) == []


def test_a_runs_name_reads_well_and_is_a_safe_folder_name() -> None:
    config = Config(partition=PartitionConfig(params={"min_size": 10, "beta": 0.1}))
    assert run_name(config) == f"digits-dirichlet0.1-fedvls-s0-{config_hash(config)[:6]}"
    odd = dataclasses.replace(config, data="../my data/x y.npz", method="fedvls+fedsam", seed=3)
    assert run_name(odd) == f"x_y-dirichlet0.1-fedvls+fedsam-s3-{config_hash(odd)[:6]}"


def test_a_folder_is_named_by_the_settings_of_its_method(tmp_path: Path) -> None:
    config = with_values(Config(), {"method": {"name": "fedvls", "distill_weight": 0.5, "suppress_weight": 0.005}})
    named = tmp_path / f"digits-dirichlet-fedvls_distill_weight0.5-s0-{config_hash(config)[:6]}"
    assert run_folder(tmp_path, config) == named, "0.005 is the default"
    (tmp_path / run_name(config)).mkdir()
    assert run_folder(tmp_path, config) == tmp_path / run_name(config), "of an older version"
    assert run_folder(tmp_path, Config()).name == run_name(Config())


def test_derived_values() -> None:
    assert Config(seed=3).partition_seed == 3
    assert Config(seed=3, partition=PartitionConfig(seed=0)).partition_seed == 0
