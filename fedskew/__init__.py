"""Federated learning when clients' labels are skewed.

import fedskew as fs

fed = fs.federation("fashion-mnist", fs.Dirichlet(beta=0.05, clients=100), seed=0)
result = fs.run(fed, method="fedvls", model="cnn", rounds=200, clients_per_round=10)
result.accuracy, result.class_accuracy, result.history, result.model
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedskew import losses
    from fedskew.data import (
        IID,
        Balanced,
        Counts,
        Dataset,
        Dirichlet,
        DoubleImbalance,
        Federation,
        LabelImbalance,
        LabelsPerClient,
        OneClass,
        Partition,
        Quantity,
        QuantityImbalance,
        Samples,
        Saved,
        Shards,
        federation,
        load,
    )
    from fedskew.errors import UserError
    from fedskew.experiment.callbacks import Callback
    from fedskew.experiment.result import Result
    from fedskew.experiment.run import run
    from fedskew.methods import (
        Client,
        Objective,
        Outputs,
        Regulariser,
        Seen,
        ServerRule,
        Solver,
        Tensors,
        Trained,
        Updates,
        make_method,
        method,
    )
    from fedskew.models import Classifier, make_model
    from fedskew.report.writing import write_report

__version__ = "0.1.0"

_HOMES = {
    "fedskew": ("losses",),
    "fedskew.data": (
        "IID",
        "Balanced",
        "Counts",
        "Dataset",
        "Dirichlet",
        "DoubleImbalance",
        "Federation",
        "LabelImbalance",
        "LabelsPerClient",
        "OneClass",
        "Partition",
        "Quantity",
        "QuantityImbalance",
        "Samples",
        "Saved",
        "Shards",
        "federation",
        "load",
    ),
    "fedskew.errors": ("UserError",),
    "fedskew.experiment.callbacks": ("Callback",),
    "fedskew.experiment.result": ("Result",),
    "fedskew.experiment.run": ("run",),
    "fedskew.methods": (
        "Client",
        "Objective",
        "Outputs",
        "Regulariser",
        "Seen",
        "ServerRule",
        "Solver",
        "Tensors",
        "Trained",
        "Updates",
        "make_method",
        "method",
    ),
    "fedskew.models": ("Classifier", "make_model"),
    "fedskew.report.writing": ("write_report",),
}
"""Where each public name lives: it is imported when first used, so that `fedskew --help` need not wait for torch."""


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = import_module("fedskew.losses") if name == "losses" else getattr(import_module(home), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'fedskew' has no attribute {name!r}")


__all__ = [
    "IID",
    "Balanced",
    "Callback",
    "Classifier",
    "Client",
    "Counts",
    "Dataset",
    "Dirichlet",
    "DoubleImbalance",
    "Federation",
    "LabelImbalance",
    "LabelsPerClient",
    "Objective",
    "OneClass",
    "Outputs",
    "Partition",
    "Quantity",
    "QuantityImbalance",
    "Regulariser",
    "Result",
    "Samples",
    "Saved",
    "Seen",
    "ServerRule",
    "Shards",
    "Solver",
    "Tensors",
    "Trained",
    "Updates",
    "UserError",
    "federation",
    "load",
    "losses",
    "make_method",
    "make_model",
    "method",
    "run",
    "write_report",
]
