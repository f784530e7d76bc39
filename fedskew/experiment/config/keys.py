"""The configuration of a run: the only source of truth for flags, YAML files, saved runs and documentation.

A `Config` that exists is valid: it checks itself when made. In YAML a method's and a partition rule's own
parameters stand beside their name:

    data: fashion-mnist                      # or {name: my.csv, label: diagnosis}
    partition: {rule: dirichlet, beta: 0.1, clients: 20}
    method: {name: fedvls, distill_weight: 0.5}
    rounds: 60

Whether those names and parameters exist is for the catalogues to say; everything else is checked here.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from fedskew.errors import UserError, unknown
from fedskew.experiment.config.checks import (
    Check,
    choice,
    device,
    flag,
    integer,
    names,
    optional,
    parameters,
    real,
    refuse,
    text,
)
from fedskew.experiment.config.yaml_file import parse_yaml, read_yaml


def _option(default: Any, check: Check, help: str) -> Any:
    return field(default=default, metadata={"check": check, "help": help})


def _parameters_of(section: str) -> dict[str, Any]:
    return {"check": lambda _, value: parameters(section, value), "help": f"the {section}'s own parameters"}


def _method_name(key: str, value: Any) -> str:
    """A combination by its one name, whichever order it is given in, so that it is one run; others as they are."""
    name = text(key, value)
    if "+" not in name or ":" in name:  # a user's own method is imported when the run is prepared
        return name
    from fedskew.methods import canonical_name  # with torch, for which `--help` does not wait

    return canonical_name(name)


def _check_fields(instance: Any, prefix: str = "") -> None:
    for spec in fields(instance):
        if check := spec.metadata.get("check"):
            value = check(prefix + spec.name, getattr(instance, spec.name))
            object.__setattr__(instance, spec.name, value)


@dataclass(frozen=True)
class PartitionConfig:
    """Which rule splits the training data over how many clients."""

    rule: str = _option("dirichlet", text, "rule that splits the training data over the clients")
    clients: int | None = _option(
        None, optional(integer(1)), "clients in the federation; none: 20, or what the rule says"
    )
    seed: int | None = _option(None, optional(integer(0)), "seed of the split; none: the run's seed")
    params: dict[str, Any] = field(default_factory=dict, metadata=_parameters_of("partition"))

    def __post_init__(self) -> None:
        _check_fields(self, "partition.")
        _refuse_reserved("partition", self.params, _PARTITION_KEYS)

    def to_mapping(self) -> dict[str, Any]:
        return {"rule": self.rule, "clients": self.clients, "seed": self.seed, **self.params}

    @classmethod
    def from_mapping(cls, value: Any) -> PartitionConfig:
        """A mapping of the keys above with the rule's parameters beside them, or the rule's name alone."""
        if isinstance(value, str):
            return cls(rule=value)
        section = _string_keys("partition", value, "a rule's name or a mapping such as {rule: iid}")
        own = {key: section.pop(key) for key in _PARTITION_KEYS if key in section}
        return cls(**own, params=section)


_PARTITION_KEYS = ("rule", "clients", "seed")
_NAME_KEY = ("name",)


@dataclass(frozen=True)
class Config:
    """Everything that a run needs to be repeated."""

    data: str = _option("digits", text, "dataset's name, or the path of your own data")
    data_params: dict[str, Any] = field(default_factory=dict, metadata=_parameters_of("data"))
    data_dir: str | None = _option(None, optional(text), "folder with the publishers' files")
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    model: str = _option("auto", text, "model's name, package.module:factory, or auto: one that suits the data")
    method: str = _option("fedvls", _method_name, "method's name, or several joined by +")
    method_params: dict[str, Any] = field(default_factory=dict, metadata=_parameters_of("method"))
    rounds: int = _option(60, integer(1), "communication rounds")
    clients_per_round: int | None = _option(None, optional(integer(1)), "clients drawn each round; none: all")
    local_epochs: int = _option(5, integer(1), "passes over a client's data in a round")
    batch_size: int = _option(50, integer(1), "samples in a local step")
    lr: float = _option(0.05, real(above=0), "local learning rate in the first round")
    lr_decay: float = _option(1.0, real(above=0, at_most=1), "factor on the learning rate after each round")
    momentum: float = _option(0.9, real(at_least=0, below=1), "momentum of local SGD")
    weight_decay: float = _option(0.0, real(at_least=0), "weight decay of local SGD")
    clip_norm: float | None = _option(None, optional(real(above=0)), "largest gradient norm of a local step")
    average: str = _option("samples", choice("samples", "uniform"), "weights of the clients in the mean")
    augment: tuple[str, ...] = _option((), names, "augmentations of training images, in order")
    engine: str = _option(
        "auto",
        choice("auto", "plain", "stacked", "pool", "pool-stacked"),
        "what executes the local training: plain, stacked, pool, pool-stacked, or auto: a fast one",
    )
    device: str = _option("auto", device, "auto, cpu, cuda, cuda:N, a list such as cuda:0,cuda:1, or cuda:all")
    precision: str = _option(
        "float32", choice("float32", "float64", "tf32", "bf16"), "number format of the local training"
    )
    compile: str = _option(
        "auto", choice("auto", "always", "never"), "compile stacked steps on a GPU; auto: in long runs"
    )
    seed: int = _option(0, integer(0), "seed of every random choice")
    eval_every: int = _option(1, integer(1), "rounds from one evaluation to the next")
    eval_local: bool = _option(False, flag, "evaluate each client's model before and after its update, too")
    mean_last: int = _option(10, integer(1), "rounds at the end over which accuracy is averaged")
    checkpoint_every: int = _option(1, integer(1), "rounds from one checkpoint to the next")

    def __post_init__(self) -> None:
        if not isinstance(self.partition, PartitionConfig):
            raise refuse("partition", self.partition, "a PartitionConfig")
        _check_fields(self)
        _refuse_reserved("data", self.data_params, _NAME_KEY)
        _refuse_reserved("method", self.method_params, _NAME_KEY)
        clients = self.partition.clients
        if None not in (self.clients_per_round, clients) and self.clients_per_round > clients:  # type: ignore[operator]
            raise refuse("clients_per_round", self.clients_per_round, f"at most {clients}, the number of clients")

    @property
    def partition_seed(self) -> int:
        """The seed of the split."""
        return self.seed if self.partition.seed is None else self.partition.seed

    @classmethod
    def from_mapping(cls, mapping: Any) -> Config:
        """The inverse of `to_mapping`; keys left out have their defaults."""
        values = _string_keys("the configuration", mapping, "a mapping of keys to values")
        for key in values:
            if key not in KEYS:
                raise _unknown_key(key)
        if "partition" in values:
            values["partition"] = PartitionConfig.from_mapping(values["partition"])
        for key in ("data", "method"):
            if key in values and not isinstance(values[key], str):
                section = _string_keys(key, values[key], f"a name or a mapping such as {{name: {getattr(cls, key)}}}")
                values[key] = section.pop("name", getattr(cls, key))
                values[f"{key}_params"] = section
        return cls(**values)

    def to_mapping(self) -> dict[str, Any]:
        """All keys with their values, as YAML and JSON hold them."""
        plain = {spec.name: getattr(self, spec.name) for spec in fields(self) if spec.name in KEYS}
        return plain | {
            "data": {"name": self.data, **self.data_params},
            "partition": self.partition.to_mapping(),
            "method": {"name": self.method, **self.method_params},
            "augment": list(self.augment),
        }


KEYS: dict[str, Field[Any]] = {
    spec.name: spec for spec in fields(Config) if spec.name not in ("data_params", "method_params")
}
"""The keys of a configuration file, each with its default and, in its metadata, its `help`."""

RESUMABLE = ("data_dir", "checkpoint_every")
"""Keys that may differ when a run is continued: where the same data lie, and how often it is secured."""


def load_yaml(path: str | Path) -> Config:
    """The configuration in a YAML file; an empty file has the defaults."""
    mapping = read_yaml(path)
    try:
        return Config.from_mapping({} if mapping is None else mapping)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def with_overrides(config: Config, assignments: Iterable[str]) -> Config:
    """`config` with assignments such as `lr=0.1`, `partition.beta=0.05`, `method.distill_weight=0.5`."""
    return with_values(config, assigned(assignments))


def assigned(assignments: Iterable[str]) -> dict[str, Any]:
    """The values that assignments give to dotted keys; the last one counts."""
    values: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key.strip():
            raise UserError(f"setting {assignment!r} has no key or no '='; expected key=value, such as lr=0.1")
        values[key.strip()] = parse_yaml(value, f"setting {assignment!r}")
    return values


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """`config` with values under dotted keys.

    Another rule or method starts with its own defaults: the parameters of the one before it do not carry over.
    Whole sections are set before their parts, so that the order of the assignments does not matter.
    """
    mapping = config.to_mapping()
    for key in sorted(values, key=lambda key: (key.count("."), key not in _CHOICES)):
        _assign(mapping, key, values[key])
    return Config.from_mapping(mapping)


_CHOICES = ("data.name", "partition.rule", "method.name")


def config_hash(config: Config) -> str:
    """Twelve hex digits, the same for configurations that are the same run (all keys but `RESUMABLE`).

    Engine and device count: they agree to float tolerance only, and a run continues bit for bit or not at all.
    """
    text = json.dumps(_identity(config), sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def differing_keys(one: Config, other: Config) -> list[str]:
    """The dotted keys that make two configurations different runs."""
    a, b = _identity(one), _identity(other)
    absent = object()
    return sorted(key for key in a.keys() | b.keys() if a.get(key, absent) != b.get(key, absent))


def run_name(config: Config) -> str:
    """A folder's name that a human can read, such as `digits-dirichlet0.1-fedvls-s0-1a2b3c`."""
    strength = next((config.partition.params[key] for key in _STRENGTHS if key in config.partition.params), "")
    words = [
        Path(config.data).stem if _is_path(config.data) else config.data,
        f"{config.partition.rule}{strength}",
        config.method,
        f"s{config.seed}",
        config_hash(config)[:6],
    ]
    return "-".join(re.sub(r"[^A-Za-z0-9.+_-]+", "_", word).strip(".") or "_" for word in words)


_STRENGTHS = ("beta", "shards", "labels_per_client")
"""The parameters by which people tell splits of one rule apart."""


def _is_path(data: str) -> bool:
    return "/" in data or "\\" in data


def _identity(config: Config) -> dict[str, Any]:
    """What makes a run itself, under dotted keys; 1 and 1.0 are one value."""
    identity: dict[str, Any] = {}
    for key, value in config.to_mapping().items():
        if isinstance(value, dict):
            identity.update({f"{key}.{inner}": _canonical(v) for inner, v in value.items()})
        elif key not in RESUMABLE:
            identity[key] = _canonical(value)
    return identity


def _canonical(value: Any) -> Any:
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


_NAMES = {"data": "name", "partition": "rule", "method": "name"}
"""The sections, and the key in each that says whose parameters the others are."""


def _assign(mapping: dict[str, Any], key: str, value: Any) -> None:
    section, dot, name = key.partition(".")
    if section not in KEYS or (dot and section not in _NAMES):
        raise _unknown_key(key)
    if not dot:
        if section not in _NAMES or not isinstance(value, str):
            mapping[section] = value
            return
        name = _NAMES[section]
    if (section, name) == ("method", "name"):
        value = _method_name(key, value)
    part = mapping[section]
    if not isinstance(part, dict):
        raise refuse(section, part, f"a mapping, because {key} is set")
    if name == _NAMES[section] and part.get(name) != value:
        part = {k: part[k] for k in ("clients", "seed") if section == "partition" and k in part}
    mapping[section] = part | {name: value}


def _string_keys(what: str, value: Any, expected: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise refuse(what, value, expected)
    for key in value:
        if not isinstance(key, str):
            raise refuse(f"a key of {what}", key, "text")
    return dict(value)


def _refuse_reserved(section: str, params: Mapping[str, Any], reserved: tuple[str, ...]) -> None:
    for key in reserved:
        if key in params:
            raise UserError(f"{section} parameter {key!r} has the name of a key of the configuration")


def _unknown_key(key: str) -> UserError:
    if key in _PARTITION_KEYS or key in _STRENGTHS:
        return UserError(f"unknown key {key!r}; did you mean 'partition.{key}'?")
    return unknown("key", key, KEYS)
