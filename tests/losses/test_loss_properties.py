"""Every public loss against its formula, and properties that all of them have."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_batches import GENERIC, Batch, batches
from loss_formulas import DIVERGENCES, LOSSES, SHIFT_INVARIANT, every_loss, one, weak_groups, weighted_ce
from torch import Tensor

from fedskew import losses
from fedskew.losses import IGNORE


@every_loss
@given(batch=batches())
@settings(max_examples=20)
def test_the_value_matches_the_formula(name: str, batch: Batch) -> None:
    assert batch.value(name) == pytest.approx(batch.expected(name), rel=1e-11, abs=1e-11)


@every_loss
def test_the_gradient_matches_finite_differences(name: str) -> None:
    def loss(z: Tensor) -> Tensor:
        return LOSSES[name][0](z, GENERIC.teacher, GENERIC.targets, GENERIC.counts)

    assert torch.autograd.gradcheck(loss, GENERIC.logits.clone().requires_grad_(), atol=1e-9, rtol=1e-6)


@pytest.mark.parametrize("name", [*DIVERGENCES, "partial reverse"])
def test_teacher_gets_no_gradient(name: str) -> None:
    teacher = GENERIC.teacher.clone().requires_grad_()
    z = GENERIC.logits.clone().requires_grad_()
    loss = LOSSES[name][0](z, teacher, GENERIC.targets, GENERIC.counts)
    assert torch.autograd.grad(loss, teacher, allow_unused=True)[0] is None


def test_the_papers_gradient_of_the_calibrated_loss_is_p_weighted_softmax_minus_one_hot() -> None:
    p = GENERIC.counts.double() / GENERIC.counts.sum()
    weighted = p * GENERIC.logits.exp()
    one_hot = torch.nn.functional.one_hot(GENERIC.targets, 5)
    expected = (weighted / weighted.sum(1, keepdim=True) - one_hot) / len(GENERIC.targets)
    torch.testing.assert_close(GENERIC.gradient("calibrated"), expected, rtol=1e-12, atol=1e-15)


def test_group_cross_entropy_leaves_other_classes_out() -> None:
    z, y = GENERIC.logits, torch.tensor([1, 3, 3, 1])
    rows = [[row[1], row[3]] for row in z.tolist()]
    expected = weighted_ce(rows, [0, 1, 1, 0], one, one)
    assert float(losses.group_cross_entropy(z, y, (1, 3))) == pytest.approx(expected, rel=1e-14)
    leaf = z.clone().requires_grad_()
    losses.group_cross_entropy(leaf, y, (3, 1)).backward()
    assert leaf.grad is not None
    assert (leaf.grad[:, [0, 2, 4]] == 0).all()


@every_loss
@given(batch=batches())
@settings(max_examples=12)
def test_padded_rows_change_neither_value_nor_gradient(name: str, batch: Batch) -> None:
    padded = batch.padded()
    assert padded.value(name) == pytest.approx(batch.value(name), rel=1e-13, abs=1e-13)
    gradient = padded.gradient(name)
    torch.testing.assert_close(gradient[:-2], batch.gradient(name), rtol=1e-12, atol=1e-14)
    assert (gradient[-2:] == 0).all()


@every_loss
def test_a_batch_of_padding_only_is_zero_with_zero_gradient(name: str) -> None:
    nothing = Batch(GENERIC.logits, GENERIC.teacher, torch.full((4,), IGNORE), GENERIC.counts)
    assert nothing.value(name) == 0
    assert (nothing.gradient(name) == 0).all()


@every_loss
@given(batch=batches(size=1e4), scale=st.sampled_from([1.0, 1e-30]), dtype=st.sampled_from(["float64", "float32"]))
@settings(max_examples=12)
def test_value_and_gradient_are_finite(name: str, batch: Batch, scale: float, dtype: str) -> None:
    scaled = Batch(batch.logits * scale, batch.teacher * scale, batch.targets, batch.counts).to(getattr(torch, dtype))
    assert math.isfinite(scaled.value(name))
    assert scaled.gradient(name).isfinite().all()


@every_loss
@given(batch=batches())
@settings(max_examples=12)
def test_float32_is_close_to_float64(name: str, batch: Batch) -> None:
    single = batch.to(torch.float32)
    assert single.logits.dtype == single.gradient(name).dtype == torch.float32
    exact = single.to(torch.float64)  # the same logits, so that ties break the same way
    largest_factor = 500 * batch.logits.shape[1]  # FedGR's n/n_c multiplies logits and their rounding
    assert single.value(name) == pytest.approx(exact.value(name), rel=1e-5, abs=1e-6 * largest_factor)
    torch.testing.assert_close(single.gradient(name).double(), exact.gradient(name), rtol=1e-2, atol=1e-3)


@every_loss
@given(clients=st.lists(batches(classes=4, rows=3), min_size=2, max_size=3))
@settings(max_examples=8)
def test_vmap_over_clients_is_a_loop_over_clients(name: str, clients: list[Batch]) -> None:
    loss = LOSSES[name][0]
    clients = [clients[0].padded(), *(client.padded() for client in clients[1:])]
    stacked = [torch.stack(t) for t in zip(*((c.logits, c.teacher, c.targets, c.counts) for c in clients), strict=True)]
    lifted = torch.func.vmap(torch.func.grad_and_value(loss))
    gradients, values = lifted(*stacked)
    torch.testing.assert_close(values, torch.tensor([c.value(name) for c in clients], dtype=torch.float64))
    torch.testing.assert_close(gradients, torch.stack([c.gradient(name) for c in clients]))


@pytest.mark.parametrize("name", [*DIVERGENCES, "partial reverse"])
@given(batch=batches())
@settings(max_examples=20)
def test_a_divergence_is_not_negative(name: str, batch: Batch) -> None:
    assert batch.value(name) >= -1e-12


@pytest.mark.parametrize("name", ["all classes", "present", "target", "vacant", "not true", "partial"])
@given(batch=batches())
@settings(max_examples=12)
def test_a_student_that_agrees_with_its_teacher_has_no_loss(name: str, batch: Batch) -> None:
    same = Batch(batch.logits, batch.logits, batch.targets, batch.counts)
    if name == "partial" and batch.logits.shape[1] > 2:
        same_experts = torch.stack([batch.logits, batch.logits])
        value = losses.partial_distillation(batch.logits, batch.targets, same_experts, weak_groups(len(batch.counts)))
        assert float(value) == pytest.approx(0, abs=1e-15)
    else:
        assert same.value(name) == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize("name", SHIFT_INVARIANT)
@given(batch=batches(), shift=st.floats(-5, 5))
@settings(max_examples=12)
def test_a_constant_added_to_all_logits_of_a_sample_changes_nothing(name: str, batch: Batch, shift: float) -> None:
    grid = (batch.logits * 1024).round() / 1024  # exact sums: a shift must not create or break ties
    step = round(shift * 1024) / 1024
    before = Batch(grid, batch.teacher, batch.targets, batch.counts)
    after = Batch(grid + step, batch.teacher, batch.targets, batch.counts)
    assert after.value(name) == pytest.approx(before.value(name), rel=1e-11, abs=1e-11)
