"""Read a grid from YAML: a configuration with several values for some keys.

    data: fashion-mnist
    partition: {rule: dirichlet, clients: 20}
    rounds: 50
    grid:
      method: [fedavg, fedlmd, {name: fedvls, distill_weight: 0.5}]
      partition.beta: [0.05, 0.1, 0.5]
      clients_per_round: [2, 8, 20]
    seeds: 3

A method with settings may also be text, such as fedvls:distill_weight=0.5.

An axis may also have named cases, which set several keys at once:

      start:
        scratch: {}
        pretrained: {init: weights.safetensors, lr: 0.01}

Every combination is a run. Runs are ordered by seed, then by the first key, and so on. So a stopped sweep has complete
grids for the first seeds.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedskew.errors import UserError
from fedskew.experiment.config import Config, parse_method, with_values
from fedskew.experiment.config.values import integer, read_yaml
from fedskew.experiment.preparation import partition_rule
from fedskew.lab.sweep.job import NON_IDENTIFYING_KEYS, Job
from fedskew.methods import make_method
from fedskew.results.ranking import METRICS


@dataclass(frozen=True)
class Point:
    """One run of a grid."""

    config: Config
    grid_values: Mapping[str, Any]
    """The run's values on the grid's axes, and its seed, as the table shows them."""
    tag: str = ""
    """The run's values on axes that do not identify an experiment, such as `device=cpu`. Without the tag, runs that
    differ only in these values would count as one job."""

    @property
    def job(self) -> Job:
        label = ", ".join(f"{key} {value}" for key, value in self.grid_values.items())
        return Job(self.config, label, tag=self.tag)


@dataclass(frozen=True)
class Case:
    """A named value of an axis that sets several keys at once."""

    name: str
    values: Mapping[str, Any]
    """By dotted key."""


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
                by_axis = dict(zip(self.axes, values, strict=True))
                shown = {axis: _format_value(value) for axis, value in by_axis.items()}
                settings = _settings(by_axis)
                config = _make_config(self.base, {**settings, "seed": seed}, shown)
                found.append(Point(config, shown | {"seed": seed}, _tag(settings)))
        return found


def read_grid(path: str | Path, values: Mapping[str, Any], seeds: str | int | None = None) -> Grid:
    """Read a grid from a YAML file. `values`, by dotted key, override the file."""
    content = read_yaml(path)
    if not isinstance(content, Mapping):
        raise UserError(f"{path}: expected a mapping of keys to values, with the key 'grid'")
    keys = dict(content)
    axes, listed = keys.pop("grid", None), keys.pop("seeds", 1)
    try:
        if not axes and "search" in keys:
            raise UserError("no grid, but a search; expected --search optuna for this file")
        varied = _axes(axes)
        base = with_values(Config.from_mapping(keys), values)
        refuse_overridden(values, base, _varied_keys(varied), "grid")
        return Grid(base, varied, _seeds(base, listed if seeds is None else seeds))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _axes(axes: Any) -> dict[str, Sequence[Any]]:
    if not isinstance(axes, Mapping) or not axes:
        what = f"grid is {axes!r}" if axes else "no grid"
        raise UserError(f"{what}; expected a mapping such as grid: {{method: [fedavg, fedvls], partition.beta: [0.1]}}")
    found: dict[str, Sequence[Any]] = {}
    for key, given in axes.items():
        listed = _cases(str(key), given) if isinstance(given, Mapping) else given
        if not isinstance(listed, list) or not listed:
            raise UserError(f"grid.{key} is {given!r}; expected a list of values, or a mapping of names to settings")
        if key in ("seed", "seeds") or any("seed" in case.values for case in listed if isinstance(case, Case)):
            raise UserError(f"grid.{key} sets the seed; expected seeds outside the grid, such as seeds: 3")
        if key in _RESERVED:
            raise UserError(f"grid.{key} is a result in the table; expected another name for the axis")
        found[str(key)] = listed = [_read_value(str(key), value) for value in listed]
        refuse_duplicates(f"grid.{key}", listed)
    return found


def _read_value(key: str, value: Any) -> Any:
    """Turn a method with settings, such as `fedprox:mu=1`, into a mapping. Other values are not changed."""
    return parse_method(value) if key == "method" and isinstance(value, str) and "=" in value else value


_RESERVED = {"status", *(name.replace("-", "_") for name in METRICS)}
"""Columns of the table that an axis must not replace: the status, and the metrics that rank methods."""


def refuse_duplicates(key: str, listed: Sequence[Any]) -> None:
    """Refuse a value that is listed twice. Its runs would count twice in means and deviations."""
    shown = [str(_format_value(value)) for value in listed]
    for i, text in enumerate(shown):
        if text in shown[:i]:
            raise UserError(f"{key} has {text or repr(listed[i])} twice; expected different values")


def _varied_keys(axes: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """The configuration keys that the axes set, with their values."""
    found: dict[str, list[Any]] = {}
    for axis, listed in axes.items():
        for value in listed:
            for key, setting in _settings({axis: value}).items():
                found.setdefault(key, []).append(setting)
    return found


def refuse_overridden(flags: Mapping[str, Any], base: Config, varied: Mapping[str, Any], section: str) -> None:
    """Refuse a flag that a key of the grid or of the search would silently override.

    `base` is the configuration with the flags. `varied` has the keys of the grid or of the search, with their values.
    `section` is `grid` or `search`.
    """
    for flag in flags:
        for key, listed in varied.items():
            if flag == key:
                raise UserError(f"{key} is given by a flag and in the {section}; expected only one of the two")
            if flag.startswith(f"{key}.") and isinstance(listed, list):
                name = flag.removeprefix(f"{key}.")
                lost = [value for value in listed if _is_lost(flag, base, key, value)]
                # Refuse the flag if no value keeps it, or if a mapping resets its parameter without naming it.
                if len(lost) == len(listed) or any(isinstance(value, Mapping) and name not in value for value in lost):
                    raise UserError(
                        f"{flag} is given by a flag, but {key} {lost[0]} in the {section} replaces it; expected "
                        f"{name} in the {section}"
                    )


def _is_lost(flag: str, base: Config, key: str, value: Any) -> bool:
    """Whether a flag such as `method.mu` has no effect if `key`, here `method`, is set to this value."""
    name = flag.removeprefix(f"{key}.")
    before = base.to_mapping()[key]
    after = value if isinstance(value, Mapping) else with_values(base, {key: value}).to_mapping()[key]
    return bool(after.get(name) != before.get(name))


def _cases(axis: str, settings_by_name: Mapping[Any, Any]) -> list[Case]:
    for name, settings in settings_by_name.items():
        if not isinstance(settings, Mapping):
            raise UserError(
                f"grid.{axis}.{name} is {settings!r}; expected the keys that this case sets, such as {{lr: 0.1}}"
            )
    return [
        Case(str(name), {str(key): _read_value(str(key), value) for key, value in case.items()})
        for name, case in settings_by_name.items()
    ]


def _settings(by_axis: Mapping[str, Any]) -> dict[str, Any]:
    """Return all keys that a combination sets. Two axes must not set the same key."""
    found: dict[str, Any] = {}
    for axis, value in by_axis.items():
        for key, setting in (value.values if isinstance(value, Case) else {axis: value}).items():
            if key in found:
                raise UserError(f"two axes of the grid set {key}; expected only one axis to set it")
            found[key] = setting
    return found


def _seeds(base: Config, listed: Any) -> list[int]:
    """Parse the seeds. `3` means three seeds, starting with the configuration's. A list means exactly these seeds."""
    if isinstance(listed, list):
        if not listed:
            raise UserError("seeds is []; expected at least 1 seed")
        seeds = [integer(0)("seeds", seed) for seed in listed]
        refuse_duplicates("seeds", seeds)
        return seeds
    return list(range(base.seed, base.seed + int(integer(1)("seeds", listed))))


def _tag(settings: Mapping[str, Any]) -> str:
    """The tag of a run. It leaves out `rounds`, because a longer run also serves the shorter ones."""
    compared = [key for key in settings if key in NON_IDENTIFYING_KEYS and key != "rounds"]
    return ",".join(f"{key}={_format_value(settings[key])}" for key in compared)


def _make_config(base: Config, settings: Mapping[str, Any], shown: Mapping[str, Any]) -> Config:
    """Make a configuration. Check names and parameters before anything runs.

    Whether they fit the data is checked when a run starts. `shown` are the values on the axes, for messages.
    """
    try:
        config = with_values(base, settings)
        make_method(config.method, config.method_params)
        partition_rule(config)
    except UserError as error:
        raise UserError(f"at {', '.join(f'{k}={v}' for k, v in shown.items())}: {error}") from error
    return config


def _format_value(value: Any) -> Any:
    """Format a value for the table. A method is shown with its parameters, and a case by its name."""
    if isinstance(value, Case):
        return value.name
    if isinstance(value, Mapping):
        named = dict(value)
        name = named.pop("name", None) or named.pop("rule", "")
        return f"{name}({', '.join(f'{key}={v}' for key, v in named.items())})" if named else str(name)
    return ", ".join(map(str, value)) if isinstance(value, list) else value
