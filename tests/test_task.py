"""The two tasks: exact losses, counts and groups on small labels, and what padding does to them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, multilabel_confusion_matrix
from torch import Tensor

from fedskew.engine.data.batches import half_targets, padded_targets
from fedskew.losses import binary_cross_entropy, cross_entropy, real_rows
from fedskew.task import IGNORE, TASKS, task_for

SINGLE, MULTI = TASKS["single-label"], TASKS["multi-label"]
Y = np.array([[1, 0, 1], [0, 0, 0], [1, 1, 0], [1, 0, 0]])


def logits(rows: int = 4) -> Tensor:
    return torch.randn(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_the_shape_of_the_labels_decides() -> None:
    assert task_for(np.array([0, 2])) is SINGLE
    assert task_for(torch.tensor(Y)) is MULTI


def test_the_losses_are_pytorchs() -> None:
    z, y = logits(), torch.tensor([2, 0, 1, 1])
    torch.testing.assert_close(cross_entropy(z, y), torch.nn.functional.cross_entropy(z, y))
    expected = torch.nn.functional.binary_cross_entropy_with_logits(z, torch.tensor(Y).double())
    torch.testing.assert_close(binary_cross_entropy(z, torch.tensor(Y)), expected)


@pytest.mark.parametrize("y", [torch.tensor([2, 0, 1, 1]), torch.tensor(Y)])
def test_padding_changes_no_loss_and_no_gradient(y: Tensor) -> None:
    z = logits(6).requires_grad_()
    valid = torch.arange(6) < 4
    padded = padded_targets(torch.cat([y, y[:2]]), valid)
    assert real_rows(padded).tolist() == valid.tolist()
    loss = task_for(y).loss(z, padded)
    torch.testing.assert_close(loss, task_for(y).loss(z[:4], y))
    loss.backward()
    assert z.grad is not None
    assert (z.grad[4:] == 0).all()
    assert task_for(y).loss(z, torch.full_like(padded, IGNORE)).item() == 0


def test_the_losses_are_the_same_under_vmap() -> None:
    z, y = torch.stack([logits(), 2 * logits()]), torch.tensor(np.stack([Y, 1 - Y]))
    stacked = torch.func.vmap(MULTI.loss)(z, y)
    torch.testing.assert_close(stacked, torch.stack([MULTI.loss(z[k], y[k]) for k in range(2)]))
    assert real_rows(y, axes=2).shape == (2, 4)


@pytest.mark.parametrize("half", ["first", "second"])
def test_half_a_batch_of_one_or_of_all_clients(half: str) -> None:
    y = torch.tensor(Y)
    own = half_targets(y, half)  # type: ignore[arg-type]
    kept = torch.arange(4) % 2 == (half == "second")
    assert real_rows(own).tolist() == kept.tolist()
    assert torch.equal(own[kept], y[kept])
    all_clients = half_targets(torch.stack([y, 1 - y]), half, axis=1)  # type: ignore[arg-type]
    assert torch.equal(all_clients[0], own)
    one = half_targets(y[:1], half)  # type: ignore[arg-type]
    assert torch.equal(one, y[:1])  # a half without samples is replaced by the whole batch


def test_counts_are_scikit_learns() -> None:
    z, y = logits(), np.array([2, 0, 1, 1])
    counts = torch.zeros(9, dtype=torch.int64)
    SINGLE.count(counts, z, torch.tensor(y))
    assert counts.view(SINGLE.counts_shape(3)).tolist() == confusion_matrix(y, z.argmax(1), labels=range(3)).tolist()
    counts = torch.zeros(12, dtype=torch.int64)
    MULTI.count(counts, z, torch.tensor(Y))
    expected = multilabel_confusion_matrix(Y, (z.sigmoid() > 0.5).numpy())
    assert counts.view(MULTI.counts_shape(3)).tolist() == expected.tolist()


def test_label_counts_by_client() -> None:
    owners = np.array([0, 0, 2, 2])
    assert MULTI.label_counts(Y, owners, 3, 3).tolist() == [[1, 0, 1], [0, 0, 0], [2, 1, 0]]
    assert SINGLE.label_counts(np.array([0, 0, 1, 2]), owners, 3, 3).tolist() == [[2, 0, 0], [0, 0, 0], [0, 1, 1]]


def test_a_sample_is_split_by_its_rarest_label() -> None:
    groups, names = MULTI.groups(Y, ("cough", "fever", "rash"))
    assert names == ("cough", "fever", "rash", "none")
    assert groups.tolist() == [2, 3, 1, 0]
    assert MULTI.groups(Y[[0, 2]], ("cough", "fever", "rash"))[1] == ("cough", "fever", "rash")
    assert SINGLE.groups(np.array([1, 0]), ("a", "b"))[1] == ("a", "b")


def test_labels_are_renumbered() -> None:
    numbers = np.array([2, 0, 1])
    assert MULTI.renumber(Y, numbers, 3).tolist() == Y[:, [1, 2, 0]].tolist()
    assert SINGLE.renumber(np.array([0, 1]), numbers, 3).tolist() == [2, 0]
    assert MULTI.example_labels(2).tolist() == [[1, 0], [0, 1]]
    assert SINGLE.example_labels(2).tolist() == [0, 1]


def test_probabilities() -> None:
    torch.testing.assert_close(SINGLE.probabilities(logits()).sum(dim=1), torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(MULTI.probabilities(logits()), logits().sigmoid())
