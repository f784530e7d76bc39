"""Flags of the commands, derived from the configuration: its keys, help and defaults are written there once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Annotated, Any

import typer

from fedskew.experiment.config import KEYS, Config, PartitionConfig, assigned, load_yaml, with_values
from fedskew.experiment.config.yaml_file import parse_yaml

DATA, TRAINING, MACHINE, CONFIGURATION = "Data and split", "Training", "Machine", "Configuration and output"


@dataclass(frozen=True)
class Flag:
    """A flag that sets one key of the configuration."""

    key: str
    """The key, dotted."""
    metavar: str
    panel: str
    help: str = ""
    parse: bool = False
    """Whether its text is a value of YAML; the configuration itself makes numbers of the others."""
    switch: bool = False

    @property
    def parameter(self) -> str:
        """The name of the flag, as a Python identifier."""
        return self.key.rpartition(".")[2]

    def option(self) -> inspect.Parameter:
        option = typer.Option(
            f"--{self.parameter.replace('_', '-')}",
            metavar=None if self.switch else self.metavar,
            help=self._help(),
            rich_help_panel=self.panel,
            show_default=False,
        )
        if self.switch:
            return _parameter(self.parameter, Annotated[bool, option], False)
        return _parameter(self.parameter, Annotated[str | None, option], None)

    def _help(self) -> str:
        if self.help:
            return self.help
        spec = _PARTITION_KEYS.get(self.key) or KEYS[self.key]
        default = spec.default
        words = "" if default is None or default is False or default == () else f" (default: {default})"
        return f"{spec.metadata['help']}{words}"


_PARTITION_KEYS = {
    "partition" if spec.name == "rule" else f"partition.{spec.name}": spec for spec in fields(PartitionConfig)
}

_strength = partial(Flag, panel=DATA, parse=True)
_training = partial(Flag, panel=TRAINING)

FLAGS: dict[str, Flag] = {
    flag.parameter: flag
    for flag in (
        Flag("data", "NAME|PATH", DATA),
        Flag("data_dir", "FOLDER", DATA),
        Flag("partition", "RULE", DATA),
        _strength("partition.beta", "X", help="of dirichlet: the smaller, the stronger the skew (default: 0.1)"),
        _strength("partition.shards", "N", help="of shards: shards of one class each that a client gets (default: 2)"),
        _strength(
            "partition.labels_per_client", "N", help="of labels, quantity and fedgr's rules: classes of a client"
        ),
        Flag("partition.clients", "N", DATA),
        Flag("augment", "A,B", DATA),
        _training("method", "NAME"),
        _training("model", "NAME"),
        _training("rounds", "N"),
        _training("clients_per_round", "N"),
        _training("local_epochs", "N"),
        _training("batch_size", "N"),
        _training("lr", "X"),
        _training("lr_decay", "X"),
        _training("momentum", "X"),
        _training("weight_decay", "X"),
        _training("seed", "N"),
        _training("eval_every", "N"),
        _training("eval_local", "", switch=True),
        Flag("engine", "NAME", MACHINE),
        Flag("device", "NAME", MACHINE),
        Flag("precision", "NAME", MACHINE),
        Flag("compile", "WHEN", MACHINE),
    )
}

SPLIT = ("data", "data_dir", "partition", "beta", "shards", "labels_per_client", "clients", "seed")
"""The flags that decide a federation."""

Json = Annotated[
    bool, typer.Option("--json", help="print one JSON object and nothing else", rich_help_panel=CONFIGURATION)
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="no progress", rich_help_panel=CONFIGURATION)]


@dataclass(frozen=True)
class Settings:
    """What the user said: a file, flags over it, and `--set` over those."""

    file: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    """Under dotted keys."""

    def config(self) -> Config:
        return with_values(load_yaml(self.file) if self.file else Config(), self.values)


def takes_settings(names: Iterable[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these flags, `-c` and `--set`; its argument `settings` is what they say."""
    flags = [FLAGS[name] for name in names]

    def give(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "settings"]

        def with_flags(**given: Any) -> None:
            said = {flag: given.pop(flag.parameter) for flag in flags}
            file, assignments = given.pop("config"), given.pop("set") or ()
            command(settings=Settings(file, _values(said, assignments)), **given)

        parameters = [
            *(flag.option() for flag in flags),
            _parameter("config", _CONFIG, None),
            _parameter("set", _SET, None),
            *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own),
        ]
        with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_flags.__annotations__ = {p.name: p.annotation for p in parameters}
        with_flags.__doc__ = command.__doc__
        return with_flags

    return give


_CONFIG = Annotated[
    str | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="YAML file with any keys of the configuration; flags override it",
        rich_help_panel=CONFIGURATION,
        show_default=False,
    ),
]
_SET = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="any key, such as method.NAME=VALUE, partition.NAME=VALUE, data.NAME=VALUE; overrides flags; repeatable",
        rich_help_panel=CONFIGURATION,
        show_default=False,
    ),
]


def _values(said: Mapping[Flag, str | bool | None], assignments: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for flag, value in said.items():
        if value is not None and value is not False:
            values[flag.key] = parse_yaml(str(value), f"--{flag.parameter}") if flag.parse else value
    return values | {_ALIASES.get(key, key): value for key, value in assigned(assignments).items()}


_ALIASES = {"data.name": "data", "partition.rule": "partition", "method.name": "method"}
"""Two spellings of one key: whichever `--set` uses overrides the flag."""


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
