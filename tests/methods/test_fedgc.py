"""FedGC: cross entropy over own labels on the client; rows that repel on the server, averaged over their owners."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from linear_clients import Array, Site, descend, federation, played, serve, settings, sites, theta

from fedskew.losses import cross_entropy, gravitation, own_label_cross_entropy

DISJOINT = np.array([[5, 2, 0, 0], [0, 0, 4, 0], [0, 0, 0, 3]])


def slope(at: Array, site: Site) -> Array:
    """The gradient of the cross entropy over the site's labels."""
    z = np.where(site.counts > 0, site.x @ at.T, -np.inf)
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    return (p - site.one_hot).T @ site.x / len(site.y)


def repelled(rows: Array, present: np.ndarray, step: float) -> Array:
    """One step on −Σ log R, whose gradient is e^{u_j·v}/D·v for every row j of another label on another client."""
    grads = np.zeros_like(rows)
    for k, i in zip(*np.nonzero(present), strict=True):
        v = rows[k, i]
        others = [(z, j) for z, j in zip(*np.nonzero(present), strict=True) if z != k and j != i]
        weights = {pair: np.exp(rows[pair] @ v - v @ v) for pair in others}
        for pair, weight in weights.items():
            grads[pair] += weight / (1 + sum(weights.values())) * v
    return rows - step * grads


@pytest.mark.parametrize("counts", [np.array([[5, 2, 0, 0], [0, 1, 4, 0], [3, 0, 0, 0]]), DISJOINT])
def test_two_rounds_against_the_formulas(counts: np.ndarray) -> None:
    fed, gravity = federation(counts), 0.7
    states, _ = played(serve("fedgc", {"gravity": gravity}, federation=fed, rounds=3))
    at, expected = sites(fed), theta(states[0])
    present = fed.label_counts > 0
    sizes = fed.sizes / fed.sizes.sum()
    for t in range(3):
        lr = settings().lr * settings().lr_decay ** t
        trained = np.stack([descend(expected, lambda v, s=s: slope(v, s), settings(), t) for s in at])
        rows = repelled(trained, present, gravity * lr)
        weights = sizes[:, None] * present
        mean = (weights[:, :, None] * rows).sum(axis=0) / np.maximum(weights.sum(axis=0), 1e-300)[:, None]
        expected = np.where(present.any(axis=0)[:, None], mean, expected)
        np.testing.assert_allclose(theta(states[t + 1]), expected, rtol=0, atol=1e-12)


def test_without_shared_labels_a_row_is_that_of_its_owner() -> None:
    fed = federation(DISJOINT)
    states, _ = played(serve("fedgc", {"gravity": 0.0}, federation=fed, rounds=1))
    trained = [descend(theta(states[0]), lambda v, s=s: slope(v, s), settings(), 0) for s in sites(fed)]
    owners = [0, 0, 1, 2]
    own_rows = np.stack([trained[owner][label] for label, owner in enumerate(owners)])
    np.testing.assert_allclose(theta(states[1]), own_rows, rtol=0, atol=1e-12)


def test_a_row_whose_label_nobody_has_stays_unchanged() -> None:
    fed = federation(np.array([[5, 2, 0, 0], [3, 1, 0, 0]]))
    states, _ = played(serve("fedgc", federation=fed, rounds=2))
    assert np.array_equal(theta(states[-1])[2:], theta(states[0])[2:])
    assert not np.array_equal(theta(states[-1])[:2], theta(states[0])[:2])


def test_with_all_labels_everywhere_and_no_gravity_it_is_fedavg() -> None:
    fed = federation(np.array([[2, 3, 1, 2], [1, 1, 4, 1]]))
    states, _ = played(serve("fedgc", {"gravity": 0.0}, federation=fed))
    same, _ = played(serve("fedavg", federation=fed))
    np.testing.assert_allclose(theta(states[-1]), theta(same[-1]), rtol=0, atol=1e-12)


def test_own_label_cross_entropy() -> None:
    logits, y = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 2, 2, 0, 2])
    counts = torch.tensor([2, 0, 3, 0])
    expected = cross_entropy(logits[:, [0, 2]], torch.tensor([0, 1, 1, 0, 1]))
    torch.testing.assert_close(own_label_cross_entropy(logits, y, counts), expected)
    leaf = logits.clone().requires_grad_()
    own_label_cross_entropy(leaf, torch.zeros(5, dtype=torch.int64), torch.tensor([5, 0, 0, 0])).backward()
    assert leaf.grad is not None
    assert (leaf.grad == 0).all()


def test_without_attraction_rows_of_one_label_do_not_approach() -> None:
    rows = torch.randn(2, 1, 3, dtype=torch.float64)
    present = torch.ones(2, 1, dtype=torch.bool)
    assert float(gravitation(rows, present, attraction=False)) == 0.0
    rows = torch.randn(3, 4, 2, dtype=torch.float64)
    present = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1]]).bool()
    both, repulsion = gravitation(rows, present), gravitation(rows, present, attraction=False)
    assert both > repulsion > 0
