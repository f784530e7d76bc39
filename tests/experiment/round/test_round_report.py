"""Whose numbers are finite after a round: whatever a client sends or keeps counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedskew.engine import ModelState, RoundResult
from fedskew.experiment.round.aggregate import read_report

MASK = torch.tensor([0.0, -torch.inf])
"""A buffer that is meant to hold what is not finite."""


def result() -> tuple[RoundResult, ModelState]:
    """Two clients that came back well."""
    sent = ModelState({"w": torch.zeros(3)}, {"mask": MASK, "mean": torch.zeros(1)})
    trained = ModelState({"w": torch.ones(2, 3)}, {"mask": MASK.repeat(2, 1), "mean": torch.ones(2, 1)})
    uplink, states = {"steps": torch.ones(2), "known": torch.ones(2, 4).bool()}, {"kept": torch.ones(2, 3)}
    tally = {"distilled": torch.tensor([2, 3])}
    return RoundResult(trained, uplink, states, torch.ones(2), tally, np.array([1, 1])), sent


def test_finite_numbers_and_constants_that_nobody_changed_are_well() -> None:
    report = read_report(*result())
    assert report.finite.tolist() == [True, True]
    assert report.loss.tolist() == [1, 1]
    assert report.tally == {"distilled": 5}


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["w", "mean", "steps", "kept", "loss"])
def test_one_number_that_is_not_finite_is_its_client_s_alone(where: str, value: float) -> None:
    told, sent = result()
    tensors = {**told.trained.params, **told.trained.buffers, **told.uplink, **told.states, "loss": told.loss}
    tensors[where][1] = value
    assert read_report(told, sent).finite.tolist() == [True, False]
