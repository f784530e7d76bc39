"""What makes two runs the same experiment, wherever and however far they ran.

A run's folder belongs to one machine and one engine, bit for bit; a result does not. Here the device, the engine and
the number format do not count, nor does the number of rounds: a longer run contains the shorter one, because no random
choice depends on how many rounds there are. (Methods with stages plan by it; for them it counts.)
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from fedskew.experiment.config import Config
from fedskew.experiment.preparation import partition_rule
from fedskew.methods import Schedule, make_method

CIRCUMSTANCES = (
    "data_dir",
    "rounds",
    "engine",
    "device",
    "precision",
    "compile",
    "eval_every",
    "eval_local",
    "mean_last",
    "checkpoint_every",
)
"""Keys that say where, how far and how closely watched a run was, not what it was."""


def experiment(config: Config) -> dict[str, Any]:
    """The keys that decide a run's numbers, defaults of method and partition rule filled in."""
    mapping = {key: value for key, value in config.to_mapping().items() if key not in CIRCUMSTANCES}
    method = make_method(config.method, config.method_params)
    if plans_by_rounds(config):
        mapping["rounds"] = config.rounds
    return mapping | {"method": {"name": method.name, **method.params}, "partition": _partition(config)}


def plans_by_rounds(config: Config) -> bool:
    """Whether the method has stages, whose lengths may depend on the number of rounds."""
    return isinstance(make_method(config.method, config.method_params).objective, Schedule)


def identity(config: Config) -> str:
    """Twelve hex digits, the same for configurations that are the same experiment."""
    text = json.dumps(_canonical(experiment(config)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _partition(config: Config) -> dict[str, Any]:
    described = partition_rule(config).describe()
    if "path" in described:  # the same file lies elsewhere on another machine
        described["path"] = Path(str(described["path"])).name
    return {**described, "seed": config.partition_seed}


def _canonical(value: Any) -> Any:
    """1 and 1.0 are one value, a tuple is a list."""
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
