"""Methods and their hyper-parameters for tests that run over the whole catalogue.

`make test` runs one method for each kind of hook (`KINDS`), `make test-all` runs all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from fedskew.methods import METHODS

TOLERANCE = {"float64": 1e-9, "float32": 5e-4}
"""How far two engines' final weights may be apart. On some processors, rounding in float32 grows to 2e-4 in FedSMOO."""

PARAMS: dict[str, dict[str, Any]] = {
    "pkd": {"groups": [[0, 1], [1, 2, 3]], "expert_rounds": 2},
    "pfedme": {"personal_lr": 0.02},
    "creff": {"features_per_class": 5, "match_steps": 5, "head_epochs": 5},
}
"""PKD and CReFF take long with their defaults. pFedMe's default, five steps of 0.05 on one small batch through
BatchNorm, makes a start that is off by 1e-7 a model that is off by 6e-3, in float64 and by either engine: rounding that
no two programs share. As many steps of the run's own size make it 1e-6."""

JOINED = ("fedlmd+scaffold", "fedvls+fedprox+fedavgm", "fpl+fedvls", "moon+fedcurv")

KEEP_MOVES = ("scaffold", "fedcm", "fedadagrad", "fedyogi", "fedadam", "fedsmoo")
"""Methods whose state is a move, or a move over lr: the smaller lr, the larger is rounding beside it."""

KINDS = {
    "nothing besides FedAvg": "fedavg",
    "an objective": "fedrs",
    "an objective with an uplink and a downlink": "logit-adjustment",
    "a teacher": "fedvls",
    "a model that the client kept": "moon",
    "an opening pass, and perturbed features": "balancefl",
    "a regulariser": "feddecorr",
    "prototypes: a closing pass, an uplink and a downlink": "fpl",
    "a solver": "fedprox",
    "a solver with client and server state": "scaffold",
    "a solver that needs gradients of a closing pass": "fedcurv",
    "server state": "fedavgm",
    "an uplink for the server rule": "fedgr",
    "a weighting": "feddisco",
    "tensors that stay with their clients, and phases": "fedrep",
    "a second model at every client": "ditto",
    "fine-tuning before the test": "fedbabu",
    "server state that clients receive": "mofedsam",
    "stages, a survey and experts": "pkd",
    "stages that concatenate encoders": "fedconcat",
    "one round without training, and an opening pass for the server rule": "afl",
    "a head of its own": "fedetf",
    "a head that has other logits in training": "fedrod",
    "a head that the server computes from a closing pass": "fednh",
    "pooled data": "centralised",
    "models that stay with their clients": "local-only",
}
"""One method for each kind of hook; a test checks that together they use every hook that any method uses."""


def slow(*values: Any) -> list[Any]:
    """Parameters for `pytest.mark.parametrize` that `make test` leaves out; a tuple has one for each argument."""
    return [
        pytest.param(*value, marks=pytest.mark.slow)
        if isinstance(value, tuple)
        else pytest.param(value, marks=pytest.mark.slow)
        for value in values
    ]


def only(fast: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """All values as parameters for `pytest.mark.parametrize`; those that are not in `fast` are marked as slow."""
    listed, values = list(fast), list(values)
    assert all(value in values for value in listed), "a value that is not there would be left out unnoticed"
    return [*listed, *slow(*(value for value in values if value not in listed))]


def by_kind(methods: Iterable[str] = (*METHODS, *JOINED)) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: one method of each kind, and the others marked as slow."""
    fast = {*KINDS.values(), JOINED[0]}
    return [pytest.param(name) if name in fast else slow(name)[0] for name in methods]
