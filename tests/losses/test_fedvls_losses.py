"""FedVLS's three terms at their edges."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_batches import GENERIC, Batch, batch, batches

from fedskew import losses


def present_shifted(batch: Batch, shift: float) -> Batch:
    return Batch(batch.logits + shift * (batch.counts > 0).double(), batch.teacher, batch.targets, batch.counts)


@given(batch=batches(), shift=st.floats(-1e3, 1e3))
@settings(max_examples=12)
def test_calibration_and_vacant_distillation_ignore_a_shift_of_all_present_logits(batch: Batch, shift: float) -> None:
    moved = present_shifted(batch, shift)
    for name in ("calibrated", "vacant"):
        assert moved.value(name) == pytest.approx(batch.value(name), rel=1e-9, abs=1e-9)


@given(batch=batches(), shift=st.floats(0, 1e6))
@settings(max_examples=12)
def test_the_papers_suppression_follows_that_shift_down_without_bound(batch: Batch, shift: float) -> None:
    y, n = batch.targets.tolist(), batch.counts.tolist()
    slope = sum(n[c] for c in range(len(n)) if any(target != c for target in y)) / sum(n)
    expected = batch.value("suppression paper") - slope * shift
    assert present_shifted(batch, -shift).value("suppression paper") == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_with_weight_one_the_papers_objective_therefore_has_no_minimum() -> None:
    def objective(shift: float) -> float:
        moved = present_shifted(GENERIC, shift)
        return sum(moved.value(name) for name in ("calibrated", "vacant", "suppression paper"))

    assert objective(-1e6) < -0.9e6


@given(batch=batches(), shift=st.floats(0, 1e6))
@settings(max_examples=12)
def test_the_programs_suppression_has_a_floor_for_classes_in_the_batch(batch: Batch, shift: float) -> None:
    y = batch.targets.tolist()
    counts = torch.tensor([n if c in y else 0 for c, n in enumerate(batch.counts.tolist())])
    inside = Batch(batch.logits, batch.teacher, batch.targets, counts)
    floor = sum(counts.tolist()[c] / sum(counts.tolist()) * math.log(y.count(c) / len(y)) for c in set(y))
    assert present_shifted(inside, -shift).value("suppression lade") >= floor - 1e-9


def test_the_floor_is_reached_for_very_small_logits() -> None:
    client = batch([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], [0, 0, 1], [3, 1])
    expected = 3 / 4 * math.log(2 / 3) + 1 / 4 * math.log(1 / 3)
    assert present_shifted(client, -1e3).value("suppression lade") == pytest.approx(expected, rel=1e-12)


def test_no_vacant_class_gives_exactly_zero_distillation_and_zero_gradient() -> None:
    full = Batch(GENERIC.logits, GENERIC.teacher, GENERIC.targets, torch.tensor([6, 2, 1, 1, 3]))
    assert full.value("vacant") == 0
    assert (full.gradient("vacant") == 0).all()


def test_one_vacant_class_gives_exactly_zero_distillation_and_zero_gradient() -> None:
    nearly = Batch(GENERIC.logits, GENERIC.teacher, GENERIC.targets, torch.tensor([6, 2, 1, 1, 0]))
    assert nearly.value("vacant") == 0
    assert (nearly.gradient("vacant") == 0).all()


def test_vacant_distillation_reaches_vacant_logits_only() -> None:
    gradient = GENERIC.gradient("vacant")
    assert (gradient[:, :3] == 0).all()
    assert (gradient[:, 3:] != 0).all()


def test_vacant_distillation_needs_no_targets() -> None:
    without = losses.vacant_distillation(GENERIC.logits, GENERIC.teacher, GENERIC.counts)
    assert float(without) == GENERIC.value("vacant")


def test_calibration_gives_vacant_logits_no_gradient() -> None:
    assert (GENERIC.gradient("calibrated")[:, 3:] == 0).all()


def test_calibration_of_an_even_client_is_cross_entropy() -> None:
    even = Batch(GENERIC.logits, GENERIC.teacher, GENERIC.targets, torch.full((5,), 4))
    assert even.value("calibrated") == pytest.approx(even.value("cross_entropy"), rel=1e-14)


def test_a_single_class_client_learns_from_the_vacant_classes_only() -> None:
    single = batch([[0.5, 2.0, -1.0], [1.0, 0.0, 3.0]], [1, 1], [0, 9, 0], [[1.0, 0.0, -1.0], [0.0, 2.0, 1.0]])
    for name in ("calibrated", "suppression paper"):
        assert single.value(name) == 0
        assert (single.gradient(name) == 0).all()
    assert single.value("vacant") > 0
    assert (single.gradient("vacant")[:, 1] == 0).all()


def test_a_class_without_negatives_in_the_batch_is_skipped_by_the_paper_and_zero_in_the_program() -> None:
    same_label = batch([[0.3, 1.0, -2.0], [2.0, 0.1, 0.4]], [0, 0], [5, 5, 0])
    paper = 0.5 * math.log((math.exp(1.0) + math.exp(0.1)) / 2)  # class 1 only
    assert same_label.value("suppression paper") == pytest.approx(paper, rel=1e-14)
    shift = math.log((1 / 3 + 1e-9) / (0.5 + 1e-9))
    assert same_label.value("suppression lade") == pytest.approx(paper + 0.5 * shift, rel=1e-14)
    for name in ("suppression paper", "suppression lade"):
        assert (same_label.gradient(name)[:, [0, 2]] == 0).all()


def test_a_batch_of_one_suppresses_all_present_classes_but_its_own() -> None:
    alone = batch([[0.3, 1.0, -2.0]], [0], [2, 2, 0])
    assert alone.value("suppression paper") == pytest.approx(0.5 * 1.0)
    torch.testing.assert_close(alone.gradient("suppression paper"), torch.tensor([[0.0, 0.5, 0.0]]).double())


def test_vacant_classes_are_never_suppressed() -> None:
    for name in ("suppression paper", "suppression lade"):
        assert (GENERIC.gradient(name)[:, 3:] == 0).all()
