"""Real races, small ones: they resume, continue runs bit for bit, and never drop FedAvg."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import yaml

import fedskew as fs
from fedskew.choose.budget import MAX_PER_METHOD
from fedskew.choose.choice import FEDERATION_FILE, RUN_FILE, _base_and_federation, _workers_find, _write_files, choose
from fedskew.choose.field import Candidate, make_field
from fedskew.choose.progress import NotebookRace, RaceProgress
from fedskew.choose.race import keep_best, scored_rounds
from fedskew.choose.trial import Trial, TrialResult, serve
from fedskew.choose.trials import RUNS, TRIALS, RaceWatcher
from fedskew.data.partitions.rule import Labels
from fedskew.errors import UserError
from fedskew.experiment.config import Config, load_yaml, with_values
from fedskew.experiment.storage.run_folder import RunFolder
from fedskew.methods import METHODS as CATALOGUE
from fedskew.methods import Entry
from fedskew.report.race import standings_table
from fedskew.report.sections.race import race_section
from fedskew.results.race import RACE, SEEDS, SPLITS, RaceRecord, Repeats, load_race, repeats

FEW_SAMPLES = {"samples": 300, "test_samples": 100}
TINY = {
    "data": "synthetic", "data.samples": 300, "data.test_samples": 100, "partition.clients": 4, "partition.beta": 0.3,
    "rounds": 3, "local_epochs": 1, "device": "cpu",
}  # fmt: skip
METHODS = ("fedavgm", "fedlmd")
BUDGET = "60r"
SMALLEST = "30r"
"""Enough for two methods over two rounds."""


class Counting(RaceWatcher):
    """Counts the trials that are run, and stops after some of them, as ^C does."""

    def __init__(self, stop_after: int = 10**9) -> None:
        self.run, self._left = 0, stop_after
        self.notices: list[str] = []
        self.headings: list[str] = []

    def on_notice(self, line: str) -> None:
        self.notices.append(line)

    def on_trials(self, heading: str, trials: Sequence[Trial]) -> None:
        self.headings.append(heading)
        self.run += len(trials)

    def on_trial(self, trial: Trial, measured: object) -> None:
        self._left -= 1
        if not self._left:
            raise KeyboardInterrupt


def race(out: Path, watcher: RaceWatcher | None = None, budget: str = BUDGET, workers: int = 1) -> fs.Choice:
    config = with_values(Config(), TINY)
    return choose(config=config, methods=METHODS, budget=budget, out=out, workers=workers, watcher=watcher)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> fs.Choice:
    """By two processes. The other races run in this process and end the same."""
    return race(tmp_path_factory.mktemp("race") / "whole", workers=2)


def test_a_race_ends_with_a_choice_among_its_methods(finished: fs.Choice) -> None:
    record = finished.race
    assert finished.method in ("fedavg", *METHODS)
    assert finished.answer[0].startswith(f"Use {finished.method}")
    assert [rung.rounds for rung in record.rungs] == [1, 3]
    assert len(record.rungs[0].standings) == 9
    means = [standing.mean for standing in record.rungs[0].standings]
    assert means == sorted(means, reverse=True)
    assert {one.standing.method for one in record.final} == {"fedavg", *METHODS}


def test_the_final_has_other_splits_than_the_race(finished: fs.Choice) -> None:
    raced = {seed for rung in finished.race.rungs for s in rung.standings for seed in s.scores}
    final = {seed for one in finished.race.final for seed in one.standing.scores}
    assert len(final) >= 3
    assert not raced & final


@pytest.mark.parametrize(
    ("partition", "words"),
    [
        ({"rule": "dirichlet"}, SPLITS),
        ({"rule": "dirichlet", "seed": 0}, SEEDS),
        ({"rule": "column", "column": "hospital"}, SEEDS),
        ({"rule": "saved", "path": "split.json"}, SEEDS),
        ({"rule": "mine:Rule"}, SPLITS),
    ],
)
def test_trials_differ_in_their_splits_unless_the_split_is_fixed(partition: dict[str, Any], words: Repeats) -> None:
    assert repeats(with_values(Config(), {"partition": partition}).to_mapping()) is words


def test_a_race_on_a_fixed_split_speaks_of_seeds(tmp_path: Path) -> None:
    watcher = Counting()
    config = with_values(Config(), {**TINY, "rounds": 2, "partition.seed": 5})
    choice = choose(config=config, methods=["fedprox"], budget=SMALLEST, out=tmp_path, workers=1, watcher=watcher)
    assert re.fullmatch(r"final with \d fresh seeds: fedavg, fedprox", watcher.headings[-1])
    section = race_section(choice.race, {})
    columns = [column for table in section.tables for column in table.columns]
    assert {"mean of all seeds %", "number of fresh seeds", "mean of fresh seeds %", "seeds"} <= set(columns)
    assert not any("split" in text for text in (*choice.answer, *columns, *section.paragraphs))
    shown = NotebookRace(config, "accuracy")
    assert [column.header for column in standings_table("", (), shown.repeats).columns][3] == "seeds"


@pytest.mark.parametrize("as_object", [False, True])
def test_a_partition_object_keeps_the_seed_of_the_split(as_object: bool) -> None:
    rule = fs.Dirichlet(clients=4, beta=0.3)
    data = fs.load("synthetic", **FEW_SAMPLES) if as_object else "synthetic"
    config = with_values(Config(), {**TINY, "partition.seed": 7, "seed": 2})
    base, split = _base_and_federation(data, rule, config)
    assert (base.seed, base.partition.seed) == (2, 7)
    assert split(base).seed == split(replace(base, seed=3)).seed == 7
    assert repeats(base.to_mapping()) is SEEDS


def test_a_federation_that_is_already_split_has_one_seed() -> None:
    held = fs.federation("synthetic", fs.Dirichlet(clients=4, beta=0.3), seed=5, **FEW_SAMPLES)
    base, split = _base_and_federation(held, None, with_values(Config(), TINY))
    assert [split(replace(base, seed=seed)).seed for seed in (5, 6)] == [5, 6]
    base, split = _base_and_federation(held, None, with_values(Config(), {**TINY, "partition.seed": 5}))
    assert [split(replace(base, seed=seed)).hash for seed in (0, 6)] == [held.hash, held.hash]
    with pytest.raises(UserError, match=r"partition.seed is 7, but the federation is already split with seed 5"):
        _base_and_federation(held, None, with_values(Config(), {**TINY, "partition.seed": 7}))


@pytest.mark.parametrize(("given", "first"), [({}, 5), ({"seed": 2}, 2), ({"seed": 2, "partition.seed": 5}, 2)])
def test_the_first_seed_is_the_federations_unless_another_is_given(
    tmp_path: Path, given: dict[str, int], first: int
) -> None:
    held = fs.federation("synthetic", fs.Dirichlet(clients=4, beta=0.3), seed=5, **FEW_SAMPLES)
    config, watcher = with_values(Config(), {**TINY, "rounds": 2, "seed": 9}), Counting()
    choice = choose(held, ["fedprox"], SMALLEST, config=config, out=tmp_path, workers=1, watcher=watcher, **given)
    assert choice.race.config["seed"] == first
    assert min(seed for standing in choice.race.rungs[0].standings for seed in standing.scores) == first


def test_the_race_stays_within_its_rounds(finished: fs.Choice) -> None:
    trained = sum(RunFolder(folder).rounds()[-1].round for folder in (finished.folder / RUNS).iterdir())
    assert 40 < trained <= 60


def write_results(folder: Path, methods: Sequence[str], settings: int = 0, seconds: float = 0.0) -> None:
    """Write results for every trial that a race of these methods over three rounds may need. FedAvg is the worst."""
    folder.mkdir(exist_ok=True)
    with (folder / TRIALS).open("a") as file:
        for candidate, seed, until in itertools.product(make_field(methods, 0.05, settings), range(23), (1, 3)):
            curve = [(number, 0.1 if candidate.is_baseline else 0.5 + candidate.lr) for number in (1, 2, 3)]
            measured = TrialResult(until, {"accuracy": curve}, seconds, 0.1, 1.0, 100.0, 0).to_json()
            key = Trial(candidate, seed, until).key
            file.write(json.dumps({"key": key, "until": until, "measured": measured}) + "\n")


def test_a_race_stays_within_its_rounds_if_fedavg_takes_part_beyond_the_planned_size(tmp_path: Path) -> None:
    methods = ("fedprox", "fedavgm", "fedrs", "fedlc", "fedlmd")
    write_results(tmp_path, ("fedavg", *methods))
    watcher = Counting()
    config = with_values(Config(), TINY)
    record = choose(config=config, methods=methods, budget="57r", out=tmp_path, workers=1, watcher=watcher).race
    assert watcher.run == 0
    first, last = (len(rung.standings) for rung in record.rungs)
    fresh = sum(len(one.standing.scores) for one in record.final)
    assert last == 6 + MAX_PER_METHOD, "planned are 6"
    assert first * 1 + last * 2 + fresh * 3 <= 57


def test_trials_of_other_races_in_the_folder_do_not_count_as_time_spent(tmp_path: Path) -> None:
    write_results(tmp_path, ("fedavg", "fedavgm"), settings=2)
    write_results(tmp_path, ("fedlmd",), seconds=1e6)
    config, watcher = with_values(Config(), TINY), Counting()
    race = choose(config=config, methods=["fedavgm"], budget="1h", out=tmp_path, workers=1, watcher=watcher).race
    assert watcher.run == 0
    assert race.seconds < 1e6
    assert race.final_plan == race.plan


def test_what_is_recorded_is_read_again(finished: fs.Choice) -> None:
    assert load_race(finished.folder) == finished.race
    assert json.loads(json.dumps(finished.to_json()))["files"]["run"] == str(finished.run_file)


def test_the_same_call_on_a_finished_race_runs_nothing(finished: fs.Choice) -> None:
    watcher = Counting()
    assert race(finished.folder, watcher).race == finished.race
    assert watcher.run == 0
    assert "already finished" in watcher.notices[0]


def test_an_interrupted_race_in_one_process_ends_like_one_in_several(finished: fs.Choice, tmp_path: Path) -> None:
    whole = Counting()
    for stop_after in (4, 7):
        with pytest.raises(KeyboardInterrupt):
            race(tmp_path / "race", Counting(stop_after))
    with (tmp_path / "race" / TRIALS).open("ab") as file:
        file.write(b'{"key": "\xfftorn')  # no UTF-8
    again = race(tmp_path / "race", whole)
    assert whole.run == len((finished.folder / TRIALS).read_text().splitlines()) - 11
    assert _without_times(again) == _without_times(finished)


def test_the_live_standings_of_a_continued_race_have_the_trials_of_earlier_sessions(tmp_path: Path) -> None:
    class Shown(RaceProgress):
        def on_standings(self, race: RaceRecord) -> None:
            found = {(s.label, s.lr): s.scores for s in self.standings}
            expected = {(s.label, s.lr): s.scores for s in race.rungs[-1].standings}
            rungs.append((found, expected))

    rungs: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
    with pytest.raises(KeyboardInterrupt):
        race(tmp_path / "race", Counting(stop_after=4))
    race(tmp_path / "race", Shown(with_values(Config(), TINY), "accuracy"))
    assert rungs
    assert all(found == expected for found, expected in rungs)


def _without_times(choice: fs.Choice) -> object:
    final = [replace(one, time_ratio=1.0) for one in choice.race.final]
    return choice.race.rungs, final, choice.race.chosen


def test_a_larger_budget_reuses_trials(finished: fs.Choice, tmp_path: Path) -> None:
    out, watcher = shutil.copytree(finished.folder, tmp_path / "race"), Counting()
    larger = race(out, budget="72r", watcher=watcher)
    assert 0 < watcher.run < len((finished.folder / TRIALS).read_text().splitlines()) / 2
    assert larger.race.rungs[0].standings == finished.race.rungs[0].standings


@pytest.mark.slow
def test_another_budget_reuses_all_trials(finished: fs.Choice, tmp_path: Path) -> None:
    watcher = Counting()
    race(tmp_path / "race", budget="100r", watcher=watcher)
    again = Counting()
    assert _without_times(race(tmp_path / "race", again)) == _without_times(finished)
    assert again.run < watcher.run / 4, "the smaller race needs little that the larger one has not trained"


@pytest.mark.slow
def test_another_field_is_another_race_that_reuses_all_trials(finished: fs.Choice, tmp_path: Path) -> None:
    config, out = with_values(Config(), TINY), tmp_path / "race"
    choose(config=config, methods=["fedlmd"], budget=BUDGET, out=out, workers=1)
    again = race(out)
    assert again.race.methods == finished.race.methods
    assert _without_times(again) == _without_times(finished)


def test_a_trial_that_continues_has_the_numbers_of_one_that_does_not(tmp_path: Path) -> None:
    base = with_values(Config(), {**TINY, "rounds": 6, "clients_per_round": 2, "lr_decay": 0.9, "checkpoint_every": 2})

    def answer(until: int, folder: str) -> dict[str, object]:
        trial = Trial(Candidate("scaffold", 0.05), 1, until)
        found = serve(trial.request(base, 0.2, tmp_path / folder, True), lambda _: None)
        return {key: value for key, value in found.items() if "seconds" not in key}

    assert answer(2, "steps")["rounds"] == 2
    assert answer(4, "steps")["rounds"] == 4
    assert answer(6, "steps") == answer(6, "whole")
    assert answer(4, "steps")["rounds"] == 6, "a finished run is only read"


def test_a_score_is_the_mean_of_a_third_of_the_rounds_but_at_most_mean_last() -> None:
    config = with_values(Config(), {"mean_last": 4})
    assert [scored_rounds(config, rounds) for rounds in (1, 2, 6, 11, 12, 90)] == [1, 1, 2, 3, 4, 4]


def test_a_score_ignores_rounds_after_the_rung() -> None:
    """A trial that is read again may have more rounds than its rung."""
    curve = [(1, 0.1), (2, 0.2), (3, 0.4), (4, 0.9)]
    found = TrialResult(4, {"accuracy": curve}, 1.0, 0.1, 1.0, 100.0, 0)
    assert found.score("accuracy", 3, 2) == pytest.approx(0.3)


def test_a_rung_keeps_the_best_but_few_per_method_and_always_fedavg() -> None:
    ranking = [(Candidate("fedvls", lr), None) for lr in (1.0, 2.0, 3.0)]
    ranking += [(Candidate("fedprox", 1.0), None), (Candidate("fedrs", 1.0), None)]
    ranking += [(Candidate("fedavg", lr), None) for lr in (1.0, 2.0, 3.0)]
    kept = keep_best(ranking, 3)
    assert [c.method for c in kept] == ["fedvls", "fedvls", "fedprox", "fedavg", "fedavg"]
    assert sum(c.is_baseline for c in kept) == MAX_PER_METHOD


def test_beside_the_highest_learning_rate_a_lower_one_goes_on() -> None:
    high, same, low = Candidate("fedrs", 3.0), Candidate("fedrs", 3.0, {"alpha": 0.5}), Candidate("fedrs", 1.0)
    assert keep_best([(high, None), (same, None), (low, None)], 9) == [high, low]
    assert keep_best([(low, None), (high, None), (same, None)], 9) == [low, high]


@pytest.fixture
def own_net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model without an encoder, with which MOON cannot run."""
    (tmp_path / "own_net.py").write_text(
        "from torch import nn\n"
        "def make(inputs):\n"
        "    size = 1\n"
        "    for n in inputs.shape: size *= n\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(size, inputs.classes))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "own_net:make"


def test_a_method_that_cannot_run_here_is_left_out_with_its_reason(tmp_path: Path, own_net: str) -> None:
    watcher = Counting()
    config, out = with_values(Config(), {**TINY, "rounds": 2, "model": own_net}), tmp_path / "r"
    choice = choose(config=config, methods=["moon", "fedprox"], budget=SMALLEST, out=out, workers=1, watcher=watcher)
    assert "moon is left out" in watcher.notices[0]
    assert choice.method in ("fedavg", "fedprox")


def test_a_race_in_which_all_other_methods_fail_ends_with_their_reasons(tmp_path: Path, own_net: str) -> None:
    config = with_values(Config(), {**TINY, "rounds": 2, "model": own_net})
    with pytest.raises(UserError, match="no method but FedAvg is left in the race; failed: moon: "):
        choose(config=config, methods=["moon"], budget=SMALLEST, out=tmp_path / "r", workers=1, watcher=Counting())


def test_a_race_that_continues_still_knows_which_methods_were_left_out(tmp_path: Path, own_net: str) -> None:
    config, out = with_values(Config(), {**TINY, "rounds": 1, "model": own_net}), tmp_path / "r"

    def session(watcher: Counting) -> fs.Choice:
        return choose(config=config, methods=["moon", "fedprox"], budget="1h", out=out, workers=1, watcher=watcher)

    with pytest.raises(KeyboardInterrupt):
        session(Counting(stop_after=12))
    assert set(session(Counting()).race.failures or {}) == {"moon"}
    again = Counting()
    session(again)
    assert "already finished" in again.notices[0]


def test_a_method_that_fails_in_the_final_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_part.py").write_text(
        "from dataclasses import dataclass\n"
        "from pathlib import Path\n"
        "import fedskew as fs\n"
        "@dataclass(frozen=True)\n"
        "class Fails(fs.Solver):\n"
        "    def check(self, params, classes):\n"
        f"        if Path({str(tmp_path / 'final')!r}).exists(): raise fs.UserError('not today')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    class InTheFinal(Counting):
        def on_trials(self, heading: str, trials: Sequence[Trial]) -> None:
            if heading.startswith("final"):
                (tmp_path / "final").touch()

    config, methods = with_values(Config(), {**TINY, "rounds": 2}), ["own_part:Fails", "fedprox"]
    choice = choose(config=config, methods=methods, budget="60r", out=tmp_path / "r", workers=1, watcher=InTheFinal())
    assert {one.standing.method for one in choice.race.final} == {"fedavg", "fedprox"}
    assert choice.race.failures == {"own_part:Fails": "not today"}


def test_a_method_that_only_this_program_knows_is_raced_in_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CATALOGUE, "own", Entry("own", CATALOGUE["fedrs"].parts, "", ""))
    config = with_values(Config(), {**TINY, "rounds": 1})
    choice = choose(config=config, methods=["own+fedprox"], budget="30r", out=tmp_path, workers=2)
    assert {one.standing.method for one in choice.race.final} == {"fedavg", "own+fedprox"}


@pytest.mark.parametrize("as_federation", [False, True])
def test_a_partition_rule_of_a_script_is_raced_in_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_federation: bool
) -> None:
    @dataclass(frozen=True)
    class Even(fs.Partition):
        def draw(self, labels: Labels, seed: int) -> list[npt.NDArray[np.int64]]:
            return np.array_split(np.random.default_rng(seed).permutation(len(labels)), 4)

    Even.__module__, Even.__qualname__ = "__main__", "Even"
    monkeypatch.setattr(sys.modules["__main__"], "Even", Even, raising=False)
    config = with_values(Config(), {**TINY, "rounds": 1, "partition": "iid"})
    given = {"data": fs.federation("digits", Even())} if as_federation else {"partition": Even()}
    choice = choose(methods=["fedprox"], config=config, budget=SMALLEST, out=tmp_path, workers=2, **given)
    assert {one.standing.method for one in choice.race.final} == {"fedavg", "fedprox"}


def test_workers_do_not_find_what_a_script_defines() -> None:
    assert _workers_find(Config(model="mine:model"), ("fedavg", "mine:Part+fedprox"))
    assert not _workers_find(Config(model="__main__:model"), ("fedavg", "fedprox"))
    assert not _workers_find(Config(), ("fedavg", "fedprox+__main__:Part"))


def test_the_folder_of_another_race_is_refused(finished: fs.Choice) -> None:
    config = with_values(Config(), {**TINY, "partition.beta": 0.9})
    with pytest.raises(UserError, match="a race on another federation"):
        choose(config=config, methods=METHODS, budget=BUDGET, out=finished.folder)


def test_settings_that_a_race_cannot_use_are_refused() -> None:
    with pytest.raises(UserError, match="method is 'fedvls'; expected methods= in a race"):
        choose("digits", ["fedprox"], BUDGET, method="fedvls")
    with pytest.raises(UserError, match=r"method\.mu is 0\.3; expected methods= in a race"):
        choose("digits", ["fedprox"], BUDGET, **{"method.mu": 0.3})
    with pytest.raises(UserError, match=r"config is 'race\.yaml'; expected a fedskew\.Config"):
        choose("digits", ["fedprox"], BUDGET, config="race.yaml")  # type: ignore[arg-type]
    for workers in (0, -1, "2", True):
        with pytest.raises(UserError, match=f"workers is {workers!r}; expected a whole number ≥ 1"):
            choose("digits", ["fedprox"], BUDGET, workers=workers)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="budget is 1 round;"):
        choose("digits", ["fedprox"], "1r", workers=np.int64(2))  # type: ignore[arg-type]


def test_an_unknown_metric_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"did you mean 'macro-f1'\? choose from: accuracy, balanced-accuracy, macro-f1, worst-class$"
    ):
        choose(rank_by="macro-f2", budget=BUDGET)
    with pytest.raises(UserError, match="known only after the last round; expected accuracy"):
        choose(rank_by="auroc", budget=BUDGET)


def test_ranking_by_the_worst_class_ranks_by_it(finished: fs.Choice, tmp_path: Path) -> None:
    out = shutil.copytree(finished.folder, tmp_path / "race")  # its trials are used again
    config = with_values(Config(), TINY)
    by_class = choose(config=config, methods=METHODS, budget=BUDGET, out=out, rank_by="worst-class", workers=1)
    one, other = (choice.race.rungs[0].standings for choice in (finished, by_class))
    assert {(s.label, s.lr) for s in one} == {(s.label, s.lr) for s in other}
    assert max(s.mean for s in other) < max(s.mean for s in one)
    assert "worst class on validation data" in by_class.answer[0]


def test_a_federation_given_as_an_object_is_raced_as_it_is(finished: fs.Choice, tmp_path: Path) -> None:
    federation = fs.federation("synthetic", fs.Dirichlet(clients=4, beta=0.3), seed=0, **FEW_SAMPLES)
    options = {"local_epochs": 1, "device": "cpu", "workers": 1}
    out = shutil.copytree(finished.folder, tmp_path / "named", ignore=shutil.ignore_patterns(RACE))
    named = fs.choose(federation, METHODS, BUDGET, out=out, rounds=3, **options)
    assert named.race.rungs == finished.race.rungs
    assert (out / TRIALS).read_text() == (finished.folder / TRIALS).read_text(), "its trials are those of the name"
    train = federation.dataset.train
    rule = fs.Dirichlet(clients=4, beta=0.3)
    data, out = (train.x, train.y), tmp_path / "own"
    own = fs.choose(data, ["fedavgm"], SMALLEST, partition=rule, out=out, rounds=2, **options)
    assert own.method in ("fedavg", "fedavgm")


def test_the_files_run_as_they_say(finished: fs.Choice, tmp_path: Path) -> None:
    from fedskew.cli.app import main

    config = load_yaml(finished.run_file)
    winner = finished.race.winner.standing
    assert (config.method, config.lr) == (winner.method, winner.lr)
    assert main(["run", "-c", str(finished.run_file), "--out", str(tmp_path / "run"), "-q"]) == 0
    assert fs.load_run(tmp_path / "run").method == finished.method


def test_the_commands_in_the_files_work_for_a_folder_with_a_space(finished: fs.Choice, tmp_path: Path) -> None:
    folder = tmp_path / "my race"
    folder.mkdir()
    _write_files(fs.Choice(finished.race, folder))
    commands = [shlex.split((folder / name).read_text().splitlines()[0]) for name in (RUN_FILE, FEDERATION_FILE)]
    assert [command[-1] for command in commands] == [str(folder / RUN_FILE), str(folder / FEDERATION_FILE)]
    assert commands[1][4] == str(folder / "app")


def test_the_file_for_a_federation_has_all_settings_that_a_federation_uses(finished: fs.Choice) -> None:
    """A federation sets the others itself, or they concern the machine of a run."""
    others = {
        "partition", "engine", "device", "precision", "compile", "eval_every", "eval_local", "client_test",
        "server_data", "save_predictions", "checkpoint_every", "init_sha256",
    }  # fmt: skip
    written = yaml.safe_load(finished.federation_file.read_text())
    chosen = finished.config.to_mapping()
    assert written == {key: value for key, value in chosen.items() if key not in others}


def test_the_file_for_a_federation_makes_its_app(finished: fs.Choice, tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from fedskew.cli.app import main
    from fedskew.flower.planning import read_app

    app = tmp_path / "app"
    command = ["federate", "init", str(app), "--sites", "a,b,c,d", "-c", str(finished.federation_file)]
    assert main(command) == 0
    _, _, config = read_app(app)
    winner = finished.race.winner.standing
    assert (config.method, config.lr, config.rounds) == (winner.method, winner.lr, 3)


def test_the_command_for_a_federation_with_noise_on_samples_makes_its_app(finished: fs.Choice, tmp_path: Path) -> None:
    """`federate init` refuses noise on samples without its accounting."""
    pytest.importorskip("flwr")
    from fedskew.cli.app import main
    from fedskew.flower.planning import read_app

    noise = {"example_clip": 1.0, "example_noise": 2.0}
    choice = fs.Choice(replace(finished.race, config={**finished.race.config, **noise}), tmp_path)
    _write_files(choice)
    command = shlex.split(choice.federation_file.read_text().splitlines()[0].removeprefix("#"))
    assert main(command[1:]) == 0
    settings, _, config = read_app(tmp_path / "app")
    assert (settings.privacy, config.example_noise) == ("example", 2.0)
    assert json.loads(settings.test_data or "") == choice.config.to_mapping()["data"]
