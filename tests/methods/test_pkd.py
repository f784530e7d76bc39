"""PKD: finding groups of weak classes, and its three stages."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from linear_clients import federation, linear_model, played, serve, settings, theta

from fedskew.errors import UserError
from fedskew.experiment.preparation import prepare
from fedskew.losses import active_experts, cross_entropy
from fedskew.methods import Client, Outputs, Stage, Survey, make_method
from fedskew.methods.fedavg import CrossEntropy
from fedskew.methods.pkd import PKD, GroupCrossEntropy, PartialDistillation, weak_groups

TSHIRT, PULLOVER, COAT, SHIRT = 0, 2, 4, 6


def confusion(*pairs: tuple[int, int], strength: float = 0.2, classes: int = 10) -> np.ndarray:
    """Mean probabilities of a model that confuses these pairs both ways and little else."""
    probability = np.full((classes, classes), 0.005)
    for i, j in pairs:
        probability[i, j] = probability[j, i] = strength
    np.fill_diagonal(probability, 0)
    np.fill_diagonal(probability, 1 - probability.sum(axis=1))
    return probability


# -- groups -----------------------------------------------------------------------------------------------


def test_groups_are_cliques_not_components() -> None:
    """Fashion-MNIST: Shirt is confused with T-shirt and with Pullover and Coat, T-shirt with neither of those."""
    confused = confusion((TSHIRT, SHIRT), (PULLOVER, COAT), (PULLOVER, SHIRT), (COAT, SHIRT))
    assert weak_groups(confused, 2.0) == ((TSHIRT, SHIRT), (PULLOVER, COAT, SHIRT))


def test_mnists_two_groups_are_found() -> None:
    triples = [(3, 5), (3, 8), (5, 8), (4, 7), (4, 9), (7, 9)]
    assert weak_groups(confusion(*triples), 1.5) == ((3, 5, 8), (4, 7, 9))


def test_confusion_in_one_direction_counts_half() -> None:
    probability = confusion((0, 1), strength=0.3)
    probability[1, 0] = 0.005
    assert weak_groups(probability, 2.0) == ((0, 1),)


def test_a_higher_threshold_keeps_the_strongest_pairs_only() -> None:
    probability = confusion((0, 1), strength=0.3) + confusion((2, 3), strength=0.15)
    assert weak_groups(probability, 2.0) == ((0, 1), (2, 3))
    assert weak_groups(probability, 4.0) == ((0, 1),)


def test_if_no_pair_stands_out_the_most_confused_pair_is_the_group() -> None:
    rng = np.random.default_rng(0)
    probability = 0.05 + 1e-3 * rng.random((6, 6))
    mutual = probability + probability.T
    np.fill_diagonal(mutual, 0)
    i, j = np.unravel_index(mutual.argmax(), mutual.shape)
    assert weak_groups(probability, 50.0) == (tuple(sorted((int(i), int(j)))),)


def test_two_classes_are_one_pair() -> None:
    assert weak_groups(np.array([[0.9, 0.1], [0.2, 0.8]]), 2.0) == ((0, 1),)


def test_equally_confused_classes_give_one_pair_not_one_group_of_all() -> None:
    assert weak_groups(np.full((10, 10), 0.1), 2.0) == ((0, 1),)


def test_a_class_without_samples_is_in_no_group() -> None:
    probability = confusion((0, 1), (2, 3), (3, 4), (2, 4))
    probability[3] = np.nan
    assert weak_groups(probability, 2.0) == ((0, 1), (2, 4))


@pytest.mark.parametrize("known", [0, 1])
def test_without_two_known_classes_there_is_no_group(known: int) -> None:
    probability = np.full((5, 5), np.nan)
    probability[:known] = 0.2
    assert weak_groups(probability, 2.0) == ()


def test_every_group_is_a_maximal_clique_of_the_confused_pairs() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        pairs = [(i, j) for i in range(8) for j in range(i + 1, 8) if rng.random() < 0.2] or [(0, 1)]
        edges = {frozenset(pair) for pair in pairs}
        groups = weak_groups(confusion(*pairs, strength=0.1, classes=8), 0.0)
        assert {frozenset((i, j)) for group in groups for i in group for j in group if i < j} == edges
        for group in groups:
            assert all(frozenset((i, j)) in edges for i in group for j in group if i < j)
            outside = set(range(8)) - set(group)
            assert not any(all(frozenset((i, o)) in edges for i in group) for o in outside)
        assert len(set(groups)) == len(groups)


# -- stages -----------------------------------------------------------------------------------------------


def lengths(stages: list[Stage]) -> list[tuple[str, int]]:
    return [(stage.name, stage.rounds) for stage in stages]


def test_before_the_survey_only_the_warm_up_is_known() -> None:
    stages = make_method("pkd").stages(100, 5, {})
    assert lengths(stages) == [("warm-up", 10)]
    assert stages[0].survey
    assert stages[0].objective == CrossEntropy()


def test_after_the_survey_come_experts_and_distillation() -> None:
    stages = make_method("pkd", {"distill_weight": 0.5}).stages(100, 5, {"groups": [[0, 6], [2, 4, 6]]})
    assert lengths(stages) == [("warm-up", 10), ("expert 0", 25), ("expert 1", 25), ("distil", 90)]
    assert [stage.model for stage in stages] == ["global", "expert.0", "expert.1", "global"]
    assert [stage.labels for stage in stages] == [None, (0, 6), (2, 4, 6), None]
    assert stages[2].objective == GroupCrossEntropy((2, 4, 6))
    assert stages[3].objective == PartialDistillation(((0, 6), (2, 4, 6)), 0.5, 3.0, False)


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        (1, [("warm-up", 1)]),
        (2, [("warm-up", 1), ("expert 0", 2), ("distil", 1)]),
        (3, [("warm-up", 1), ("expert 0", 3), ("distil", 2)]),
        (20, [("warm-up", 10), ("expert 0", 20), ("distil", 10)]),
        (300, [("warm-up", 10), ("expert 0", 25), ("distil", 290)]),
    ],
)
def test_the_global_model_trains_for_the_runs_rounds(rounds: int, expected: list[tuple[str, int]]) -> None:
    stages = make_method("pkd").stages(rounds, 5, {"groups": [[0, 1]]})
    assert lengths(stages) == expected
    assert sum(stage.rounds for stage in stages if stage.model == "global") == rounds


def test_given_groups_need_no_survey() -> None:
    stages = make_method("pkd", {"groups": [[3, 5, 8]]}).stages(10, 5, {})
    assert not any(stage.survey for stage in stages)
    assert lengths(stages) == [("warm-up", 5), ("expert 0", 10), ("distil", 5)]


def test_experts_may_train_for_fewer_epochs() -> None:
    stages = make_method("pkd", {"groups": [[0, 1]], "expert_epochs": 1}).stages(10, 5, {})
    assert stages[1].local_epochs == 1
    assert stages[2].local_epochs is None


def test_without_groups_training_continues() -> None:
    survey = Survey(np.array([[3, 0, 0, 0]]), np.full((4, 4), np.nan))
    method = make_method("pkd")
    notes = method.conclude(method.stages(10, 5, {})[0], survey)
    stages = method.stages(10, 5, notes)
    assert lengths(stages) == [("warm-up", 5), ("train", 5)]
    assert stages[1].objective == CrossEntropy()


@pytest.mark.parametrize("groups", [[[1]], [[]], [[-1, 2]], [[2, 2]], [[0, 1], [2, 4, 2]]])
def test_a_group_of_less_than_two_different_classes_is_refused(groups: list[list[int]]) -> None:
    with pytest.raises(UserError, match=r"groups is .*; expected groups of two or more different classes"):
        make_method("pkd", {"groups": groups})


def test_a_group_beyond_the_datas_classes_is_refused_before_training() -> None:
    config = settings(method="pkd", method_params={"groups": [[0, 7]]})
    with pytest.raises(UserError, match=r"groups is \(0, 7\); expected classes from 0 to 3"):
        prepare(config, federation(), model=linear_model())


# -- a run ------------------------------------------------------------------------------------------------

GROUPS = {"groups": [[0, 1], [1, 2, 3]], "expert_rounds": 2}


def test_warm_up_is_fedavg_and_the_experts_start_from_it() -> None:
    states, rows = played(serve("pkd", GROUPS, rounds=4))
    fedavg, _ = played(serve("fedavg", rounds=4))
    np.testing.assert_array_equal(theta(states[2]), theta(fedavg[2]))
    assert [row.stage for row in rows] == ["warm-up"] * 2 + ["expert 0"] * 2 + ["expert 1"] * 2 + ["distil"] * 2
    np.testing.assert_array_equal(theta(states[6]), theta(states[2]))  # experts leave the global model alone
    assert set(states[-1].models) == {"global", "expert.0", "expert.1"}


def test_an_expert_leaves_the_rows_of_other_classes_alone() -> None:
    states, _ = played(serve("pkd", GROUPS, rounds=4, weight_decay=0.0))
    warm, expert = states[2].model.params["head.weight"], states[-1].models["expert.0"].model.params["head.weight"]
    # The rows are equal on all clients. On some processors, their weighted mean still differs in the last bit.
    np.testing.assert_allclose(expert[2:].numpy(), warm[2:].numpy(), rtol=1e-15)
    assert not np.allclose(expert[:2].numpy(), warm[:2].numpy())


def test_only_clients_with_a_label_of_the_group_train_its_expert() -> None:
    _, rows = played(serve("pkd", GROUPS, rounds=4))
    assert [row.clients for row in rows if row.stage == "expert 0"] == [[0, 1, 2]] * 2
    assert [row.clients for row in rows if row.stage == "expert 1"] == [[0, 1]] * 2


def test_without_weight_distillation_is_fedavg() -> None:
    zero = played(serve("pkd", {**GROUPS, "distill_weight": 0.0}, rounds=4))[0][-1]
    fedavg = played(serve("fedavg", rounds=4))[0][-1]
    np.testing.assert_allclose(theta(zero), theta(fedavg), rtol=1e-13)


def test_distillation_moves_the_model_where_classes_are_confused() -> None:
    states, rows = played(serve("pkd", GROUPS, rounds=4))
    distilled = sum(row.tally.get("distilled", 0) for row in rows)
    assert distilled > 0
    fedavg = played(serve("fedavg", rounds=4))[0][-1]
    assert np.abs(theta(states[-1]) - theta(fedavg)).max() > 1e-6


@pytest.mark.parametrize("engine", ["plain", "stacked"])
@pytest.mark.parametrize("rounds", [1, 2])
def test_groups_are_found_and_used_in_the_shortest_runs(rounds: int, engine: str) -> None:
    states, rows = played(serve("pkd", rounds=rounds, engine=engine))
    assert states[-1].notes["groups"]
    assert sum(row.model == "global" for row in rows) == rounds


def test_a_federation_of_one_class_is_trained_to_the_end() -> None:
    lonely = federation(np.array([[4, 0, 0], [3, 0, 0]]))
    _, rows = played(serve("pkd", federation=lonely, rounds=4))
    assert [row.stage for row in rows] == ["warm-up"] * 2 + ["train"] * 2


# -- who teaches whom -------------------------------------------------------------------------------------


def test_each_expert_counts_the_samples_that_it_taught() -> None:
    """Rows: right; confused in the first group; twice in the second; in both, where the first teaches; in neither."""
    predicted = torch.tensor([0, 0, 3, 2, 1, 3])
    y = torch.tensor([0, 1, 2, 3, 2, 0])
    logits = torch.eye(4)[predicted]
    tally = PartialDistillation(((0, 1, 2), (1, 2, 3))).tally(Outputs(logits), y)
    assert {name: int(t) for name, t in tally.items()} == {"distilled": 4, "expert 0": 2, "expert 1": 2}


def test_the_engines_agree_on_who_was_taught_by_whom() -> None:
    tallies = {}
    for engine in ("plain", "stacked"):
        _, rows = played(serve("pkd", GROUPS, rounds=6, engine=engine))
        tallies[engine] = [row.tally for row in rows if row.stage == "distil"]
        assert all(t["distilled"] == t["expert 0"] + t["expert 1"] for t in tallies[engine])
    assert tallies["plain"] == tallies["stacked"]
    assert all(sum(t[f"expert {i}"] for t in tallies["plain"]) > 0 for i in (0, 1))


# -- recorded computation ---------------------------------------------------------------------------


def test_computation_is_counted_in_the_papers_unit() -> None:
    fed = federation(np.array([[4, 2, 2, 2], [4, 2, 2, 2]]))
    params = {"groups": [[0, 1]], "expert_rounds": 1, "expert_epochs": 1}
    _, rows = played(serve("pkd", params, federation=fed, rounds=2))
    warm, expert, distil = rows
    assert warm.compute == 1
    assert expert.compute == pytest.approx((1 / 3) * (6 / 10))  # (E_exp/E)·n_g/N
    assert distil.compute == pytest.approx(1 + distil.tally["distilled"] / (3 * 3 * 20))  # 1 + n_KD/(3·E·N)


def test_a_round_in_which_nobody_takes_a_step_distils_nothing() -> None:
    assert PartialDistillation(((0, 1),)).extra_forwards(0, {}) == 0


def test_a_pkd_object_can_be_passed() -> None:
    assert make_method(PKD(temperature=2.0)) == make_method("pkd", {"temperature": 2.0})


def test_only_the_most_confused_groups_get_an_expert() -> None:
    probability = np.full((6, 6), 0.01)
    for strength, (i, j) in zip((0.3, 0.5, 0.4), ((0, 1), (2, 3), (4, 5)), strict=True):
        probability[i, j] = probability[j, i] = strength
    assert weak_groups(probability, 0.5) == ((0, 1), (2, 3), (4, 5))
    assert weak_groups(probability, 0.5, max_groups=2) == ((2, 3), (4, 5))
    assert make_method("pkd", {"max_groups": 1}).conclude(Stage("s", 1, GroupCrossEntropy()), survey(probability)) == {
        "groups": [[2, 3]]
    }


def survey(probability: np.ndarray) -> Survey:
    return Survey(np.ones((1, len(probability)), dtype=np.int64), probability)


def test_the_options_of_the_distillation() -> None:
    torch.manual_seed(0)
    z, expert = torch.randn(2, 8, 3, dtype=torch.float64)
    y = torch.randint(0, 3, (8,))
    out = Outputs(z, None, {"expert.0": Outputs(expert)})
    client = Client(torch.ones(3), {})
    taught = active_experts(z, y, [(0, 1)]).sum()
    assert 0 < taught < 8

    def distilled(**options: object) -> torch.Tensor:
        return PartialDistillation(((0, 1),), **options).loss(out, y, client) - cross_entropy(z, y)

    torch.testing.assert_close(distilled(temperature_squared=True), 9 * distilled())
    torch.testing.assert_close(distilled(mean_over="active"), distilled() * 8 / taught)


def test_experts_may_teach_every_sample_of_their_classes() -> None:
    torch.manual_seed(0)
    z, expert = torch.randn(2, 8, 3, dtype=torch.float64)
    y = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    objective = make_method("pkd", {"groups": [[0, 1]], "taught": "all"}).stages(20, 1, {})[-1].objective
    assert isinstance(objective, PartialDistillation)
    log_p, log_q = ((t[:, :2] / 3).log_softmax(dim=-1) for t in (expert, z))
    kl = (log_p.exp() * (log_p - log_q)).sum(dim=-1)[y != 2].sum() / 8
    loss = objective.loss(Outputs(z, None, {"expert.0": Outputs(expert)}), y, Client(torch.ones(3), {}))
    torch.testing.assert_close(loss - cross_entropy(z, y), kl)
    assert {name: int(t) for name, t in objective.tally(Outputs(z), y).items()} == {"distilled": 6, "expert 0": 6}
