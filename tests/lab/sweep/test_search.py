"""A search by Optuna: judged on validation data, continued, and honest about failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fedskew.errors import UserError
from fedskew.lab.sweep.job import Job, merge_jobs
from fedskew.lab.sweep.records import Outcome, Record
from fedskew.lab.sweep.search import BestPoint, mean_score, read_search, search_with_optuna
from fedskew.results.ranking import METRICS

pytest.importorskip("optuna")

SEARCH = """
data: digits
method: fedprox
rounds: 2
search:
  method.mu: {low: 0.001, high: 1.0, log: true}
  local_epochs: {low: 1, high: 3}
  average: [samples, uniform]
seeds: 2
validation: 0.25
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "search.yaml"
    path.write_text(SEARCH)
    return path


def judged(jobs: Sequence[Job]) -> Mapping[str, Outcome]:
    """As if accuracy were best at three local epochs, and large μ failed."""

    def outcome(job: Job) -> Outcome:
        if job.config.method_params["mu"] > 0.3:
            return Outcome("failed", reason="too strong")
        accuracy = job.config.local_epochs / 10
        return Outcome("finished", Record({"config": job.config.to_mapping(), "rounds": [1], "accuracy": [accuracy]}))

    return {job.identity: outcome(job) for job in jobs}


def test_the_best_point_of_all_trials_is_found_and_a_search_continues(file: Path, tmp_path: Path) -> None:
    search = read_search(file, {})
    ran: list[Job] = []

    def run(jobs: Sequence[Job]) -> Mapping[str, Outcome]:
        ran.extend(jobs)
        return judged(jobs)

    found = search_with_optuna(search, 12, 3, tmp_path / "s", run)
    assert found.trials + found.failed == 12
    assert len(ran) == 12 * 2
    assert found.score == max(job.config.local_epochs / 10 for job in ran if job.config.method_params["mu"] <= 0.3)
    best = [job for job in ran if job.label.startswith(f"trial {found.number} seed")]
    assert len(best) == 2
    records = [outcome.record for outcome in judged(best).values()]
    assert found.score == mean_score([record for record in records if record is not None], search.metric)
    assert {job.validation for job in ran} == {0.25}
    assert all(0.001 <= job.config.method_params["mu"] <= 1 and 1 <= job.config.local_epochs <= 3 for job in ran)
    assert {job.config.average for job in ran} == {"samples", "uniform"}
    ran.clear()
    again = search_with_optuna(search, 14, 3, tmp_path / "s", run)
    assert len(ran) == 2 * 2
    assert again.trials + again.failed == 14


def test_points_are_scored_by_the_metric_requested(file: Path, tmp_path: Path) -> None:
    search = read_search(file, {}, metric=METRICS["macro-f1"])
    assert search.name != read_search(file, {}).name, "trials by another metric are not mixed"

    def run(jobs: Sequence[Job]) -> Mapping[str, Outcome]:
        return {
            job.identity: Outcome(
                "finished",
                Record(
                    {
                        "config": job.config.to_mapping(),
                        "rounds": [1],
                        "accuracy": [job.config.local_epochs / 10],
                        "macro_f1": [1 - job.config.local_epochs / 10],
                    }
                ),
            )
            for job in jobs
        }

    search = replace(search, space={"local_epochs": [3, 1]})
    found = search_with_optuna(search, 12, 3, tmp_path / "s", run)
    assert found.values["local_epochs"] == 1, "the least accurate point has the best macro F1"
    assert found.score == 0.9


def test_the_last_word_has_the_test_set(file: Path) -> None:
    search = read_search(file, {})
    final = search.final_jobs(BestPoint(7, {"method.mu": 0.5}, 0.9, 12, 0))
    assert [job.label for job in final] == ["best, trial 7 seed 0", "best, trial 7 seed 1"]
    assert [job.validation for job in final] == [None, None]
    assert [job.config.seed for job in final] == [0, 1]
    assert final[0].config.method_params == {"mu": 0.5}


def test_trials_of_the_same_point_share_a_run(file: Path, tmp_path: Path) -> None:
    search = replace(read_search(file, {}), space={"method.mu": [0.1]})
    found = search_with_optuna(search, 3, 3, tmp_path / "s", judged)
    assert (found.trials, found.failed) == (3, 0)


def test_points_of_other_rounds_are_judged_by_runs_of_their_own(file: Path) -> None:
    search = read_search(file, {})
    jobs = [job for number, rounds in enumerate((5, 10)) for job in search.jobs(number, {"rounds": rounds})]
    assert [job.config.rounds for job in merge_jobs(jobs)] == [5, 5, 10, 10]


def test_what_was_tried_in_another_search_does_not_count(file: Path, tmp_path: Path) -> None:
    short = read_search(file, {"rounds": 1})
    search_with_optuna(short, 4, 4, tmp_path / "s", judged)
    ran: list[Job] = []

    def run(jobs: Sequence[Job]) -> Mapping[str, Outcome]:
        ran.extend(jobs)
        return judged(jobs)

    search_with_optuna(read_search(file, {"rounds": 1, "device": "cpu"}), 4, 4, tmp_path / "s", run)
    assert not ran, "where it runs makes no other search"
    search_with_optuna(read_search(file, {"rounds": 2}), 4, 4, tmp_path / "s", run)
    assert len(ran) == 4 * 2


def test_a_search_that_is_stopped_counts_no_unfinished_trial(file: Path, tmp_path: Path) -> None:
    search = read_search(file, {})
    with pytest.raises(UserError, match="no trial finished"):
        search_with_optuna(
            search, 4, 2, tmp_path / "s", lambda jobs: {job.identity: Outcome("stopped") for job in jobs}
        )
    found = search_with_optuna(search, 4, 2, tmp_path / "s", judged)
    assert found.trials + found.failed == 4


def test_a_search_without_a_finished_trial_says_why_the_last_one_failed(file: Path, tmp_path: Path) -> None:
    def run(jobs: Sequence[Job]) -> Mapping[str, Outcome]:
        return {job.identity: Outcome("failed", reason="no disk") for job in jobs}

    for _ in range(2):  # the second command runs nothing
        with pytest.raises(UserError, match=r"2 failed, the last because: no disk; .* larger --trials"):
            search_with_optuna(read_search(file, {}), 2, 1, tmp_path / "s", run)


def test_a_trial_without_the_metric_fails_with_a_reason(file: Path, tmp_path: Path) -> None:
    search = read_search(file, {}, metric=METRICS["auroc"])
    with pytest.raises(UserError, match="because: a run has no AUROC"):
        search_with_optuna(search, 1, 1, tmp_path / "s", _without_auroc)


def _without_auroc(jobs: Sequence[Job]) -> Mapping[str, Outcome]:
    content = {job.identity: {"config": job.config.to_mapping(), "rounds": [2], "accuracy": [0.5]} for job in jobs}
    return {identity: Outcome("finished", Record(found)) for identity, found in content.items()}


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("search:", "grid:", r"no search; expected a mapping"),
        ("low: 0.001", "low: 0", r"search.method.mu has log and low 0; expected low above 0"),
        ("{low: 1, high: 3}", "3", r"search.local_epochs is 3; expected a list of values, or a range"),
        ("{low: 1, high: 3}", "{low: 3, high: 1}", r"search.local_epochs is .*, or a range with low below high"),
        (SEARCH[SEARCH.index("search:") :], "search: [lr]", r"search is \['lr'\]; expected a mapping"),
        ("high: 1.0, log: true", "high: .inf", r"search.method.mu is .*'high': inf.*; expected a list of values, or"),
        ("log: true", "log: 'false'", r"search.method.mu has log 'false'; expected true or false"),
        ("method.mu", "1", r"unknown key '1'"),
        ("method.mu", "method.nu", r"has no parameter 'nu'; did you mean 'mu'"),
        ("0.25", "1.5", r"validation is 1.5; expected"),
        ("average: [samples, uniform]", "lr: [0.1, x]", r"search.yaml: lr is 'x'; expected"),
        ("average: [samples, uniform]", "method: [fedprox, fedpro]", r"search.yaml: unknown method 'fedpro'; did you"),
        ("average: [samples, uniform]", "partition.beta: [0.1, -1]", r"search.yaml: .*beta is -1; expected"),
        ("average: [samples, uniform]", "seed: [1, 2]", r"search.seed is not possible; expected seeds outside"),
        ("seeds: 2", "seeds: none", r"seeds is 'none'; expected"),
    ],
)
def test_a_mistake_is_named_before_anything_runs(file: Path, old: str, new: str, complaint: str) -> None:
    file.write_text(SEARCH.replace(old, new))
    with pytest.raises(UserError, match=complaint):
        read_search(file, {})


def test_a_flag_that_the_search_overrides_is_refused(file: Path) -> None:
    with pytest.raises(UserError, match=r"local_epochs is given by a flag and in the search; expected only one"):
        read_search(file, {"local_epochs": 2})


@pytest.mark.parametrize(
    ("base", "space"),
    [
        ("rounds: 2", "{example_clip: [1.0, 2.0], example_noise: [0.5, 1.0]}"),
        ("momentum: 0", "{optimizer: [nesterov, sgd], momentum: [0.5, 0.9]}"),
        ("partition: {rule: iid, clients: 5}", "{clients_per_round: [7, 8], partition.clients: [10, 20]}"),
    ],
)
def test_values_that_fit_each_other_need_not_fit_the_base(tmp_path: Path, base: str, space: str) -> None:
    path = tmp_path / "search.yaml"
    path.write_text(f"data: digits\nmethod: fedprox\n{base}\nsearch: {space}\n")
    assert len(read_search(path, {}).space) == 2
