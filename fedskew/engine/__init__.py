"""Execution of a round's local training."""

from fedskew.engine.batches import RoundKey
from fedskew.engine.choice import arithmetic, choose_device, choose_engine, make_engine, number_format, worth_compiling
from fedskew.engine.device_data import DeviceSamples
from fedskew.engine.evaluation import confusion, survey
from fedskew.engine.network import ModelState, Network
from fedskew.engine.plain import PlainEngine
from fedskew.engine.stacked import StackedEngine
from fedskew.engine.work import Assignment, Engine, LocalTraining, RoundResult, RoundWork

__all__ = [
    "Assignment",
    "DeviceSamples",
    "Engine",
    "LocalTraining",
    "ModelState",
    "Network",
    "PlainEngine",
    "RoundKey",
    "RoundResult",
    "RoundWork",
    "StackedEngine",
    "arithmetic",
    "choose_device",
    "choose_engine",
    "confusion",
    "make_engine",
    "number_format",
    "survey",
    "worth_compiling",
]
