"""FedLC's, FedRS's and FedGR's cross entropies at their edges."""

from __future__ import annotations

import math

import pytest
import torch
from loss_batches import GENERIC, batch

from fedskew import losses


def test_a_margin_of_zero_is_cross_entropy_with_vacant_classes_in() -> None:
    value = losses.margin_cross_entropy(GENERIC.logits, GENERIC.targets, GENERIC.counts, 0.0)
    assert float(value) == GENERIC.value("cross_entropy")


def test_a_margin_takes_vacant_classes_out() -> None:
    assert (GENERIC.gradient("margin")[:, 3:] == 0).all()


@pytest.mark.parametrize("soft", [False, True])
def test_restricted_softmax_with_alpha_one_is_cross_entropy(soft: bool) -> None:
    value = losses.restricted_softmax_cross_entropy(GENERIC.logits, GENERIC.targets, GENERIC.counts, 1.0, soft)
    assert float(value) == GENERIC.value("cross_entropy")


def test_unbalanced_softmax_of_a_balanced_client_scales_logits_by_its_number_of_labels() -> None:
    client = batch([[0.5, 1.5, 9.0]], [0], [7, 7, 0])
    assert client.value("unbalanced") == pytest.approx(math.log(1 + math.exp(2 * 1.0)), rel=1e-14)
    assert client.value("unbalanced normalised") == pytest.approx(math.log(1 + math.exp(1.0)), rel=1e-14)


def test_unbalanced_softmax_with_papers_gamma_can_keep_vacant_classes() -> None:
    z, y, n = torch.tensor([[0.5, 1.5, 2.0]]).double(), torch.tensor([0]), torch.tensor([2, 6, 0])
    kept = losses.unbalanced_cross_entropy(z, y, n, gamma="paper", vacant="code")
    scaled = [8 / 2 * 0.5, 8 / 6 * 1.5, 8 / 24 * 2.0]
    assert float(kept) == pytest.approx(math.log(sum(map(math.exp, scaled))) - scaled[0], rel=1e-14)


def test_a_single_class_client_has_nothing_to_learn_from_its_own_labels() -> None:
    single = batch([[0.5, 2.0, -1.0]], [1], [0, 9, 0])
    for name in ("unbalanced", "unbalanced normalised", "margin"):
        assert single.value(name) == 0
        assert (single.gradient(name) == 0).all()
