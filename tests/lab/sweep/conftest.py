"""Tiny jobs on scikit-learn's digits."""

from __future__ import annotations

from typing import Any

import pytest

from fedskew.experiment.config import Config, with_values
from fedskew.lab.sweep.job import Job

TINY = {"rounds": 3, "local_epochs": 1, "partition.clients": 4, "partition.beta": 0.5, "device": "cpu"}


@pytest.fixture
def tiny_job() -> Any:
    """A job that takes a moment; keyword arguments are values under dotted keys, with _ for the dot."""

    def make(label: str = "tiny", **values: Any) -> Job:
        dotted = {key.replace("__", "."): value for key, value in values.items()}
        return Job(with_values(Config(), {**TINY, **dotted}), label)

    return make
