"""Read a grid from YAML: a configuration with several values for some keys.

    data: fashion-mnist
    partition: {rule: dirichlet, clients: 20}
    rounds: 50
    grid:
      method: [fedavg, fedlmd, {name: fedvls, distill_weight: 0.5}]
      partition.beta: [0.05, 0.1, 0.5]
      clients_per_round: [2, 8, 20]
    seeds: 3

Every combination is a run. Runs are ordered by seed, then by the first key, and so on, so that a stopped sweep has
complete grids for the first seeds.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedskew.errors import UserError
from fedskew.experiment.config import Config, with_values
from fedskew.experiment.config.values import integer, read_yaml
from fedskew.experiment.preparation import partition_rule
from fedskew.lab.sweep.job import NON_IDENTIFYING_KEYS, Job
from fedskew.methods import make_method


@dataclass(frozen=True)
class Point:
    """One run of a grid."""

    config: Config
    grid_values: Mapping[str, Any]
    """The run's values of the grid's keys, as the table shows them."""

    @property
    def job(self) -> Job:
        compared = [key for key in self.grid_values if key in NON_IDENTIFYING_KEYS and key != "rounds"]
        tag = ",".join(f"{key}={self.grid_values[key]}" for key in compared)
        return Job(self.config, ", ".join(f"{key} {value}" for key, value in self.grid_values.items()), tag=tag)


@dataclass(frozen=True)
class Grid:
    """Every combination of some keys' values, for every seed."""

    base: Config
    axes: Mapping[str, Sequence[Any]]
    seeds: Sequence[int]

    def points(self) -> list[Point]:
        """List all runs, and check their settings."""
        found = []
        for seed in self.seeds:
            for values in itertools.product(*self.axes.values()):
                values_by_key = dict(zip(self.axes, values, strict=True))
                config = _check_config(with_values(self.base, {**values_by_key, "seed": seed}), values_by_key)
                found.append(
                    Point(config, {key: _format_value(value) for key, value in values_by_key.items()} | {"seed": seed})
                )
        return found


def read_grid(path: str | Path, values: Mapping[str, Any], seeds: str | int | None = None) -> Grid:
    """Read a grid from a YAML file. `values`, by dotted key, override the file."""
    content = read_yaml(path)
    if not isinstance(content, Mapping):
        raise UserError(f"{path}: expected a mapping of keys to values, with the key 'grid'")
    keys = dict(content)
    axes, listed = keys.pop("grid", None), keys.pop("seeds", 1)
    try:
        varied = _axes(axes, values)
        base = with_values(Config.from_mapping(keys), values)
        return Grid(base, varied, _seeds(base, listed if seeds is None else seeds))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _axes(axes: Any, values: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
    if not isinstance(axes, Mapping) or not axes:
        raise UserError("no grid; expected a mapping such as grid: {method: [fedavg, fedvls], partition.beta: [0.1]}")
    found: dict[str, Sequence[Any]] = {}
    for key, listed in axes.items():
        if not isinstance(listed, list) or not listed:
            raise UserError(f"grid.{key} is {listed!r}; expected a list of values")
        if key in ("seed", "seeds"):
            raise UserError(f"grid.{key} is not possible; expected seeds outside the grid, such as seeds: 3")
        if key in values:
            raise UserError(f"{key} is given by a flag and in the grid; expected only one of the two")
        found[str(key)] = listed
    return found


def _seeds(base: Config, listed: Any) -> list[int]:
    """Parse the seeds. `3` means three seeds, starting with the configuration's. A list means exactly these seeds."""
    if isinstance(listed, list):
        return [integer(0)("seeds", seed) for seed in listed]
    return list(range(base.seed, base.seed + int(integer(1)("seeds", listed))))


def _check_config(config: Config, values_by_key: Mapping[str, Any]) -> Config:
    """Check names and parameters before anything runs. Whether they fit the data is checked when a run starts."""
    try:
        make_method(config.method, config.method_params)
        partition_rule(config)
    except UserError as error:
        raise UserError(f"at {', '.join(f'{k}={v}' for k, v in values_by_key.items())}: {error}") from error
    return config


def _format_value(value: Any) -> Any:
    """Format a value for the table. A method is shown with its parameters."""
    if isinstance(value, Mapping):
        named = dict(value)
        name = named.pop("name", None) or named.pop("rule", "")
        return f"{name}({', '.join(f'{key}={v}' for key, v in named.items())})" if named else str(name)
    return ", ".join(map(str, value)) if isinstance(value, list) else value
