"""Names of methods and settings. They show the values in which methods or settings differ."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fedskew.errors import UserError
from fedskew.experiment.config import Config
from fedskew.experiment.config.keys import SKEW_KEYS
from fedskew.methods import make_method

IGNORED_KEYS = (
    "seed", "data_dir", "checkpoint_every", "save_predictions", "engine", "device", "compile", "eval_local",
)  # fmt: skip
"""Keys that may differ between the runs of one setting. Except the seed, they change results at most by rounding."""


def flat_config(config: Config) -> dict[str, Any]:
    """Return the configuration under dotted keys, without `IGNORED_KEYS`.

    If the run recorded a digest of its initial weights, the digest replaces their path.
    """
    values: dict[str, Any] = {}
    for key, value in config.to_mapping().items():
        if isinstance(value, Mapping):
            values |= {f"{key}.{inner}": v for inner, v in value.items()}
        elif key not in IGNORED_KEYS:
            values[key] = value
    if (digest := values.pop("init_sha256")) is not None:
        values["init"] = f"sha256:{digest[:12]}"
    return values


def shown_config(config: Config) -> dict[str, Any]:
    """Return `flat_config` with the path of the initial weights beside their digest. It is for display only."""
    values = flat_config(config)
    return values if values["init"] == config.init else values | {"init": f"{config.init} ({values['init']})"}


def varied_keys(configs: Sequence[Config]) -> list[str]:
    """Return the keys in which the configurations differ, without those of the method."""
    all_values = [flat_config(config) for config in configs]
    keys = dict.fromkeys(key for values in all_values for key in values if not key.startswith("method."))
    return [key for key in keys if len({to_key(values.get(key)) for values in all_values}) > 1]


def labels(configs: Sequence[Config]) -> list[str]:
    """Return one label per configuration: the method's name, and the parameters that distinguish it.

    These are the parameters that are not the method's defaults, and those in which the configurations with the same
    method differ. If several parameters differ, a label leaves out those with default values.
    """
    by_method: dict[str, list[Config]] = {}
    for config in configs:
        by_method.setdefault(config.method, []).append(config)
    defaults = {method: _defaults(method) for method in by_method}
    differing = {method: _differing_parameters(members) for method, members in by_method.items()}
    return [_label(config, differing[config.method], defaults[config.method]) for config in configs]


def _differing_parameters(configs: Sequence[Config]) -> list[str]:
    """Return the parameters of the method in which its configurations differ."""
    names = {name for config in configs for name in config.method_params}
    return [name for name in names if len({to_key(config.method_params.get(name)) for config in configs}) > 1]


def _label(config: Config, differing: Collection[str], defaults: Mapping[str, object]) -> str:
    if_not_recorded = {name: defaults.get(name) if len(differing) > 1 else None for name in differing}
    values = if_not_recorded | config.method_params
    shown = [name for name in sorted(values) if _is_shown(name, values[name], differing, defaults)]
    listed = ", ".join(f"{name}={values[name]}" for name in shown)
    return f"{config.method} ({listed})" if listed else config.method


def _is_shown(name: str, value: object, differing: Collection[str], defaults: Mapping[str, object]) -> bool:
    if name not in defaults:
        return name in differing
    return to_key(value) != to_key(defaults[name]) or list(differing) == [name]


def _defaults(method: str) -> dict[str, object]:
    """Return the default parameters of a method. Return {} if they are unknown, as for a user's own object.

    A user's module is not imported: a table of somebody else's run must not execute its code.
    """
    if ":" in method:
        return {}
    try:
        return make_method(method).params
    except UserError:
        return {}


def naming_keys(configs: Sequence[Config], varied: Sequence[str]) -> list[str]:
    """Return the varied keys that name a setting.

    A parameter of a partition rule is left out if it varies only because the rules differ.
    """
    kept = []
    for key in varied:
        by_rule: dict[str, set[str]] = {}
        is_rule_parameter = any(key == f"partition.{name}" for config in configs for name in config.partition.params)
        for config in configs:
            rule = config.partition.rule if is_rule_parameter else ""
            by_rule.setdefault(rule, set()).add(to_key(flat_config(config).get(key)))
        if any(len(values) > 1 for values in by_rule.values()):
            kept.append(key)
    return kept


def setting_label(config: Config, varied: Sequence[str]) -> str:
    """Return the values that distinguish a setting from others. If none vary, return its data, split and model."""
    if not varied:
        return setting_name(config)
    values = shown_config(config)
    other_keys = [key for key in varied if key in values and key != "partition.rule"]
    shown = [f"{key.removeprefix('partition.')}={values[key]}" for key in other_keys]
    if "partition.rule" in varied:
        shown.insert(0, _rule_name(config, without={key.removeprefix("partition.") for key in other_keys}))
    return ", ".join(shown)


def setting_name(config: Config) -> str:
    return f"{split_name(config)}, {config.model}"


def split_name(config: Config) -> str:
    clients = f", {config.partition.clients} clients" if config.partition.clients else ""
    return f"{config.data}, {_rule_name(config)}{clients}"


def _rule_name(config: Config, without: Collection[str] = ()) -> str:
    shown = {k: v for k, v in config.partition.params.items() if k in SKEW_KEYS and k not in without}
    params = ", ".join(f"{k} {v}" for k, v in shown.items())
    return f"{config.partition.rule}{' ' + params if params else ''}"


def to_key(value: Any) -> str:
    """Turn a value, even a list or a mapping, into a dictionary key. 1 and 1.0 are the same value."""
    return json.dumps(with_whole_numbers(value), sort_keys=True, default=str)


def with_whole_numbers(value: Any) -> Any:
    """Turn 1.0 into 1, also inside lists and mappings, so that equal values look the same."""
    if isinstance(value, Mapping):
        return {key: with_whole_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [with_whole_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
