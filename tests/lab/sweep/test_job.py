"""Two runs are one experiment exactly if the longer contains the shorter."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from fedskew.experiment.config import Config, with_values
from fedskew.lab.sweep.job import NON_IDENTIFYING_KEYS, Job, identity, planned_rounds

OTHER = {
    "data_dir": "/elsewhere", "rounds": 7, "engine": "plain", "device": "cpu", "precision": "float64",
    "compile": "never", "eval_every": 3, "eval_local": True, "mean_last": 4, "checkpoint_every": 9,
}  # fmt: skip


def test_where_and_how_far_a_run_went_does_not_count() -> None:
    assert set(OTHER) == set(NON_IDENTIFYING_KEYS)
    for key, value in OTHER.items():
        assert identity(with_values(Config(), {key: value})) == identity(Config()), key


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"lr": 0.2}, {"method.distill_weight": 0.2}, {"partition.beta": 0.2}, {"model": "dnn"},
     {"clients_per_round": 2}, {"local_epochs": 3}, {"augment": ["flip"]}, {"average": "uniform"}],
)  # fmt: skip
def test_what_decides_the_numbers_counts(change) -> None:
    assert identity(with_values(Config(), change)) != identity(Config())


def test_defaults_spelled_out_are_the_same_experiment() -> None:
    spelled = {"method.distill_weight": 0.1, "partition.beta": 0.1, "partition.clients": 20, "lr": 5e-2}
    assert identity(with_values(Config(), spelled)) == identity(Config())


def test_the_order_of_a_combination_does_not_count() -> None:
    assert identity(Config(method="fedexp+fedvls")) == identity(Config(method="fedvls+fedexp"))


def test_methods_that_plan_by_the_number_of_rounds_are_told_apart_by_it() -> None:
    pkd = with_values(Config(), {"method": "pkd"})
    assert identity(pkd) != identity(replace(pkd, rounds=7))


def test_a_run_from_a_trained_model_is_another_experiment() -> None:
    job = Job(Config(), "x")
    assert replace(job, start=Config()).identity != job.identity
    assert replace(job, start=Config()).identity != replace(job, start=Config(lr=0.3)).identity


def test_the_content_of_initial_weights_counts_and_their_place_does_not(tmp_path: Path) -> None:
    one, copy, other = (tmp_path / f"{name}.safetensors" for name in ("one", "copy", "other"))
    for path, content in ((one, b"a"), (copy, b"a"), (other, b"b")):
        path.write_bytes(content)
    configs = [Config(init=str(path)) for path in (one, copy, other)]
    assert identity(configs[0]) == identity(configs[1]) != identity(configs[2])
    recorded = replace(configs[0], init="/gone.safetensors", init_sha256=sha256(b"a").hexdigest())
    assert identity(recorded) == identity(configs[0]) != identity(Config())


def test_a_digest_without_initial_weights_does_not_count() -> None:
    """A run ignores it. It is left over if only `init` is deleted from a run's configuration."""
    assert identity(Config(init_sha256="0" * 64)) == identity(Config())


def test_a_method_without_training_has_one_round() -> None:
    assert planned_rounds(Config(method="fedncm", rounds=60)) == 1
    assert planned_rounds(Config(method="fedavg", rounds=60)) == 60
