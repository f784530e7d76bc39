"""How many threads a run computes with on a CPU."""

from __future__ import annotations

import os

import torch

from fedskew.experiment.config import Config


def use_threads(config: Config) -> None:
    """One for the stacked engine on a CPU, torch's own number otherwise; OMP_NUM_THREADS overrides both.

    Stacked small networks gain nothing from a second thread (2.0 s against 1.9 s for 15 rounds of the demo) and
    lose much where the other cores are busy. The number is fixed, not measured: it decides the order of sums, and
    a resumed run must repeat them bit for bit.
    """
    if config.engine == "stacked" and config.device == "cpu" and not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(1)
