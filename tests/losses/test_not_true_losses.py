"""FedLMD's and FedNTD's distillation at its edges."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from loss_batches import GENERIC, Batch, batch, batches

from fedskew import losses


@pytest.mark.parametrize("counts", [[4, 4, 4, 4], [1, 1, 1, 1], [500, 500, 500, 500]])
def test_an_even_client_makes_label_masking_not_true_distillation(counts: list[int]) -> None:
    z, t, y = GENERIC.logits[:, :4], GENERIC.teacher[:, :4], GENERIC.targets
    even = Batch(z, t, y, torch.tensor(counts))
    assert even.value("label masking") == pytest.approx(even.value("not true"), rel=1e-14)


def test_a_sample_whose_target_is_the_only_minority_class_has_no_loss() -> None:
    client = batch([[0.5, 2.0, -1.0]], [2], [5, 5, 1], [[1.0, 0.0, -1.0]])
    for name in ("label masking", "teacher-free"):
        assert client.value(name) == 0
        assert (client.gradient(name) == 0).all()


@given(batch=batches(classes=2))
@settings(max_examples=12)
def test_two_classes_leave_nothing_to_distil(batch: Batch) -> None:
    for name in ("not true", "label masking", "label masking paper", "teacher-free"):
        assert batch.value(name) == 0
        assert (batch.gradient(name) == 0).all()


def test_all_classes_majority_by_the_papers_rule_leaves_no_teacher() -> None:
    even = Batch(GENERIC.logits, GENERIC.teacher, GENERIC.targets, torch.full((5,), 3))
    assert bool(losses.majority_classes(even.counts, "paper").all())
    assert even.value("label masking paper") == 0
    assert (even.gradient("label masking paper") == 0).all()


def test_a_client_with_every_present_class_alike_has_only_vacant_minorities() -> None:
    counts = torch.tensor([3, 3, 0, 0])
    assert losses.majority_classes(counts).tolist() == [True, True, False, False]
    assert losses.majority_classes(counts, "paper").tolist() == [True, True, False, False]


def test_the_rules_differ_on_a_class_between_the_two_means() -> None:
    counts = torch.tensor([8, 3, 1, 0, 0, 0])  # n/C = 2, n over classes present = 4
    assert losses.majority_classes(counts).tolist() == [True, True, False, False, False, False]
    assert losses.majority_classes(counts, "paper").tolist() == [True, False, False, False, False, False]


def test_a_count_of_exactly_the_mean_is_majority_by_the_papers_rule_only() -> None:
    counts = torch.tensor([4, 2, 3])
    assert losses.majority_classes(counts).tolist() == [True, False, False]
    assert losses.majority_classes(counts, "paper").tolist() == [True, False, True]


def test_majority_classes_that_are_not_the_target_are_pushed_down() -> None:
    client = batch([[0.0, 0.0, 0.0, 0.0]], [0], [5, 5, 0, 0], [[0.0, 0.0, 1.0, 0.0]])
    gradient = client.gradient("label masking")[0]
    assert gradient[0] == 0
    assert gradient[1] > 0


def test_teacher_free_is_uniform_over_the_minority_without_the_target() -> None:
    client = batch([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]], [0, 2], [9, 0, 1, 0])
    # minority: 1, 2, 3; for the first sample 1/3 each over three others, for the second 1/2 on two of three
    expected = 4 * (0 + math.log(3 / 2)) / 2
    assert client.value("teacher-free") == pytest.approx(expected, rel=1e-14)


@given(batch=batches())
@settings(max_examples=12)
def test_distillation_never_moves_the_targets_logit(batch: Batch) -> None:
    rows = torch.arange(len(batch.targets))
    for name in ("not true", "label masking", "teacher-free"):
        assert (batch.gradient(name)[rows, batch.targets] == 0).all()
