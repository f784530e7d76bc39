"""`fedskew.run`: what it takes, what it gives, what it leaves on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import fedskew as fs
from fedskew.experiment.config import load_yaml, with_values
from fedskew.experiment.preparation import build_federation
from fedskew.experiment.result import Result
from fedskew.experiment.round.record import RoundRow
from fedskew.experiment.storage.run_folder import RunFolder
from fedskew.methods.fedvls import FedVLS


@pytest.fixture(scope="module")
def fed() -> fs.Federation:
    return fs.federation("digits", fs.Dirichlet(beta=0.1, clients=10), seed=3)


def quick(fed: fs.Federation, method: str = "fedvls", **settings: object) -> Result:
    return fs.run(fed, method, rounds=2, clients_per_round=3, local_epochs=1, **settings)


def test_the_result_is_that_of_its_model(fed: fs.Federation) -> None:
    result = quick(fed)
    test = fed.dataset.test
    inputs = (torch.from_numpy(test.x.astype(np.float32)) / 255 - fed.dataset.mean[0]) / fed.dataset.std[0]
    predicted = result.model(inputs).argmax(dim=1).numpy()
    assert result.accuracy == pytest.approx((predicted == test.y).mean())
    for c, accuracy in enumerate(result.class_accuracy):
        assert accuracy == pytest.approx((predicted == test.y)[test.y == c].mean())
    assert [row.round for row in result.history] == [0, 1, 2]
    assert result.curve.last.accuracy == result.accuracy


def test_methods_meet_the_same_clients_and_the_federations_seed_is_the_runs(fed: fs.Federation) -> None:
    drawn = [[row.clients for row in quick(fed, m).history[1:]] for m in ("fedavg", "fedlmd", "scaffold")]
    assert drawn[0] == drawn[1] == drawn[2]
    assert quick(fed).config.seed == 3


def test_a_finished_run_is_recalled_not_repeated(fed: fs.Federation, tmp_path: Path) -> None:
    class Watch(fs.Callback):
        def __init__(self) -> None:
            self.rounds, self.notices, self.ends = 0, list[str](), 0

        def on_round(self, row: RoundRow, rounds_ahead: int) -> None:
            self.rounds += 1

        def on_notice(self, line: str) -> None:
            self.notices.append(line)

        def on_end(self, result: Result) -> None:
            self.ends += 1

    watch = Watch()
    first = quick(fed, out=tmp_path / "run", callbacks=[watch])
    assert (watch.rounds, watch.notices, watch.ends) == (2, [], 1)
    again = quick(fed, out=tmp_path / "run", callbacks=[watch])
    assert (watch.rounds, watch.ends) == (2, 2)
    assert "already finished" in watch.notices[0]
    assert again.history == first.history
    for a, b in zip(first.model.state_dict().values(), again.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert RunFolder(tmp_path / "run").summary() == first.summary()


def test_a_saved_configuration_repeats_the_split_and_follows_another_seed(fed: fs.Federation, tmp_path: Path) -> None:
    quick(fed, out=tmp_path / "run")
    saved = load_yaml(tmp_path / "run" / "config.yaml")
    assert build_federation(saved).hash == fed.hash
    assert build_federation(with_values(saved, {"seed": 4})).hash != fed.hash
    quick(fed, out=tmp_path / "other", seed=5)
    pinned = load_yaml(tmp_path / "other" / "config.yaml")
    assert build_federation(with_values(pinned, {"seed": 6})).hash == fed.hash


def test_numpy_numbers_are_numbers(fed: fs.Federation) -> None:
    result = fs.run(fed, "fedavg", rounds=np.int64(1), lr=np.float32(0.05), clients_per_round=np.int32(2))
    assert (result.config.rounds, result.config.clients_per_round) == (1, 2)


def test_numpy_numbers_in_the_split_and_the_method_are_saved(tmp_path: Path) -> None:
    rule = fs.Dirichlet(clients=np.int64(4), beta=np.float64(0.5), min_size=np.int64(3))
    fed = fs.federation("digits", rule, seed=np.int64(1))
    fed.save_split(tmp_path / "split.json")
    assert fs.federation("digits", fs.Saved(tmp_path / "split.json")).hash == fed.hash
    for mu in (np.float64(0.5), np.float32(0.5)):  # the same value, so the second call returns the first run
        settings = {"method_params": {"mu": mu}, "rounds": 1, "local_epochs": 1}
        result = fs.run(fed, "fedprox", out=tmp_path / "run", **settings)
        assert load_yaml(tmp_path / "run" / "config.yaml") == result.config
    assert result.config.partition.params == {"beta": 0.5, "min_size": 3}


def test_a_method_may_be_named_with_its_settings() -> None:
    fed = fs.federation("digits", fs.IID(clients=3), seed=0)
    named, given = quick(fed, "fedprox:mu=1"), quick(fed, "fedprox", method_params={"mu": 1})
    assert named.config == given.config == quick(fed, {"name": "fedprox", "mu": 1}).config
    assert quick(fed, "fedprox:mu=1", method_params={"mu": 2}).config.method_params == {"mu": 2.0}


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda fed: fs.run("digits"), "federation is 'digits'"),
        (lambda fed: quick(fed, "fedvsl"), "did you mean 'fedvls'"),
        (lambda fed: quick(fed, model="cnnn"), "did you mean 'cnn'"),
        (lambda fed: quick(fed, moments=0.9), "did you mean 'momentum'"),
        (lambda fed: fs.run(fed, clients_per_round=11), "at most 10"),
        (lambda fed: quick(fed, data="mnist"), "data is 'mnist', but the federation already has its data"),
        (lambda fed: quick(fed, **{"data.label": "y"}), r"data\.label is 'y', but the federation already has"),
        (lambda fed: quick(fed, partition="iid"), "partition is 'iid', but the federation already has"),
        (lambda fed: quick(fed, **{"partition.beta": 9}), r"partition\.beta is 9, but the federation already has"),
        (
            lambda fed: quick(fed, **{"partition.seed": 9}),
            "already split with seed 3; expected 3 or none; in a comparison",
        ),
        (lambda fed: quick(fed, clients=3), "did you mean 'partition.clients'. A federation that is passed .* its own"),
        (lambda fed: quick(fed, out=3), "the run's folder is 3; expected the path of a folder"),
        (lambda fed: fs.compare(fed, ["fedavg"], out=3), "out is 3; expected the path of a folder"),
        (lambda fed: fs.choose(fed, ["fedprox"], out=3), "out is 3; expected the path of a folder"),
        (lambda fed: fs.compare(fed, ["fedavg", {"mu": 1}]), r"method is \{'mu': 1\}, without a name; expected a map"),
        (lambda fed: quick(fed, {"mu": 1}), r"method is \{'mu': 1\}, without a name"),
        (lambda fed: quick(fed, method_params="mu=1"), "method_params is 'mu=1'; expected a mapping"),
        (lambda fed: quick(fed, callbacks=fs.EarlyStopping()), "callbacks is .*; expected a list of fedskew.Callback"),
        (lambda fed: quick(fed, callbacks=[fs.EarlyStopping]), "callbacks is .*; expected a list of fedskew.Callback"),
        (lambda fed: fs.compare(fed, ["fedavg"], callbacks=[print]), "callbacks is .*; expected a list"),
        (lambda fed: fs.compare(fed, ["fedavg"], **{"partition.beta": 9}), "partition.beta is 9, but the federation"),
        (lambda fed: fs.choose(fed, ["fedavg"], **{"partition.beta": 9}), "partition.beta is 9, but the federation"),
        (lambda _: fs.compare("synthetic", ["fedavg"], **{"data.samples": 9}), "data.samples is 9, but the data are"),
        (lambda _: fs.choose("synthetic", ["fedavg"], **{"data.samples": 9}), "data.samples is 9, but the data are"),
        (
            lambda _: fs.compare("digits", ["fedavg"], partition=fs.IID(4), **{"partition.clients": 9}),
            "partition.clients is 9, but a partition is given; set the parameters of that rule",
        ),
        (
            lambda _: fs.compare("digits", ["fedavg"], partition="iid", **{"partition.clients": 9}),
            "partition is 'iid'; expected a rule, for example",
        ),
        (lambda _: fs.choose("digits", ["fedprox"], partition="iid"), "partition is 'iid'; expected a rule"),
        (lambda fed: fs.compare(fed, ["fedavg"], 2.0), "seeds is 2.0; expected a number of seeds"),
        (lambda fed: fs.compare(fed, ["fedavg"], None), "seeds is None; expected a number of seeds"),
        (lambda fed: fs.run(fed, fs.make_method("fedvls"), method_params={"a": 1}), "set them on the method object"),
        (lambda fed: fs.run(fed, method_params={"mu": 1}), "need a method given by name; pass it, too"),
        (lambda fed: fs.run(fed, FedVLS(), **{"method.mu": 1.0}), r"method\.mu is 1\.0, but the method is an object"),
    ],
)
def test_mistakes_are_one_line(fed: fs.Federation, call, expected: str) -> None:
    with pytest.raises(fs.UserError, match=expected) as caught:
        call(fed)
    assert "\n" not in str(caught.value)


def test_a_typed_configuration_is_the_same_run_as_its_keys() -> None:
    federation = fs.federation("digits", fs.IID(clients=3), seed=2)
    by_keys = fs.run(federation, "fedprox", rounds=1, lr=0.1, local_epochs=1)
    config = fs.Config(method="fedprox", rounds=5, lr=0.1, local_epochs=1, seed=2)
    by_config = fs.run(federation, config=config, rounds=1)
    assert by_config.config == by_keys.config
    assert by_config.accuracy == by_keys.accuracy
    with pytest.raises(fs.UserError, match=r"expected a fedskew\.Config"):
        fs.run(federation, config={"rounds": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "used"),
    [
        (FedVLS(distill_weight=0.5), ("fedvls", 0.5)),
        (fs.make_method("fedvls", {"distill_weight": 0.5}), ("fedvls", 0.5)),
        ("fedvls", ("fedvls", 0.1)),
    ],
)
def test_another_method_ignores_the_parameters_of_the_configuration_s_method(
    fed: fs.Federation, method: str | fs.Method | FedVLS, used: tuple[str, float]
) -> None:
    config = fs.Config(method="fedprox", method_params={"mu": 1.0}, rounds=1, local_epochs=1)
    found = fs.run(fed, method, config=config).config
    assert (found.method, found.method_params["distill_weight"]) == used
    assert "mu" not in found.method_params
    assert fs.run(fed, config=config).config.method_params == {"mu": 1.0}


def test_a_run_on_a_file_repeats_from_its_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration of a run in Python has the path and the options. The partition implies the site's column."""
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    rows = [f"{i % 7},{i % 5},{'ab'[i % 2]},{'xy'[i % 3 % 2]}" for i in range(60)]
    Path("data/visits.csv").write_text("\n".join(["age,pulse,hospital,outcome", *rows]) + "\n")
    fed = fs.federation(
        Path("data/visits.csv"), fs.Column("hospital"), label="outcome", drop=("pulse",), missing=[np.nan]
    )
    result = fs.run(fed, "fedavg", rounds=1, local_epochs=1)
    options = {"label": "outcome", "drop": ["pulse"], "missing": ["nan"]}
    assert result.config.to_mapping()["data"] == {"name": "data/visits.csv", **options}
    again = build_federation(result.config)
    assert (again.hash, again.dataset.columns) == (fed.hash, ("age",))
    some = fs.federation("digits", fs.IID(clients=2), keep=[3, 5])
    assert build_federation(fs.run(some, "fedavg", rounds=1, local_epochs=1).config).dataset.classes == ("3", "5")
