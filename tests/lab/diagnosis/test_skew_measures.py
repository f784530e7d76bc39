"""Measures of skew against definitions, limits and splits whose parameters are known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import rel_entr

from fedskew.data import make_partition
from fedskew.lab.diagnosis.skew import BETAS, Skew, distance

EVEN = Skew(np.full((4, 5), 20))
ONE_CLASS_EACH = Skew(np.diag([30, 30, 30]))


def drawn(rule: str, classes: int = 10, samples: int = 20_000, **params: object) -> Skew:
    y = np.repeat(np.arange(classes), samples // classes)
    parts = make_partition(rule, **params).split(y, classes, 3)
    return Skew(np.array([np.bincount(y[part], minlength=classes) for part in parts]))


def test_an_even_federation_has_no_skew() -> None:
    assert EVEN.coordinates() == pytest.approx([0, 1, 0, 0, 0])
    assert EVEN.divergence == pytest.approx(np.zeros(4))
    assert EVEN.beta == pytest.approx(BETAS[1], rel=0.1)


def test_one_class_each_is_as_far_as_it_goes() -> None:
    assert ONE_CLASS_EACH.vacant.mean() == pytest.approx(2 / 3)
    assert ONE_CLASS_EACH.divergence == pytest.approx(np.full(3, np.log(3)))
    assert ONE_CLASS_EACH.hellinger == pytest.approx(np.full(3, np.sqrt(1 - np.sqrt(1 / 3))))
    assert ONE_CLASS_EACH.beta == pytest.approx(BETAS[0], rel=0.1)


def test_divergence_is_that_of_scipy() -> None:
    skew = Skew(np.random.default_rng(0).integers(0, 50, (6, 8)) + np.eye(6, 8, dtype=int))
    reference = [rel_entr(p, skew.overall).sum() for p in skew.shares]
    assert skew.divergence == pytest.approx(reference)


@pytest.mark.parametrize("beta", [0.02, 0.1, 0.5, 2.0, 20.0])
def test_the_effective_beta_finds_the_beta_of_plain_dirichlet_draws(beta: float) -> None:
    rng = np.random.default_rng(1)
    counts = np.stack([rng.multinomial(5000, rng.dirichlet(np.full(30, beta))) for _ in range(60)], axis=1)
    found = Skew(counts[counts.sum(axis=1) > 0]).beta
    assert found == pytest.approx(beta, rel=0.15)


@pytest.mark.parametrize("beta", [0.05, 0.1, 0.5])
def test_of_the_capped_split_it_finds_the_order_of_magnitude(beta: float) -> None:
    found = drawn("dirichlet", clients=10, beta=beta).beta
    assert found is not None
    assert beta / 3 < found < 1.5 * beta


def test_more_skew_is_further_away() -> None:
    places = [drawn("dirichlet", clients=10, beta=b) for b in (5.0, 0.5, 0.05)]
    assert places[0].hellinger.mean() < places[1].hellinger.mean() < places[2].hellinger.mean()
    assert distance(EVEN.coordinates(), places[0].coordinates()) < distance(EVEN.coordinates(), places[2].coordinates())


def test_sizes_and_classes_are_measured_apart() -> None:
    sizes = Skew(np.array([[10, 10], [90, 90]]))
    classes = Skew(np.array([[10, 90], [10, 90]]))
    assert (sizes.size_ratio, sizes.class_ratio) == (9, 1)
    assert (classes.size_ratio, classes.class_ratio) == (1, pytest.approx(9))
    assert sizes.hellinger == pytest.approx([0, 0], abs=1e-7)
    assert classes.hellinger == pytest.approx([0, 0], abs=1e-7)
    assert classes.global_imbalance > 0.3


def test_a_class_that_nobody_has_is_not_vacant_but_infinitely_rare() -> None:
    skew = Skew(np.array([[5, 5, 0], [5, 5, 0]]))
    assert skew.vacant.tolist() == [0, 0]
    assert skew.class_ratio == float("inf")


def test_one_client_has_no_beta() -> None:
    assert Skew(np.array([[3, 4]])).beta is None
