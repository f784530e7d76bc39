"""PKD's experts: which samples they teach, and how."""

from __future__ import annotations

import math

import pytest
import torch
from loss_formulas import kl
from torch import Tensor

from fedskew import losses
from fedskew.losses import IGNORE

FASHION = ((0, 6), (2, 4, 6))


def fashion_logits(*predictions: int) -> Tensor:
    return 3 * torch.nn.functional.one_hot(torch.tensor(predictions), 10).double()


def test_an_expert_is_active_where_target_and_wrong_prediction_are_in_its_group() -> None:
    logits = fashion_logits(6, 0, 4, 2, 0, 6, 7)
    targets = torch.tensor([0, 6, 6, 0, 0, 9, 2])
    # Shirt for T-shirt, T-shirt for Shirt: first; Coat for Shirt: second; across groups, right, half outside: none
    expected = [[True, True, False, False, False, False, False], [False, False, True, False, False, False, False]]
    assert losses.active_experts(logits, targets, FASHION).tolist() == expected


def test_where_two_groups_qualify_the_first_teaches() -> None:
    active = losses.active_experts(fashion_logits(1), torch.tensor([0]), ((0, 1), (0, 1, 2)))
    assert active.tolist() == [[True], [False]]
    swapped = losses.active_experts(fashion_logits(1), torch.tensor([0]), ((0, 1, 2), (0, 1)))
    assert swapped.tolist() == [[True], [False]]


def test_without_an_active_sample_partial_distillation_is_zero_with_zero_gradient() -> None:
    logits = fashion_logits(0, 1, 2).requires_grad_()
    value = losses.partial_distillation(logits, torch.tensor([0, 6, 9]), torch.randn(2, 3, 10).double(), FASHION)
    value.backward()
    assert value.item() == 0
    assert logits.grad is not None
    assert (logits.grad == 0).all()


def test_partial_distillation_is_a_mean_over_the_whole_batch_without_temperature_squared() -> None:
    logits = fashion_logits(6, 1, 1, 1)
    experts = torch.zeros(2, 4, 10).double()
    value = losses.partial_distillation(logits, torch.tensor([0, 1, 1, 1]), experts, FASHION, 3.0)
    student = {0: 1 / (1 + math.e), 6: math.e / (1 + math.e)}
    assert float(value) == pytest.approx(kl({0: 0.5, 6: 0.5}, student) / 4, rel=1e-14)


def test_partial_distillation_moves_logits_of_the_group_only() -> None:
    logits = fashion_logits(4).requires_grad_()
    losses.partial_distillation(logits, torch.tensor([6]), torch.zeros(2, 1, 10).double(), FASHION).backward()
    assert logits.grad is not None
    assert logits.grad[0].nonzero().flatten().tolist() == [2, 4, 6]


def test_padded_rows_activate_no_expert() -> None:
    assert not losses.active_experts(fashion_logits(6), torch.tensor([IGNORE]), FASHION).any()


def test_an_expert_may_teach_every_sample_of_its_classes() -> None:
    targets = torch.tensor([0, 6, 2, 9, IGNORE])
    active = losses.active_experts(fashion_logits(0, 6, 7, 0, 0), targets, FASHION, "all")
    # right, wrong or beside the group; Shirt, in both groups, is the first's
    assert active.tolist() == [[True, True, False, False, False], [False, False, True, False, False]]
