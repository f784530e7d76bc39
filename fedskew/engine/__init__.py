"""Execution of a round's local training."""

from fedskew.engine.auto import ENGINES, AutoEngine
from fedskew.engine.choice import (
    arithmetic,
    choose_device,
    choose_devices,
    choose_engine,
    make_engine,
    number_format,
    worth_compiling,
)
from fedskew.engine.contract import Assignment, Engine, LocalTraining, RoundResult, RoundWork
from fedskew.engine.cost import estimated_seconds
from fedskew.engine.data.batches import RoundKey
from fedskew.engine.data.device_samples import DeviceSamples
from fedskew.engine.data.transfer import Fetch, on_host, to_device
from fedskew.engine.model.evaluation import Evaluator, survey
from fedskew.engine.model.network import ModelState, Network
from fedskew.engine.parallel.devices import DevicesEngine
from fedskew.engine.parallel.pool import PoolEngine
from fedskew.engine.plain import PlainEngine
from fedskew.engine.stacked.engine import StackedEngine

__all__ = [
    "ENGINES",
    "Assignment",
    "AutoEngine",
    "DeviceSamples",
    "DevicesEngine",
    "Engine",
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
    "estimated_seconds",
    "make_engine",
    "number_format",
    "on_host",
    "survey",
    "to_device",
    "worth_compiling",
]
