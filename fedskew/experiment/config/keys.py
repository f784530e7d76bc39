"""The configuration of a run. Flags, YAML files, saved runs and the documentation take their keys from it.

A new key needs a field of `Config`, and an entry in `_LATER_KEYS`, so that existing runs keep their hash. A flag for it
is one line of `FLAGS` in `cli/commands.py`, which takes the help and the default from here.

Every `Config` is valid: it checks itself when it is created. In YAML, the parameters of a method or partition are
written beside its name:

    data: fashion-mnist                      # or {name: my.csv, label: diagnosis}
    partition: {rule: dirichlet, beta: 0.1, clients: 20}
    method: {name: fedvls, distill_weight: 0.5}
    rounds: 60

A method with settings may also be one text: `method: fedvls:distill_weight=0.5`. This holds wherever a configuration
gets a method: in files, flags, grids and Python.

Types and ranges are checked here. The catalogues of datasets, partitions, models and methods check that names and
parameters exist. `preparation` checks that the choices fit each other.
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
from fedskew.experiment.config.values import (
    Check,
    choice,
    device,
    flag,
    folder,
    integer,
    invalid_value,
    label,
    names,
    optional,
    parameters,
    parse_yaml,
    read_yaml,
    real,
    text,
    weights_setting,
)

TASK_NAMES = ("single-label", "multi-label")
"""The names in `task.TASKS`. They are repeated here, because `fedskew.task` imports torch, and `--help` must not."""


def _option(default: Any, check: Check, help: str) -> Any:
    return field(default=default, metadata={"check": check, "help": help})


def _parameters_of(section: str) -> dict[str, Any]:
    return {"check": lambda _, value: parameters(section, value), "help": f"parameters of the {section}"}


def _check_method_name(key: str, value: Any) -> str:
    """Check a method name. A combination gets a fixed order, so that `a+b` and `b+a` are the same run."""
    name = text(key, value)
    if "+" not in name or ":" in name:  # a user-defined method is imported when the run is prepared
        return name
    from fedskew.methods import canonical_name  # imports torch, which `--help` does not need

    return canonical_name(name)


def _check_fields(instance: Any, prefix: str = "") -> None:
    for spec in fields(instance):
        if check := spec.metadata.get("check"):
            value = check(prefix + spec.name, getattr(instance, spec.name))
            object.__setattr__(instance, spec.name, value)


@dataclass(frozen=True)
class PartitionConfig:
    """How the training data is split, and over how many clients."""

    rule: str = _option("dirichlet", text, "how the training data is split over the clients")
    clients: int | None = _option(
        None, optional(integer(1)), "number of clients (default: 20, or set by the partition)"
    )
    seed: int | None = _option(None, optional(integer(0)), "seed of the split (default: the run's seed)")
    params: dict[str, Any] = field(default_factory=dict, metadata=_parameters_of("partition"))

    def __post_init__(self) -> None:
        _check_fields(self, "partition.")
        _refuse_reserved("partition", self.params, _PARTITION_KEYS)

    def to_mapping(self) -> dict[str, Any]:
        return {"rule": self.rule, "clients": self.clients, "seed": self.seed, **self.params}

    @classmethod
    def from_mapping(cls, value: Any) -> PartitionConfig:
        """Read the name of a rule, or a mapping with `rule`, `clients`, `seed` and the rule's parameters."""
        if isinstance(value, str):
            return cls(rule=value)
        section = _as_mapping("partition", value, "a rule's name or a mapping such as {rule: iid}")
        known = {key: section.pop(key) for key in _PARTITION_KEYS if key in section}
        return cls(**known, params=section)


_PARTITION_KEYS = ("rule", "clients", "seed")
"""The keys of the section `partition` that are not parameters of its rule."""


@dataclass(frozen=True)
class Config:
    """Everything needed to repeat a run, except data, models and methods that were passed as Python objects."""

    data: str = _option("digits", text, "dataset name, or path to your own data")
    data_params: dict[str, Any] = field(default_factory=dict, metadata=_parameters_of("data"))
    data_dir: str | None = _option(None, optional(text), "folder with dataset files")
    task: str = _option(
        "auto",
        choice("auto", *TASK_NAMES),
        "single-label: one class per sample; multi-label: any number of labels; auto: detected from the labels",
    )
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    model: str = _option("auto", text, "model name, package.module:factory, or auto to choose one for the data")
    head: str = _option(
        "auto",
        choice("auto", "linear", "cosine", "etf", "prototype", "personal", "retrained"),
        "kind of head: linear, cosine (similarities), etf (a fixed simplex), prototype (distances), personal (for "
        "fedrod), retrained (for creff), or auto: the one that the method is made for, else the model's own",
    )
    init: str | None = _option(
        None,
        optional(text),
        "file of weights that the model starts from: .safetensors, or a state dict in .pt, .pth or .bin",
    )
    init_sha256: str | None = _option(
        None, optional(text), "SHA-256 of the init file; runs record it, so that a repeated run refuses another file"
    )
    train: str = _option(
        "all",
        choice("all", "head", "lora"),
        "what clients train: all, head (on features that are computed once), or lora (low-rank adapters)",
    )
    lora_rank: int = _option(8, integer(1), "rank of the adapters, for train: lora")
    lora_alpha: float = _option(16.0, real(above=0), "the adapters' output is multiplied by lora_alpha/lora_rank")
    lora_targets: tuple[str, ...] = _option((), names, "layers with adapters, as patterns of names (default: all)")
    method: str = _option(
        "fedvls", _check_method_name, "method name, or several joined with +, with settings as in fedprox:mu=1"
    )
    method_params: dict[str, Any] = field(default_factory=dict, metadata=_parameters_of("method"))
    rounds: int = _option(60, integer(1), "communication rounds")
    clients_per_round: int | None = _option(None, optional(integer(1)), "clients sampled per round (default: all)")
    local_epochs: int = _option(5, integer(1), "local epochs per round")
    batch_size: int = _option(50, integer(1), "local batch size")
    lr: float = _option(0.05, real(above=0), "local learning rate in the first round")
    lr_decay: float = _option(1.0, real(above=0, at_most=1), "factor applied to the learning rate after every round")
    optimizer: str = _option(
        "sgd", choice("sgd", "nesterov", "adam", "adamw"), "local optimiser: sgd, nesterov, adam or adamw"
    )
    momentum: float = _option(
        0.9, real(at_least=0, below=1), "momentum of the local optimiser; beta1 of adam and adamw"
    )
    weight_decay: float = _option(0.0, real(at_least=0), "weight decay of the local optimiser")
    clip_norm: float | None = _option(None, optional(real(above=0)), "clip local gradients to this norm")
    example_clip: float | None = _option(
        None,
        optional(real(above=0)),
        "example-level privacy: clip the gradient of each sample to this norm; needs example_noise",
    )
    example_noise: float | None = _option(
        None,
        optional(real(above=0)),
        "example-level privacy: noise multiplier, the noise's standard deviation divided by example_clip",
    )
    class_weights: str | Mapping[str, float] | None = _option(
        None,
        optional(weights_setting),
        "class weights in the loss: balanced (from each client's label counts), counts (from the federation's label "
        "counts, which the server then learns), or a CSV, JSON or YAML file with a weight per class",
    )
    batches: str = _option(
        "shuffled",
        choice("shuffled", "balanced"),
        "local batches: shuffled, or balanced (each of the client's classes equally often)",
    )
    average: str = _option("samples", choice("samples", "uniform"), "client weights in the average: samples or uniform")
    augment: tuple[str, ...] = _option((), names, "augmentations of training images, applied in order")
    engine: str = _option(
        "auto",
        choice("auto", "plain", "stacked", "pool", "pool-stacked"),
        "training engine: plain, stacked, pool, pool-stacked, or auto to choose a fast one",
    )
    device: str = _option(
        "auto", device, "auto, cpu, cuda, cuda:N, a list such as cuda:0,cuda:1, cuda:all, or mps (Apple)"
    )
    precision: str = _option(
        "auto",
        choice("auto", "float32", "float64", "tf32", "bf16"),
        "number format: float32, float64, tf32, bf16, or auto for bf16 on CUDA GPUs that support it and float32 "
        "elsewhere; methods that compute the head in closed form use float32 instead of bf16",
    )
    compile: str = _option(
        "auto",
        choice("auto", "always", "never"),
        "when to compile stacked steps on a GPU: always, never, or auto for long runs",
    )
    seed: int = _option(0, integer(0), "random seed")
    eval_every: int = _option(1, integer(1), "evaluate every N rounds")
    eval_local: bool = _option(False, flag, "also evaluate each participant's model before and after its update")
    client_test: float = _option(
        0.0, real(at_least=0, below=1), "share of each client's samples that it holds out, to test models on (0: none)"
    )
    server_data: float = _option(
        0.0,
        real(at_least=0, below=1),
        "share of the training samples that the server holds and no client keeps, for methods such as fedlaw (0: none)",
    )
    positive: str | None = _option(
        None, optional(label), "positive class of data with two classes (default: the second)"
    )
    specificity: float = _option(0.95, real(at_least=0, at_most=1), "report the sensitivity at this specificity")
    save_predictions: bool = _option(False, flag, "save the final model's predictions on the test set as Parquet")
    mean_last: int = _option(10, integer(1), "report the mean accuracy of the last N rounds")
    checkpoint_every: int = _option(1, integer(1), "save a checkpoint every N rounds")

    def __post_init__(self) -> None:
        if not isinstance(self.partition, PartitionConfig):
            raise invalid_value("partition", self.partition, "a PartitionConfig")
        self._split_method()
        _check_fields(self)
        _refuse_reserved("data", self.data_params, ("name",))
        if "data_dir" in self.data_params:
            raise UserError("data_dir is an option of data; expected it beside data, as a key of its own")
        _refuse_reserved("method", self.method_params, ("name",))
        if self.optimizer == "nesterov" and not self.momentum:
            raise invalid_value("momentum", self.momentum, "a number above 0 for optimizer nesterov")
        self._check_example_privacy()
        clients = self.partition.clients
        if None not in (self.clients_per_round, clients) and self.clients_per_round > clients:  # type: ignore[operator]
            raise invalid_value(
                "clients_per_round", self.clients_per_round, f"at most {clients}, the number of clients"
            )

    def _split_method(self) -> None:
        """Move settings in the text of the method, as in `fedprox:mu=1`, to its parameters. Given parameters win."""
        if isinstance(self.method, str) and "=" in self.method and isinstance(self.method_params, dict):
            settings = parse_method(self.method)
            object.__setattr__(self, "method", settings.pop("name"))
            object.__setattr__(self, "method_params", settings | self.method_params)

    def _check_example_privacy(self) -> None:
        """Refuse `example_clip` and `example_noise` without each other. With both, refuse balanced batches."""
        given, missing = "example_clip", "example_noise"
        if self.example_clip is None:
            given, missing = missing, given
        if (self.example_clip is None) != (self.example_noise is None):
            raise UserError(f"{given} is set without {missing}; expected both for example-level privacy, or neither")
        if self.example_noise is not None and self.batches != "shuffled":
            raise invalid_value(
                "batches", self.batches, "shuffled, because example-level privacy forbids batches by label"
            )

    @property
    def partition_seed(self) -> int:
        """The seed of the split, which is the run's seed unless the partition has another one."""
        return self.seed if self.partition.seed is None else self.partition.seed

    @classmethod
    def from_mapping(cls, mapping: Any) -> Config:
        """Make a configuration from a mapping, such as the content of a YAML file or the result of `to_mapping`.

        `data`, `partition` and `method` may be names or mappings. A method may have settings, as in `fedprox:mu=1`.
        Missing keys get their defaults.
        """
        values = _as_mapping("the configuration", mapping, "a mapping of keys to values")
        for key, value in values.items():
            if key not in KEYS:
                raise _unknown_key_of_file(key, value)
        if "partition" in values:
            values["partition"] = PartitionConfig.from_mapping(values["partition"])
        for key in ("data", "method"):
            if key in values and not isinstance(values[key], str):
                section = _as_mapping(key, values[key], f"a name or a mapping such as {{name: {getattr(cls, key)}}}")
                values[key] = section.pop("name", getattr(cls, key))
                values[f"{key}_params"] = section
        return cls(**values)

    def to_mapping(self) -> dict[str, Any]:
        """All keys and values, in types that YAML and JSON have."""
        plain = {spec.name: getattr(self, spec.name) for spec in fields(self) if spec.name in KEYS}
        return plain | {
            "data": {"name": self.data, **self.data_params},
            "partition": self.partition.to_mapping(),
            "method": {"name": self.method, **self.method_params},
            "augment": list(self.augment),
            "lora_targets": list(self.lora_targets),
        }


KEYS: dict[str, Field[Any]] = {
    spec.name: spec for spec in fields(Config) if spec.name not in ("data_params", "method_params")
}
"""The keys of a configuration file. All have a default, and all but `partition` have `help` in their metadata."""

_CHANGEABLE = ("data_dir", "init", "checkpoint_every", "save_predictions")
"""Keys that may change when a run is resumed. All others identify the run. `init_sha256` identifies the file `init`."""

_LATER_KEYS: dict[str, Any] = {
    "optimizer": "sgd", "positive": None, "specificity": 0.95, "task": "auto", "client_test": 0.0, "init_sha256": None,
    "train": "all", "lora_rank": 8, "lora_alpha": 16.0, "lora_targets": [], "head": "auto", "class_weights": None,
    "batches": "shuffled", "server_data": 0.0, "example_clip": None, "example_noise": None,
}  # fmt: skip
"""Keys that were added later, with the value that earlier runs used. That value is left out of the hash."""


def load_yaml(path: str | Path) -> Config:
    """Read a configuration from a YAML file. An empty file gives the defaults."""
    mapping = read_yaml(path)
    try:
        return Config.from_mapping({} if mapping is None else mapping)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """Parse assignments such as `lr=0.1` or `partition.beta=0.05` into values by dotted key, for `with_values`.

    The last assignment to a key wins.
    """
    values: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key.strip():
            raise UserError(f"setting {assignment!r} lacks a key or '='; expected key=value, such as lr=0.1")
        values[key.strip()] = parse_yaml(value, f"setting {assignment!r}")
    return values


def parse_method(text: str) -> dict[str, Any]:
    """Read a method with settings, such as `fedvls:distill_weight=0.5`, into the mapping that YAML would have.

    Several settings are separated by colons: `fedvls:distill_weight=0.5:suppress_weight=0`. The name itself
    may have a colon, as in `package.module:Class`.
    """
    if _SETTING_BEFORE_PLUS.search(text) and _names_methods(text):
        named = [_split_settings(part) for part in re.split(_PLUS, text)]
        whole = "+".join(name for name, _ in named)
        expected = ":".join([whole, *(setting for _, settings in named for setting in settings)])
        raise UserError(f"method is {text!r}; settings go after the whole combination, such as {expected}")
    name, assignments = _split_settings(text)
    if not name:
        raise UserError(f"method is {text!r}; expected the name of a method first, such as fedprox:mu=1")
    settings = parse_assignments(assignments)
    _refuse_reserved("method", settings, ("name",))
    return {"name": name, **settings}


def _split_settings(text: str) -> tuple[str, list[str]]:
    """Split `fedprox:mu=1` into the name and its settings."""
    words = text.split(":")
    first = next((i for i, word in enumerate(words) if "=" in word), len(words))
    return ":".join(words[:first]), words[first:]


def _names_methods(text: str) -> bool:
    """Whether a method's name follows each plus. Otherwise, a plus may be part of a setting."""
    from fedskew.methods import METHODS  # imports torch, which `--help` does not need

    names = [_split_settings(part)[0].strip() for part in re.split(_PLUS, text)]
    return all(name.lower() in METHODS or ":" in name for name in names[1:])


_PLUS = r"\+(?=\s*[A-Za-z_])"
"""A plus before the name of a method. That of 1e+5 is part of a number."""
_SETTING_BEFORE_PLUS = re.compile(rf"=[^:]*{_PLUS}")


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a copy of a configuration with new values for some keys, such as `{"partition.beta": 0.05}`.

    The order of the values does not matter, because whole sections are set before their parts. A new dataset, partition
    rule or method starts with its defaults, not with the parameters of the previous one. Only `clients` and `seed` stay
    when the rule changes. A mapping replaces its whole section. If `partition.column` is set without a rule, the rule
    is `column`.
    """
    if "partition.column" in values and not {"partition", "partition.rule"} & values.keys():
        values = {"partition.rule": "column", **values}
    mapping = config.to_mapping()
    for key in sorted(values, key=lambda key: (key.count("."), key not in _CHOICES)):
        _assign(mapping, key, values[key])
    return Config.from_mapping(mapping)


_CHOICES = ("data.name", "partition.rule", "method.name")
"""The keys that choose the dataset, the rule and the method. They are set before the other dotted keys, because a new
choice discards the parameters of the previous one."""


def config_hash(config: Config) -> str:
    """Twelve hex digits that identify a run: a hash of all keys that must not change when it is resumed.

    The engine and the device are among these keys. A resumed run must end with the same bits as an uninterrupted one,
    and two engines or devices agree only to float tolerance.
    """
    text = json.dumps(_identity(config), sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def differing_keys(one: Config, other: Config) -> list[str]:
    """The dotted keys in which two runs differ, except keys that may change when a run is resumed."""
    a, b = _identity(one), _identity(other)
    absent = object()
    return sorted(key for key in a.keys() | b.keys() if a.get(key, absent) != b.get(key, absent))


def run_name(config: Config, settings: str = "") -> str:
    """A readable name, such as `digits-dirichlet0.1-fedvls-s0-1a2b3c`. `settings` are put after the method's name."""
    strength = next((config.partition.params[key] for key in SKEW_KEYS if key in config.partition.params), "")
    words = [
        Path(config.data).stem if _is_path(config.data) else config.data,
        f"{config.partition.rule}{strength}",
        f"{config.method}_{settings}" if settings else config.method,
        f"s{config.seed}",
        config_hash(config)[:6],
    ]
    return "-".join(re.sub(r"[^A-Za-z0-9.+_-]+", "_", word).strip(".") or "_" for word in words)


def run_folder(parent: str | Path, config: Config) -> Path:
    """The folder of a run, such as `digits-dirichlet0.1-fedvls_distill_weight0.5-s0-1a2b3c`.

    Settings of the method that are not its defaults are in the name, so that runs of one method can be told apart.
    Older versions of fedskew left these settings out of the name. An existing folder with such a name stays in use.
    """
    parent = folder("out", parent)
    older = parent / run_name(config)
    settings = "_".join(f"{name}{value}" for name, value in changed_method_params(config).items())
    if not settings or older.exists():
        return older
    return parent / run_name(config, settings[:_LONGEST_SETTINGS])


_LONGEST_SETTINGS = 60
"""The maximum length of a method's settings in a folder's name. File systems allow 255 characters for a whole name."""


def changed_method_params(config: Config) -> dict[str, Any]:
    """The method's parameters that differ from its defaults. Empty if the method is not found."""
    if not config.method_params:
        return {}
    from fedskew.methods import make_method  # imports torch, which `--help` does not need

    try:
        defaults = make_method(config.method).params
    except UserError:
        return {}
    usual = {name: list(value) if isinstance(value, tuple) else value for name, value in defaults.items()}
    return {name: value for name, value in config.method_params.items() if usual.get(name) != value}


SKEW_KEYS = ("beta", "shards", "labels_per_client")
"""Parameters of partition rules that set how strong the skew is."""


def _is_path(data: str) -> bool:
    return "/" in data or "\\" in data


def _identity(config: Config) -> dict[str, Any]:
    """The values that identify a run, by dotted key. 1 and 1.0 are the same value."""
    identity: dict[str, Any] = {}
    for key, value in config.to_mapping().items():
        if isinstance(value, dict):
            identity.update({f"{key}.{inner}": _canonical(v) for inner, v in value.items()})
        elif key not in _CHANGEABLE and not (key in _LATER_KEYS and value == _LATER_KEYS[key]):
            identity[key] = _canonical(value)
    if config.init is not None and config.init_sha256 is None:
        # `prepare` has not recorded the file's digest yet, so its path stands for it.
        identity["init"] = config.init
    return identity


def _canonical(value: Any) -> Any:
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


_CHOICE_KEY = {"data": "name", "partition": "rule", "method": "name"}
"""By section, the key that chooses the dataset, the rule or the method."""


def _assign(mapping: dict[str, Any], key: str, value: Any) -> None:
    """Set a key such as `lr` or `partition.beta` in the mapping of a configuration. Raise `UserError` if that fails."""
    section, dot, name = key.partition(".")
    if section not in KEYS or (dot and section not in _CHOICE_KEY):
        raise _unknown_key(key)
    if not dot:
        if section not in _CHOICE_KEY or not isinstance(value, str):
            mapping[section] = _require_method_name(value) if section == "method" else value
            return
        name = _CHOICE_KEY[section]
    if (section, name) == ("method", "name"):
        value = _check_method_name(key, value)
    part = mapping[section]
    if not isinstance(part, dict):
        raise invalid_value(section, part, f"a mapping, because {key} is set")
    if name == _CHOICE_KEY[section] and part.get(name) != value:  # a new choice starts with its defaults
        part = {k: part[k] for k in ("clients", "seed") if section == "partition" and k in part}
    mapping[section] = part | {name: value}


def _require_method_name(value: Any) -> Any:
    """Refuse settings without the method that they belong to. They would silently be those of the default method."""
    if isinstance(value, Mapping) and "name" not in value:
        raise UserError(
            f"method is {dict(value)!r}, without a name; expected a mapping such as {{name: fedprox, mu: 0.1}}"
        )
    return value


def _as_mapping(what: str, value: Any, expected: str) -> dict[str, Any]:
    """Copy a mapping with text keys. Refuse anything else."""
    if not isinstance(value, Mapping):
        raise invalid_value(what, value, expected)
    for key in value:
        if not isinstance(key, str):
            raise invalid_value(f"a key of {what}", key, "text")
    return dict(value)


def _refuse_reserved(section: str, params: Mapping[str, Any], reserved: tuple[str, ...]) -> None:
    for key in reserved:
        if key in params:
            raise UserError(
                f"{key!r} is a configuration key, so it cannot be a {section} parameter; expected another name"
            )


_READERS = {"methods": "compare", "grid": "sweep", "search": "sweep --search optuna"}
"""By key, the command that reads files with this key. It removes the key before it reads the configuration."""


def _unknown_key_of_file(key: str, value: Any) -> UserError:
    """Return the error for a key of a file, where the keys of a section are in the section's mapping."""
    if command := _READERS.get(key):
        return UserError(
            f"unknown key {key!r} in the configuration of a run; expected `fedskew {command}` for this file"
        )
    section, _, name = key.rpartition(".")
    section, name = (section, name) if section in _CHOICE_KEY else (_section_with(key), key)
    if not section or isinstance(value, Mapping):
        return unknown("key", key, KEYS)
    choice = "" if name == _CHOICE_KEY[section] else f"{_CHOICE_KEY[section]}: …, "
    shown = value if isinstance(value, str) else json.dumps(value, default=str)
    return UserError(f"unknown key {key!r}; did you mean {section}: {{{choice}{name}: {shown}}}?")


def _unknown_key(key: str) -> UserError:
    """Return the error for a key of `--set` or in Python, where the keys of a section are dotted."""
    section = _section_with(key)
    if not section:
        return unknown("key", key, KEYS)
    fixed = " A federation that is passed in Python has its own" if section == "partition" else ""
    return UserError(f"unknown key {key!r}; did you mean '{section}.{key}'?{fixed}")


def _section_with(key: str) -> str:
    """Return the section that has this key, or an empty text if none is known to have it."""
    if key in _PARTITION_KEYS or key in SKEW_KEYS:
        return "partition"
    from fedskew.methods import matching_entries  # imports torch, which `--help` does not need

    parameters = {spec.name for entry in matching_entries() for part in entry.parts for spec in fields(part)}
    return "method" if key in parameters else ""
