"""The decision after the final, from made-up scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from fedskew.choose.decision import FinalResult, decide
from fedskew.choose.trial import TrialResult
from fedskew.results.race import SEEDS, Rung, Standing


def finalist(method: str, scores: Sequence[float], compute: float = 1.0, raced: Sequence[float] = ()) -> FinalResult:
    standing = Standing(method, method, 0.1, {}, dict(enumerate(scores)), True)
    return FinalResult(standing, raced, [TrialResult(9, {}, 1.0, 0.1, compute, 100.0, 0) for _ in scores])


def chosen(*results: FinalResult) -> tuple[str, str]:
    found = decide(results, "accuracy")
    return found["final"][found["chosen"]].standing.method, " ".join(found["answer"])


def test_a_clear_lead_wins_with_its_interval_and_cost() -> None:
    winner, answer = chosen(
        finalist("fedavg", [0.5, 0.52, 0.51]), finalist("fedvls", [0.7, 0.71, 0.72], compute=1.3333)
    )
    assert winner == "fedvls"
    assert "Use fedvls with learning rate 0.1: 71.0 % accuracy on validation data, mean of 3 splits." in answer
    assert "On 3 fresh splits it beats FedAvg with its best learning rate, 0.1" in answer
    assert "by 20.0 points (interval +17.5 to +22.5, better on 3 of 3 splits; significant at 5 %)" in answer
    assert "1.33 times the computation" in answer
    assert "(in addition: 1 teacher forward per step)" in answer
    assert "Besides its updates, a site reveals nothing about its labels." in answer


def test_with_a_fixed_split_the_answer_speaks_of_seeds() -> None:
    close = finalist("fedavg", [0.5, 0.6, 0.55]), finalist("fedprox", [0.56, 0.55, 0.555])
    clear = finalist("fedavg", [0.5, 0.52, 0.51]), finalist("fedvls", [0.7, 0.71, 0.72])
    same = finalist("fedavg", [0.5] * 3), finalist("fedvls", [0.7] * 3)
    answers = [" ".join(decide(results, "accuracy", repeats=SEEDS)["answer"]) for results in (close, clear, same)]
    assert not any("split" in answer for answer in answers)
    assert "mean of 3 seeds." in answers[0]
    assert "over all 3 seeds, but with the 3 fresh ones it does not lead by more than the noise" in answers[0]
    assert "With 3 fresh seeds it beats FedAvg" in answers[1]
    assert "better with 3 of 3 seeds" in answers[1]
    assert "The method was tried with only 3 seeds. It may fail with others." in answers[1]
    assert "by 20.0 points with every seed." in answers[2]


def test_class_weights_from_the_federations_counts_reveal_them() -> None:
    results = finalist("fedavg", [0.5, 0.52, 0.51]), finalist("fedvls", [0.7, 0.71, 0.72])
    found = decide(results, "accuracy", "counts")
    assert {one.reveals for one in found["final"]} == {"label counts"}
    assert "Besides its updates, a site reveals label counts" in " ".join(found["answer"])


@pytest.mark.parametrize(
    ("method", "named"),
    [
        ("fedrep", "(in addition: 10 epochs of the head per round)"),
        ("fedbabu", "(in addition: 5 epochs of fine-tuning after the last round)"),
        ("ditto+fedsam", "(in addition: 1 forward and backward per step, local training of a second model per round)"),
        ("fedavgm", "1.50 times the computation of FedAvg."),
    ],
)
def test_the_answer_says_how_often_clients_compute_more(method: str, named: str) -> None:
    _, answer = chosen(finalist("fedavg", [0.5, 0.52, 0.51]), finalist(method, [0.7, 0.71, 0.72], compute=1.5))
    assert named in answer


def test_a_lead_within_the_noise_leaves_fedavg() -> None:
    winner, answer = chosen(finalist("fedavg", [0.5, 0.6, 0.55]), finalist("fedprox", [0.56, 0.55, 0.555]))
    assert winner == "fedavg"
    assert "does not lead by more than the noise" in answer


def test_fedavg_wins_where_it_leads() -> None:
    winner, answer = chosen(finalist("fedavg", [0.9, 0.9, 0.9]), finalist("fedvls", [0.8, 0.82, 0.81]))
    assert winner == "fedavg"
    assert "No other method in the final has a higher mean accuracy; fedvls comes next." in answer


def test_a_lead_above_one_standard_error_is_taken_although_it_is_not_significant() -> None:
    winner, answer = chosen(finalist("fedavg", [0.5, 0.5, 0.5]), finalist("fedlmd-tf", [0.52, 0.5, 0.53]))
    assert winner == "fedlmd-tf"
    assert "not significant" in answer


def test_the_lead_is_compared_with_the_error_of_its_mean() -> None:
    """The mean lead of 2 points is less than its deviation of 3 points, but more than the standard error of 1.7."""
    assert chosen(finalist("fedavg", [0.5] * 3), finalist("fedvls", [0.55, 0.49, 0.52]))[0] == "fedvls"
    assert chosen(finalist("fedavg", [0.5] * 3), finalist("fedvls", [0.55, 0.47, 0.51]))[0] == "fedavg"


def test_cheaper_and_more_private_alternatives_are_named() -> None:
    _, answer = chosen(
        finalist("fedavg", [0.5, 0.52, 0.51]),
        finalist("fedgr", [0.71, 0.70, 0.73]),
        finalist("fedlmd", [0.70, 0.71, 0.72], compute=1.33),
        finalist("fedrs", [0.70, 0.715, 0.715], compute=0.9),
    )
    assert "Use fedgr" in answer
    assert "Besides its updates, a site reveals label presence." in answer
    assert "fedlmd with learning rate 0.1 reveals nothing about labels, and is not significantly worse." in answer
    assert (
        "fedrs with learning rate 0.1 is cheaper and reveals nothing about labels, and is not significantly worse."
        in answer
    )
    assert "fedavg with" not in answer


def test_a_finalist_with_more_traffic_is_not_called_cheaper() -> None:
    scaffold = finalist("scaffold", [0.70, 0.71, 0.72])
    scaffold = scaffold._replace(trials=[replace(trial, bytes=2 * trial.bytes) for trial in scaffold.trials])
    _, answer = chosen(
        finalist("fedavg", [0.5, 0.52, 0.51]), finalist("fedsam", [0.71, 0.70, 0.73], compute=2.0), scaffold
    )
    assert "Use fedsam" in answer
    assert "scaffold" not in answer


def test_fedavg_is_an_alternative_if_the_answer_calls_the_lead_over_it_not_significant() -> None:
    """The lead of fedgr is significant only without a correction for the three comparisons."""
    _, answer = chosen(
        finalist("fedgr", [0.9007, 0.8853, 0.8934, 0.8823], compute=1.5),
        finalist("fedrs", [0.8406, 0.8184, 0.8845, 0.8479]),
        finalist("fedvls", [0.7565, 0.8177, 0.8238, 0.7937]),
        finalist("fedavg", [0.8367, 0.7820, 0.8315, 0.6876]),
    )
    assert "Use fedgr" in answer
    assert "not significant at 5 %, corrected for 3 comparisons" in answer
    reasons = "is cheaper and reveals nothing about labels, and is not significantly worse."
    assert f"fedavg with learning rate 0.1 {reasons}" in answer
    assert f"fedrs with learning rate 0.1 {reasons}" in answer
    assert "fedvls with" not in answer


def test_a_finalist_that_is_worse_by_the_same_amount_everywhere_is_no_alternative() -> None:
    _, answer = chosen(finalist("fedavg", [0.5] * 3), finalist("fedgr", [0.7] * 3, compute=1.5))
    assert "by 20.0 points on every split" in answer
    assert "not significantly worse" not in answer


def test_the_splits_of_the_race_count_for_the_order_but_not_against_fedavg() -> None:
    fedavg = finalist("fedavg", [0.5, 0.52, 0.51], raced=[0.5, 0.5])
    steady = finalist("fedvls", [0.70, 0.69, 0.71], raced=[0.80, 0.82])
    lucky = finalist("scaffold", [0.72, 0.71, 0.73], raced=[0.60, 0.62])
    winner, answer = chosen(fedavg, lucky, steady)
    assert winner == "fedvls"
    assert "74.4 % accuracy on validation data, mean of 5 splits" in answer
    early = finalist("fedrs", [0.50, 0.53, 0.50], raced=[0.9, 0.9])
    winner, answer = chosen(fedavg, early)
    assert winner == "fedavg"
    assert "points better on average over all 5 splits, but on the 3 fresh ones it does not lead" in answer


def test_updates_of_the_chosen_method_that_were_not_finite_are_mentioned() -> None:
    fedavg, fedvls = finalist("fedavg", [0.5, 0.52, 0.51]), finalist("fedvls", [0.7, 0.71, 0.72])
    diverged = fedvls._replace(trials=[replace(trial, diverged=2) for trial in fedvls.trials])
    assert chosen(fedavg, diverged)[1].endswith(
        "In the final, 6 client updates of fedvls were discarded because of values that were not finite; "
        "try a lower --lr."
    )
    assert "finite" not in chosen(fedavg, fedvls)[1]


@pytest.mark.parametrize(
    ("rates", "diverged", "sentence"),
    [
        ((0.1, 0.3, 0.9), 0, "the smallest that was tried; a smaller one may be better"),
        ((0.01, 0.03, 0.1), 0, "the largest that was tried; a larger one may be better"),
        ((0.01, 0.03, 0.1), 2, ""),
        ((0.03, 0.1, 0.3), 0, ""),
        ((0.1,), 0, ""),
        ((), 0, ""),
    ],
)
def test_a_chosen_rate_at_the_end_of_those_tried_is_mentioned(
    rates: Sequence[float], diverged: int, sentence: str
) -> None:
    fedavg, fedvls = finalist("fedavg", [0.5, 0.52, 0.51]), finalist("fedvls", [0.7, 0.71, 0.72])
    fedvls = fedvls._replace(trials=[replace(trial, diverged=diverged) for trial in fedvls.trials])
    other = [Standing("fedavg", "fedavg", rate, {}, {0: 0.5}, True) for rate in (0.001, 10)]
    tried = [Standing("fedvls", "fedvls", rate, {}, {0: 0.5}, True) for rate in rates]
    rungs = [Rung(2, (*other, *tried)), Rung(6, tuple(other))]
    found = decide((fedavg, fedvls), "accuracy", rungs=rungs)["answer"]
    assert [line for line in found if line.startswith("The learning rate")] == (
        [f"The learning rate 0.1 is {sentence}: --lr 0.1."] if sentence else []
    )


def test_a_choice_from_few_splits_comes_with_a_warning() -> None:
    few = chosen(finalist("fedavg", [0.5] * 3), finalist("fedvls", [0.7, 0.71, 0.72]))[1]
    assert "The method was tried on only 3 splits. It may fail on others. A larger budget tries more." in few
    seven = chosen(finalist("fedavg", [0.5] * 6, raced=[0.5]), finalist("fedvls", [0.7, 0.71] * 3, raced=[0.7]))[1]
    assert "The method was tried on only 7 splits." in seven
    many = chosen(finalist("fedavg", [0.5] * 8), finalist("fedvls", [0.7, 0.71] * 4))[1]
    assert "only" not in many
