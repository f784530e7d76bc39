"""The answer in words says what the numbers say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from made_up_runs import made_up

from fedskew.metrics.confusion import Evaluation
from fedskew.report.verdict import verdict
from fedskew.results import Result, comparisons

GOOD, BAD = [0.9, 0.9, 0.6], [0.9, 0.3, 0.0]


def said(*runs: Result) -> str:
    (setting,) = comparisons(runs)
    return "\n".join(verdict(setting))


def test_the_best_its_lead_and_the_classes() -> None:
    runs = [made_up("fedavg", s, [b - s / 50 for b in (0.9, 0.3, 0.06)]) for s in range(4)]
    runs += [made_up("fedvls", s, GOOD) for s in range(4)]
    text = said(*runs)
    assert text.startswith("fedvls is best here: 80.0 % of the test set (mean of 4 seeds)")
    assert "It leads fedavg by 41.0 points" in text
    assert "better with 4 of 4 seeds: significant (p < 0.001, interval +36.9 to +45.1 points)." in text
    assert "these classes gain most: class 1 (+63), class 2 (+57), class 0 (+3, not with every seed)" in text
    assert "Classes that lose accuracy: none by a point or more" in text
    assert "fedvls's weakest class is class 2 with 60.0 %; no class is lost" in text
    assert "fedvls costs about as much as fedavg" in text


@pytest.mark.parametrize(("seeds", "seen"), [(1, "one seed"), (2, "better with 2 of 2 seeds")])
def test_fewer_than_three_seeds_are_not_tested(seeds: int, seen: str) -> None:
    runs = [made_up("fedavg", s, [b + s / 25 for b in BAD]) for s in range(seeds)]
    text = said(*runs, *(made_up("fedvls", s, GOOD) for s in range(seeds)))
    assert f"points ({seen}); a test needs at least 3 seeds: --seeds 3." in text
    assert "significant" not in text
    assert "interval" not in text


def test_what_a_test_needs_is_stated_once() -> None:
    runs = [made_up(method, 0, [share] * 2) for method, share in (("fedavg", 0.2), ("fedvls", 0.6), ("fedlmd", 0.4))]
    text = said(*runs)
    assert text.count("a test needs at least 3 seeds") == 1
    assert "fedvls gains 40.0 points over fedavg." in text


def test_what_a_test_needs_is_stated_for_the_baseline_if_the_two_best_are_equal() -> None:
    runs = [made_up(method, 0, [share] * 2) for method, share in (("fedavg", 0.2), ("fedvls", 0.6), ("fedlmd", 0.6))]
    text = said(*runs)
    assert "equally good" in text
    assert "fedvls gains 40.0 points over fedavg (one seed); a test needs at least 3 seeds: --seeds 3." in text


@pytest.mark.parametrize("seeds_of_second", [(5,), (0, 1, 2)])
def test_what_a_test_needs_is_stated_for_the_baseline_if_the_lead_does_not_state_it(
    seeds_of_second: tuple[int, ...],
) -> None:
    """The second best has no seed in common with the best one, or enough of them."""
    runs = [made_up("fedvls", s, [0.6 + s / 100] * 2) for s in range(3)]
    runs += [made_up("fedlmd", s, [0.3 + s * s / 100] * 2) for s in seeds_of_second]
    text = said(*runs, made_up("fedavg", 0, [0.2] * 2))
    assert "fedvls gains 40.0 points over fedavg (one seed); a test needs at least 3 seeds: --seeds 3." in text


def test_more_classes_lose_accuracy_than_are_listed() -> None:
    text = said(made_up("fedavg", 0, [0.1, *[0.5] * 7]), made_up("fedvls", 0, [1.0, 1.0, *[0.4] * 6]))
    assert "Classes that lose accuracy: class " in text
    assert "(−10) and 1 more." in text


def test_a_difference_within_the_spread_is_not_significant() -> None:
    runs = [made_up("fedavg", s, [0.5 + d, 0.5]) for s, d in enumerate((0.1, -0.1, 0.05))]
    runs += [made_up("fedvls", s, [0.5 - d, 0.52]) for s, d in enumerate((0.1, -0.1, 0.05))]
    text = said(*runs)
    assert "not significant (p = " in text
    assert "Even 30 seeds would hardly settle it." in text


def test_it_says_how_many_seeds_would_settle_it() -> None:
    ahead = {"fedvls": (0.71, 0.69, 0.74), "fedavg": (0.70, 0.64, 0.71)}
    text = said(*(made_up(method, s, [a] * 2) for method, found in ahead.items() for s, a in enumerate(found)))
    assert "It leads fedavg by 3.0 points, better with 3 of 3 seeds: not significant (p = 0.122" in text
    assert "If the difference stays as it is, --seeds 6 would probably settle it." in text


def test_a_significant_p_value_is_not_rounded_to_the_level() -> None:
    runs = [made_up("fedavg", s, [0.1, 0.1]) for s in range(3)]
    runs += [made_up("fedvls", s, [0.1 + lead] * 2) for s, lead in enumerate((0.10, 0.19, 0.24))]
    assert "better with 3 of 3 seeds: significant (p = 0.0498, interval" in said(*runs)


def imbalanced(method: str, seed: int, right: list[int]) -> Result:
    """900 test samples of class 0 and 100 of class 1."""
    run = made_up(method, seed, [0.5, 0.5])
    matrix = np.array([[right[0], 900 - right[0]], [100 - right[1], right[1]]])
    return replace(run, history=[run.history[0], replace(run.history[1], evaluation=Evaluation(matrix))])


def test_a_method_that_serves_rare_classes_better_is_named_beside_the_most_accurate() -> None:
    runs = [imbalanced("fedavg", s, [895 + s, 20]) for s in range(3)]
    runs += [imbalanced("fedvls", s, [870 + s, 41]) for s in range(3)]
    text = said(*runs)
    assert text.startswith("fedavg is best here: 91.6 % of the test set")
    assert "fedvls has a better macro F1 (71.7 % against 63.9 %)" in text
    assert "and a much better worst class (41.0 % against 20.0 %); to rank by macro F1: --rank-by macro-f1." in text
    (ranked,) = comparisons(runs, "macro-f1")
    told = verdict(ranked)
    assert told[0].startswith("fedvls is best here by macro F1: 71.7 % (mean of 3 seeds)")
    assert not any("much better worst class" in line for line in told)


def test_rare_classes_are_compared_on_the_seeds_that_rank_the_methods() -> None:
    """On the only seed that both have, FedAvg is better in everything. FedVLS also has an easier one."""
    runs = [imbalanced("fedavg", 0, [880, 60]), imbalanced("fedavg", 1, [700, 20])]
    runs += [imbalanced("fedvls", 0, [870, 50]), imbalanced("fedvls", 2, [890, 95])]
    text = said(*runs)
    assert "ranked on the seeds that all of them have (0)" in text
    assert "fedavg is best here" in text
    assert "much better worst class" not in text


def test_fedavg_may_be_the_best() -> None:
    text = said(made_up("fedavg", 0, GOOD), made_up("fedvls", 0, BAD))
    assert text.startswith("fedavg is best here")
    assert "gain most" not in text


def test_a_bound_is_no_rival() -> None:
    runs = [made_up("fedavg", s, [0.5, 0.5 + s * s / 50]) for s in range(3)]
    runs += [made_up("fedvls", s, [0.6, 0.6]) for s in range(3)]
    text = said(*runs, made_up("centralised", 0, [0.95, 0.95]))
    assert text.startswith("fedvls is best here: 60.0 % of the test set (mean of 3 seeds)")
    assert "better with 3 of 3 seeds" in text, "though the bound has one only"
    assert text.endswith("Reference bounds, not federated methods: centralised 95.0 %.")
    assert text.count("centralised") == 1


def test_one_method_beside_a_bound_is_not_compared() -> None:
    text = said(made_up("fedavg", 0, GOOD), made_up("centralised", 0, [0.95, 0.95, 0.95]))
    assert text.startswith("fedavg recognises 80.0 % of the test set")
    assert "leads" not in text


def test_equal_methods_are_called_equal() -> None:
    text = said(*(made_up(m, s, GOOD) for m in ("fedavg", "fedvls") for s in (0, 1)))
    assert text.startswith("fedavg and fedvls are equally good here: 80.0 %")
    assert "leads" not in text
    assert "fedavg's weakest class is class 2" in text, "which of the two is said"


@pytest.mark.parametrize("seeds", [1, 3])
def test_all_equal_methods_are_named_and_not_compared(seeds: int) -> None:
    text = said(*(made_up(m, s, GOOD) for m in ("fedvls", "fedlmd", "fedavg") for s in range(seeds)))
    assert text.startswith("fedvls, fedlmd and fedavg are equally good here: 80.0 %")
    assert "significant" not in text
    assert "over fedavg" not in text


def test_all_of_the_weakest_classes_are_named() -> None:
    text = said(made_up("fedavg", 0, [0.9, 0.3, 0.3]))
    assert "Its weakest classes are class 1, class 2 with 30.0 %; no class is lost." in text


def test_the_best_is_compared_with_each_other_method_and_corrected_for_all_pairs() -> None:
    runs = [made_up(m, s, [a + s * s / 50] * 2) for m, a in (("fedavg", 0.3), ("fedvls", 0.6)) for s in range(3)]
    runs += [made_up("fedlmd", s, [0.4 + s / 50] * 2) for s in range(3)]
    runs += [made_up("fedprox", s, [0.2 + (s == 1) / 50] * 2) for s in range(3)]
    text = said(*runs)
    assert "corrected for 5 pairs of methods" in text, "fedvls minus fedavg is the same with every seed, so not tested"
    assert "corrected for all 3 pairs of methods" in said(*(run for run in runs if run.method != "fedavg"))
    assert "fedvls gains 30.0 points over fedavg, better with 3 of 3 seeds. The difference is identical" in text


def test_half_a_run_is_not_compared_in_cost() -> None:
    text = said(made_up("fedavg", 0, BAD), made_up("fedvls", 0, GOOD, finished=False))
    assert "Unfinished: fedvls (0 of 1 runs finished, shown after round 1)" in text
    assert "costs" not in text


def test_updates_that_were_left_out_are_told() -> None:
    run = made_up("fedavg", 0, GOOD)
    run.history[1] = replace(run.history[1], diverged=[0, 1])
    assert "left out because they, or the server's step with them, were not finite: 2 of fedavg." in said(run)


def test_a_lost_class_is_named() -> None:
    assert "lost classes (below 5 %): class 2" in said(made_up("fedavg", 0, BAD))


def test_the_classes_that_fedavg_loses_are_named_beside_the_best_method() -> None:
    text = said(
        made_up("fedavg", 0, BAD), made_up("fedavg", 1, [0.9, 0.0, 0.0]), *[made_up("fedvls", s, GOOD) for s in (0, 1)]
    )
    assert "fedavg has lost classes (below 5 %), 1.5 per seed: class 1, class 2.\nCompared with fedavg" in text
    assert "lost classes" not in said(made_up("fedavg", 0, [0.9, 0.3]), made_up("fedvls", 0, [0.9, 0.6]))


def test_a_class_that_one_seed_loses_is_lost_even_if_its_mean_is_not() -> None:
    text = said(made_up("fedavg", 0, [0.9, 0.0, 0.0]), made_up("fedavg", 1, [0.9, 0.8, 0.0]))
    assert "Its weakest class is class 2 with 0.0 %; lost classes (below 5 %), 1.5 per seed: class 1, class 2." in text
    text = said(made_up("fedavg", 0, [0.9, 0.0]), made_up("fedavg", 1, [0.9, 0.8]))
    assert "with 40.0 %; lost classes (below 5 %), 0.5 per seed: class 1." in text


def test_unfinished_runs_do_not_count_where_there_are_finished_ones() -> None:
    text = said(made_up("fedavg", 0, BAD), made_up("fedavg", 1, GOOD, finished=False), made_up("fedvls", 0, BAD))
    assert "Unfinished: fedavg (1 of 2 runs finished)" in text
    assert "(one seed, 0)" in text


def test_while_nothing_is_finished_it_says_how_far_they_are() -> None:
    assert said(made_up("fedavg", 0, BAD, finished=False)).startswith(
        "No run is finished; these are the results after round 1"
    )


def test_methods_with_other_seeds_are_ranked_on_the_common_ones() -> None:
    text = said(made_up("fedavg", 0, BAD), made_up("fedvls", 0, GOOD), made_up("fedvls", 1, [0.0, 0.0, 0.0]))
    assert "ranked on the seeds that all of them have (0)" in text
    assert "fedvls is best here" in text


def test_the_best_on_the_common_seeds_may_be_behind_on_the_seeds_that_two_methods_share() -> None:
    runs = [made_up("fedprox", 0, [0.1] * 2)]
    runs += [made_up("fedvls", s, [0.9 if s == 0 else 0.3 + s / 100] * 2) for s in range(4)]
    text = said(*runs, *(made_up("fedavg", s, [0.8] * 2) for s in range(4)))
    assert "fedvls is best here" in text
    assert "On the seeds that both have, it is behind fedavg by 33.5 points, better with 1 of 4 seeds" in text


def test_without_a_gain_the_classes_are_still_compared_with_the_baseline() -> None:
    """The best method gains half a point, as the mean of two seeds."""
    runs = [made_up("fedavg", s, [0.5, 0.5]) for s in range(2)]
    text = said(*runs, made_up("fedvls", 0, [0.5, 0.5]), made_up("fedvls", 1, [0.51, 0.51]))
    assert "Compared with fedavg, no class gains a point or more." in text


def test_contenders_of_one_method_are_told_apart_by_their_parameters() -> None:
    runs = [made_up("fedprox", 0, BAD, **{"method.mu": mu}) for mu in (0.1, 1.0)]
    (setting,) = comparisons(runs)
    assert [c.label for c in setting.methods] == ["fedprox (mu=0.1)", "fedprox (mu=1.0)"]


def test_variants_in_several_parameters_are_named_by_what_is_not_usual() -> None:
    variants: list[dict[str, object]] = [{}, {"method.distill_weight": 0.0}, {"method.suppress_weight": 0.0}]
    (setting,) = comparisons([made_up("fedvls", 0, BAD, **values) for values in variants])
    labels = ["fedvls", "fedvls (distill_weight=0.0)", "fedvls (suppress_weight=0.0)"]
    assert [c.label for c in setting.methods] == labels


def test_settings_come_by_what_was_varied() -> None:
    betas = (0.5, 10.0, 0.1)
    found = comparisons([made_up("fedavg", 0, BAD, **{"partition.beta": beta}) for beta in betas])
    assert [s.label for s in found] == ["beta=0.1", "beta=0.5", "beta=10.0"]


def test_settings_of_other_rules_are_named_by_them() -> None:
    rules: list[dict[str, object]] = [
        {"partition": "iid"},
        {"partition": "dirichlet", "partition.beta": 0.1},
        {"partition": "fedgr-label", "partition.labels_per_client": 2},
        {"partition": "fedgr-label", "partition.labels_per_client": 3},
    ]
    found = comparisons([made_up("fedavg", 0, BAD, **values) for values in rules])
    fedgr = ["fedgr-label, labels_per_client=2", "fedgr-label, labels_per_client=3"]
    assert sorted(s.label for s in found) == ["dirichlet beta 0.1", *fedgr, "iid"]


def test_other_settings_are_not_compared_with_one_another() -> None:
    found = comparisons([made_up("fedavg", 0, BAD, lr=0.1), made_up("fedvls", 0, GOOD, lr=0.2)])
    assert [s.label for s in found] == ["lr=0.1", "lr=0.2"]


def test_engine_and_place_of_the_data_make_no_other_experiment() -> None:
    (setting,) = comparisons([made_up("fedavg", 0, BAD, engine="plain"), made_up("fedvls", 0, GOOD, data_dir="/else")])
    assert len(setting.methods) == 2


def test_the_same_seed_twice_counts_once() -> None:
    (setting,) = comparisons([made_up("fedavg", 0, BAD, engine="plain"), made_up("fedavg", 0, BAD, engine="stacked")])
    assert len(setting.methods[0].runs) == 1


def test_equal_methods_with_different_seeds_have_no_common_mean() -> None:
    runs = [made_up("fedavg", 0, BAD), made_up("fedavg", 1, GOOD), made_up("fedvls", 1, GOOD)]
    assert "fedavg and fedvls are equally good here on the seeds that both have." in said(*runs)
