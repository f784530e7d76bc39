"""Validation data: held out of every client's classes, and never the test set."""

from __future__ import annotations

import numpy as np
import pytest

import fedskew as fs
from fedskew.choose.validation import MAX_SAMPLES, hold_out, validation_fraction
from fedskew.errors import UserError


@pytest.fixture(scope="module")
def federation() -> fs.Federation:
    return fs.federation("digits", fs.Dirichlet(beta=0.1, clients=10), seed=3)


def test_no_client_loses_a_class_and_about_a_fifth_is_held_out(federation: fs.Federation) -> None:
    held = hold_out(federation, 0.2, seed=3)
    assert ((held.label_counts > 0) == (federation.label_counts > 0)).all()
    assert len(held.dataset.test) + held.sizes.sum() == federation.sizes.sum()
    assert 0.17 < len(held.dataset.test) / federation.sizes.sum() < 0.22


def test_held_out_samples_come_from_the_training_data_and_are_trained_by_nobody(federation: fs.Federation) -> None:
    held = hold_out(federation, 0.2, seed=3)
    trained = {federation.dataset.train.x[i].tobytes() for part in held.indices for i in part}
    tested = {x.tobytes() for x in held.dataset.test.x}
    training = {x.tobytes() for x in federation.dataset.train.x}
    assert tested <= training
    repeated = len(federation.dataset.train) - len(training)
    assert len(tested & trained) <= repeated
    assert len(tested & {x.tobytes() for x in federation.dataset.test.x}) <= repeated


def test_another_seed_holds_out_other_samples(federation: fs.Federation) -> None:
    one, same, other = (hold_out(federation, 0.2, seed).dataset.test.x for seed in (0, 0, 1))
    assert np.array_equal(one, same)
    assert one.shape != other.shape or not np.array_equal(one, other)


def test_a_federation_of_single_samples_is_refused() -> None:
    whole = fs.federation("digits", fs.IID(clients=10), seed=0)
    single = fs.Federation(whole.dataset, tuple(part[:1] for part in whole.indices), whole.partition, 0)
    with pytest.raises(UserError, match=r"no sample was held out .* at least 5 samples of a class"):
        hold_out(single, 0.2, 0)


def test_large_data_hold_out_a_smaller_share() -> None:
    assert validation_fraction(1000) == 0.2
    assert validation_fraction(100 * MAX_SAMPLES) == pytest.approx(0.01)
