"""Metrics from a confusion matrix equal scikit-learn's, and stay defined where a class is missing."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sk

from fedskew.metrics.confusion import Confusion, Evaluation
from fedskew.metrics.multi_label import MultiLabelEvaluation


def confusion_matrix(true: list[int], predicted: list[int], classes: int) -> Confusion:
    matrix: Confusion = sk.confusion_matrix(true, predicted, labels=range(classes))
    return matrix


@st.composite
def predictions(draw: st.DrawFn) -> tuple[int, list[int], list[int]]:
    classes = draw(st.integers(2, 6))
    label = st.integers(0, classes - 1)
    pairs = draw(st.lists(st.tuples(label, label), min_size=1, max_size=60))
    return classes, [t for t, _ in pairs], [p for _, p in pairs]


@given(predictions())
def test_agrees_with_scikit_learn(case: tuple[int, list[int], list[int]]) -> None:
    classes, true, predicted = case
    found = Evaluation(confusion_matrix(true, predicted, classes))
    assert found.accuracy == pytest.approx(sk.accuracy_score(true, predicted), abs=1e-12)
    macro = sk.f1_score(true, predicted, average="macro", zero_division=0)
    assert found.macro_f1 == pytest.approx(macro, abs=1e-12)
    micro = sk.f1_score(true, predicted, average="micro", zero_division=0)
    assert found.micro_f1 == pytest.approx(micro, abs=1e-12)
    recall = sk.recall_score(true, predicted, labels=sorted(set(true)), average=None, zero_division=0)
    assert [found.class_accuracy[c] for c in sorted(set(true))] == pytest.approx(recall, abs=1e-12)
    assert found.mean_class == pytest.approx(np.mean(recall), abs=1e-12)
    assert found.worst_class == pytest.approx(np.min(recall), abs=1e-12)
    assert found.class_gap == pytest.approx(np.ptp(recall), abs=1e-12)
    if len({*true, *predicted}) > 1:
        assert found.kappa == pytest.approx(sk.cohen_kappa_score(true, predicted), abs=1e-12)
    else:
        assert np.isnan(found.kappa), "chance alone agrees fully"


@given(predictions())
def test_an_evaluation_survives_strict_json(case: tuple[int, list[int], list[int]]) -> None:
    classes, true, predicted = case
    evaluation = Evaluation(confusion_matrix(true, predicted, classes), log_loss=0.25)
    text = json.dumps(evaluation.to_json(), allow_nan=False)
    again = Evaluation.from_json(json.loads(text))
    assert again == evaluation
    assert hash(again) == hash(evaluation)
    assert again.to_json() == evaluation.to_json()


def test_a_class_without_samples_has_no_accuracy_and_is_not_the_worst() -> None:
    evaluation = Evaluation(confusion_matrix([0, 0, 2, 2], [0, 1, 2, 2], 3))
    assert evaluation.class_accuracy == (0.5, None, 1.0)
    assert (evaluation.worst_class, evaluation.best_class, evaluation.class_gap) == (0.5, 1.0, 0.5)
    assert evaluation.mean_class == 0.75
    assert evaluation.samples == 4


def test_an_evaluation_keeps_its_own_unchangeable_matrix() -> None:
    matrix = np.eye(2, dtype=np.int64)
    evaluation = Evaluation(matrix)
    matrix[0, 1] = 7
    assert evaluation.accuracy == 1.0
    with pytest.raises(ValueError, match="read-only"):
        evaluation.confusion[0, 0] = 3


@pytest.mark.parametrize("matrix", [np.zeros((2, 2)), np.ones((2, 3)), np.array([[2, -1], [0, 1]])])
def test_a_matrix_that_counts_nothing_is_refused(matrix: np.ndarray) -> None:
    with pytest.raises(ValueError, match="confusion matrix"):
        Evaluation(matrix)


def test_totals_give_an_accuracy_and_no_metric_by_class() -> None:
    blind = Evaluation(np.zeros((3, 3)), (6, 8))
    assert (blind.accuracy, blind.micro_f1, blind.samples) == (0.75, 0.75, 8)
    assert blind.class_accuracy == (None, None, None)
    assert np.isnan([blind.worst_class, blind.mean_class, blind.best_class, blind.class_gap, blind.macro_f1]).all()
    told = blind.to_json()
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert told["worst_class"] is None
    assert Evaluation.from_json(told) == blind


@pytest.mark.parametrize("totals", [(3, 2), (0, 0), (-1, 2)])
def test_totals_that_cannot_be_are_refused(totals: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="expected numbers of correct and of all predictions"):
        Evaluation(np.zeros((2, 2)), totals)


def test_totals_of_several_labels_count_every_sample_once() -> None:
    found = MultiLabelEvaluation(np.zeros((3, 2, 2), int), totals=(18, 30))
    assert (found.samples, found.accuracy) == (10, 0.6)


def test_added_matrices_give_the_mean_accuracy_and_the_macro_f1_of_the_sum() -> None:
    models = [np.array([[4, 0], [4, 0]]), np.array([[2, 2], [0, 4]])]
    added, single = Evaluation(np.sum(models, axis=0)), [Evaluation(matrix) for matrix in models]
    assert added.accuracy == np.mean([one.accuracy for one in single])
    assert added.class_accuracy == tuple(np.mean([one.class_accuracy for one in single], axis=0))
    assert added.macro_f1 == pytest.approx((12 / 18 + 8 / 14) / 2)
    assert added.macro_f1 != pytest.approx(np.mean([one.macro_f1 for one in single]))
