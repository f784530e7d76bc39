"""Federated learning when clients' labels are skewed.

import fedskew as fs

fed = fs.federation("fashion-mnist", fs.Dirichlet(beta=0.05, clients=100), seed=0)
result = fs.run(fed, method="fedvls", model="cnn", rounds=200, clients_per_round=10)
result.accuracy, result.class_accuracy, result.history, result.model
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers; a test compares these imports with _NAMES
    from fedskew import losses as losses
    from fedskew.choose import Choice as Choice
    from fedskew.choose import choose as choose
    from fedskew.data import IID as IID
    from fedskew.data import Balanced as Balanced
    from fedskew.data import Column as Column
    from fedskew.data import Counts as Counts
    from fedskew.data import Dataset as Dataset
    from fedskew.data import Dirichlet as Dirichlet
    from fedskew.data import DoubleImbalance as DoubleImbalance
    from fedskew.data import Federation as Federation
    from fedskew.data import LabelImbalance as LabelImbalance
    from fedskew.data import LabelsPerClient as LabelsPerClient
    from fedskew.data import OneClass as OneClass
    from fedskew.data import Partition as Partition
    from fedskew.data import Quantity as Quantity
    from fedskew.data import QuantityImbalance as QuantityImbalance
    from fedskew.data import Samples as Samples
    from fedskew.data import Saved as Saved
    from fedskew.data import Shards as Shards
    from fedskew.data import federation as federation
    from fedskew.data import load as load
    from fedskew.data import partitions as partitions
    from fedskew.errors import UserError as UserError
    from fedskew.experiment.callbacks import Callback as Callback
    from fedskew.experiment.callbacks import EarlyStopping as EarlyStopping
    from fedskew.experiment.config import Config as Config
    from fedskew.experiment.result import Result as Result
    from fedskew.experiment.run import run as run
    from fedskew.methods import Calibration as Calibration
    from fedskew.methods import Client as Client
    from fedskew.methods import MethodList as MethodList
    from fedskew.methods import Objective as Objective
    from fedskew.methods import Outputs as Outputs
    from fedskew.methods import Part as Part
    from fedskew.methods import Personal as Personal
    from fedskew.methods import Phase as Phase
    from fedskew.methods import Regulariser as Regulariser
    from fedskew.methods import Schedule as Schedule
    from fedskew.methods import Seen as Seen
    from fedskew.methods import ServerRule as ServerRule
    from fedskew.methods import Solver as Solver
    from fedskew.methods import Stage as Stage
    from fedskew.methods import Survey as Survey
    from fedskew.methods import Tensors as Tensors
    from fedskew.methods import Trained as Trained
    from fedskew.methods import Updates as Updates
    from fedskew.methods import Weighting as Weighting
    from fedskew.methods import make_method as make_method
    from fedskew.methods import method as method
    from fedskew.methods import methods as methods
    from fedskew.methods import pack as pack
    from fedskew.methods import unpack as unpack
    from fedskew.models import Classifier as Classifier
    from fedskew.models import ModelAdapter as ModelAdapter
    from fedskew.models import make_model as make_model
    from fedskew.report.writing import write_report as write_report
    from fedskew.results import Comparison as Comparison
    from fedskew.results import MethodRuns as MethodRuns
    from fedskew.results import RoundRow as RoundRow
    from fedskew.results import compare as compare
    from fedskew.results import load_run as load_run

__version__ = "0.2.0"

_NAMES = {
    "fedskew": "losses",
    "fedskew.choose": "Choice choose",
    "fedskew.data": (
        "IID Balanced Column Counts Dataset Dirichlet DoubleImbalance Federation LabelImbalance LabelsPerClient "
        "OneClass Partition Quantity QuantityImbalance Samples Saved Shards federation load partitions"
    ),
    "fedskew.errors": "UserError",
    "fedskew.experiment.callbacks": "Callback EarlyStopping",
    "fedskew.experiment.config": "Config",
    "fedskew.experiment.result": "Result",
    "fedskew.experiment.run": "run",
    "fedskew.methods": (
        "Calibration Client MethodList Objective Outputs Part Personal Phase Regulariser Schedule Seen ServerRule "
        "Solver Stage Survey Tensors Trained Updates Weighting make_method method methods pack unpack"
    ),
    "fedskew.models": "Classifier ModelAdapter make_model",
    "fedskew.report.writing": "write_report",
    "fedskew.results": "Comparison MethodRuns RoundRow compare load_run",
}
"""The public names by module. Each is imported when first used, so `fedskew --help` does not wait for torch.

`choose` and `methods` are packages that can be called. If they were functions, importing the package of the same name
would hide them."""

_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULES)

if not TYPE_CHECKING:  # hidden from type checkers, so that they report misspelt names

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module 'fedskew' has no attribute {name!r}")
        module, submodule = _MODULES[name], f"fedskew.{name}"
        is_module = module in ("fedskew", submodule)  # `losses`, `choose` and `methods`
        value = import_module(submodule) if is_module else getattr(import_module(module), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
