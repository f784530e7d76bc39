"""Engines train a round's clients, starting from a given model."""

from fedskew.engine.choice import (
    ENGINES,
    arithmetic,
    choose_device,
    choose_devices,
    choose_engine,
    choose_precision,
    cpu_engine,
    estimated_seconds,
    make_engine,
    number_format,
    single_process_engine,
    worth_compiling,
)
from fedskew.engine.contract import Assignment, Engine, LocalTraining, RoundResult, RoundWork, train_clients
from fedskew.engine.data.batches import RoundKey
from fedskew.engine.data.device import DeviceSamples, Fetch, on_host, to_device
from fedskew.engine.evaluation import EvaluationSums, Evaluator, features, survey
from fedskew.engine.model.network import ModelState, Network, set_tensors
from fedskew.engine.parallel.devices import DevicesEngine
from fedskew.engine.parallel.pool import PoolEngine
from fedskew.engine.plain import PlainEngine
from fedskew.engine.stacked.engine import StackedEngine

__all__ = [
    "ENGINES",
    "Assignment",
    "DeviceSamples",
    "DevicesEngine",
    "Engine",
    "EvaluationSums",
    "Evaluator",
    "Fetch",
    "LocalTraining",
    "ModelState",
    "Network",
    "PlainEngine",
    "PoolEngine",
    "RoundKey",
    "RoundResult",
    "RoundWork",
    "StackedEngine",
    "arithmetic",
    "choose_device",
    "choose_devices",
    "choose_engine",
    "choose_precision",
    "cpu_engine",
    "estimated_seconds",
    "features",
    "make_engine",
    "number_format",
    "on_host",
    "set_tensors",
    "single_process_engine",
    "survey",
    "to_device",
    "train_clients",
    "worth_compiling",
]
