"""The section about the predictions over the rounds: whose seed it shows, and which labels are missing."""

from __future__ import annotations

from dataclasses import replace

from made_up_runs import made_up

from fedskew.report.sections.predictions import predictions
from fedskew.results import compare_runs


def test_the_seed_is_named_only_if_all_methods_show_it() -> None:
    runs = [made_up("fedavg", 0, [0.5, 0.5]), made_up("fedvls", 0, [0.5, 0.5]), made_up("fedvls", 1, [0.5, 0.5])]
    assert "after the round (seed 0)." in predictions(compare_runs(runs)).paragraphs[0]
    assert "after the round (one seed of each method)." in predictions(compare_runs([runs[0], runs[2]])).paragraphs[0]


def test_a_model_that_no_client_trained_has_no_labels_of_clients() -> None:
    run = made_up("centralised", 0, [0.5, 0.5])
    section = predictions(compare_runs([replace(run, history=[replace(row, clients=[]) for row in run.history])]))
    assert section.missing == [
        "labels of the sampled clients: no run has both label counts and a round in which clients trained the global "
        "model"
    ]


def test_a_long_run_is_said_to_be_drawn_only_in_part() -> None:
    short = made_up("fedavg", 0, [0.5, 0.5])
    first, last = short.history
    long = replace(short, history=[first, *(replace(last, round=t, model_round=t) for t in range(1, 121))])
    assert len(predictions(compare_runs([short])).paragraphs) == 1
    assert predictions(compare_runs([long])).paragraphs[1] == "A panel shows at most 100 rounds, the first ones."
