"""Declare commands and their flags.

Most flags set a configuration key, and take their help and default from it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fedskew.errors import UserError, unknown
from fedskew.experiment.config import KEYS, Config, PartitionConfig, load_yaml, parse_assignments, with_values
from fedskew.experiment.config.values import parse_yaml, read_yaml

USAGE_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141
"""Exit statuses that every command may have. Some commands also use 1."""

EXAMPLES: dict[str, tuple[str, ...]] = {}
"""The examples in each command's help, by command."""


class Commands(TyperGroup):
    """A group of commands. For an unknown command, it suggests the nearest name."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None:
            raise unknown("command", args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)


def add_command(app: typer.Typer, name: str, command: Callable[..., None], *examples: str, group: str = "") -> None:
    """Register a command. Its docstring is its help, and the first sentence is shown in lists of commands.

    Typer would keep the line breaks of the docstring. This function removes those within paragraphs, because terminals
    wrap lines.
    """
    EXAMPLES[f"{group} {name}".strip()] = examples
    heading = "Examples:" if len(examples) > 1 else "Example:"
    paragraphs = [" ".join(paragraph.split()) for paragraph in (command.__doc__ or "").strip().split("\n\n")]
    summary = re.split(r"(?<=[.])\s", paragraphs[0], maxsplit=1)[0]
    epilog = "\n\n".join((heading, *examples))
    app.command(name, help="\n\n".join(paragraphs), short_help=summary, epilog=epilog)(command)


DATA, TRAINING, MACHINE, CONFIGURATION = "Data and split", "Training", "Machine", "Configuration and output"


@dataclass(frozen=True)
class Flag:
    """A flag that sets one key of the configuration."""

    key: str
    """The dotted key."""
    metavar: str
    panel: str
    help: str = ""
    is_yaml: bool = False
    """Whether to parse the text as YAML. If not, the configuration converts the text."""
    is_switch: bool = False
    """Whether the flag takes no value."""

    @property
    def parameter(self) -> str:
        """The flag's name as a Python identifier."""
        return self.key.rpartition(".")[2]

    @property
    def name(self) -> str:
        """The flag as a user types it."""
        return f"--{self.parameter.replace('_', '-')}"

    def to_parameter(self, with_default: bool) -> inspect.Parameter:
        """The Typer parameter for this flag. `with_default` says whether its help states the default."""
        metavar = None if self.is_switch else self.metavar
        declared = option(self.name, metavar, self.help or self._key_help(with_default), self.panel)
        if self.is_switch:
            return _parameter(self.parameter, Annotated[bool, declared], False)
        return _parameter(self.parameter, Annotated[str | None, declared], None)

    def _key_help(self, with_default: bool) -> str:
        spec = _PARTITION_KEYS.get(self.key) or KEYS[self.key]
        shows_default = with_default and spec.default is not False and spec.default not in (None, ())
        return f"{spec.metadata['help']} (default: {spec.default})" if shows_default else str(spec.metadata["help"])


def option(name: str, metavar: str | None, help: str, panel: str | None = None) -> Any:
    """Declare an option. Typer does not add a default, because `help` states it where there is one."""
    return typer.Option(name, metavar=metavar, help=help, rich_help_panel=panel, show_default=False)


def split_names(text: str | None) -> list[str]:
    """Split a comma-separated list."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


_PARTITION_KEYS = {
    "partition" if spec.name == "rule" else f"partition.{spec.name}": spec for spec in fields(PartitionConfig)
}

_skew = partial(Flag, panel=DATA, is_yaml=True)
_training = partial(Flag, panel=TRAINING)

FLAGS: dict[str, Flag] = {
    flag.parameter: flag
    for flag in (
        Flag("data", "NAME|PATH", DATA),
        Flag("data_dir", "FOLDER", DATA),
        Flag("partition", "RULE", DATA),
        _skew(
            "partition.beta",
            "X",
            help="for dirichlet (default: 0.1) and domain-dirichlet (default: 0.5): smaller values give stronger skew",
        ),
        _skew("partition.shards", "N", help="for shards: single-class shards per client (default: 2)"),
        _skew(
            "partition.labels_per_client",
            "N",
            help="for labels, quantity, fedgr-label and fedgr-double: classes per client (default: 2)",
        ),
        Flag("partition.clients", "N", DATA),
        Flag("augment", "A,B", DATA),
        _training("method", "NAME"),
        _training("model", "NAME"),
        _training("head", "KIND"),
        _training("init", "FILE"),
        _training("train", "PART"),
        _training("lora_rank", "N"),
        _training("rounds", "N"),
        _training("clients_per_round", "N"),
        _training("local_epochs", "N"),
        _training("batch_size", "N"),
        _training("lr", "X"),
        _training("lr_decay", "X"),
        _training("optimizer", "NAME"),
        _training("momentum", "X"),
        _training("weight_decay", "X"),
        _training("class_weights", "KIND|FILE"),
        _training("batches", "KIND"),
        _training("seed", "N"),
        _training("eval_every", "N"),
        _training("eval_local", "", is_switch=True),
        _training("client_test", "X"),
        _training("server_data", "X"),
        _training("positive", "CLASS"),
        _training("specificity", "X"),
        _training("save_predictions", "", is_switch=True),
        Flag("engine", "NAME", MACHINE),
        Flag("device", "NAME", MACHINE),
        Flag("precision", "NAME", MACHINE),
        Flag("compile", "WHEN", MACHINE),
    )
}

SPLIT = ("data", "data_dir", "partition", "beta", "shards", "labels_per_client", "clients", "seed")
"""The flags that define a federation."""

Json = Annotated[
    bool, typer.Option("--json", help="print only the result on stdout, as JSON", rich_help_panel=CONFIGURATION)
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="hide progress", rich_help_panel=CONFIGURATION)]
Live = Annotated[
    bool,
    typer.Option("--live", help="serve a live report on 127.0.0.1 during the run", rich_help_panel=CONFIGURATION),
]
Log = Annotated[
    str | None,
    option("--log", "TOOL", "also log to tensorboard, mlflow or wandb (offline), or several: a,b", CONFIGURATION),
]
RankBy = Annotated[
    str | None,
    option(
        "--rank-by",
        "METRIC",
        "main metric, by which results are ranked: accuracy, macro-f1, worst-class, balanced-accuracy, auroc, auprc, "
        "sensitivity, specificity, sensitivity-at-specificity, kappa, log-loss, brier or ece (default: accuracy)",
        CONFIGURATION,
    ),
]
Workers = Annotated[
    str | None,
    option("--workers", "N", "worker processes on this machine (default: one per CPU core, or 4 per GPU)", MACHINE),
]
TimeLimit = Annotated[
    str | None, option("--time-limit", "SECONDS", "stop after this time; repeat the command to resume", MACHINE)
]
NoFolders = Annotated[
    bool,
    typer.Option(
        "--no-folders", help="save only results, without run folders or checkpoints; a stopped run starts over",
        rich_help_panel=MACHINE,
    ),
]  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """The user's settings: a file, overridden by flags, overridden by `--set`."""

    file: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values by dotted key."""

    def config(self) -> Config:
        return with_values(load_yaml(self.file) if self.file else Config(), self.values)

    def sets(self, key: str) -> bool:
        """Whether a flag, `--set` or the file sets a key of the top level, such as `data`."""
        content = read_yaml(self.file) if self.file else None
        return key in self.values or (isinstance(content, Mapping) and key in content)


def takes_settings(
    names: Iterable[str], help: Mapping[str, str] | None = None, config_file: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the flags `names`, `-c` and `--set` to a command. Its argument `settings` receives their values.

    `help` replaces the help of some flags. Without `config_file`, the command has no `-c`. A grid or a paper's protocol
    then sets the defaults, so the help does not state them.
    """
    flags = [replace(FLAGS[name], help=(help or {}).get(name, FLAGS[name].help)) for name in names]

    def add(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        others = [parameter for parameter in signature.parameters.values() if parameter.name != "settings"]

        def with_flags(**arguments: Any) -> None:
            values = {flag: arguments.pop(flag.parameter) for flag in flags}
            file, assignments = arguments.pop("config", None), arguments.pop("set") or ()
            if file == "":  # for example, `-c "$FILE"` with an unset variable
                raise UserError("--config is ''; expected a YAML file")
            command(settings=Settings(file, _values(values, assignments)), **arguments)

        parameters = [
            *(flag.to_parameter(config_file) for flag in flags),
            *([_parameter("config", _CONFIG, None)] if config_file else []),
            _parameter("set", _SET, None),
            *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in others),
        ]
        with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_flags.__annotations__ = {p.name: p.annotation for p in parameters}
        with_flags.__doc__ = command.__doc__
        return with_flags

    return add


_CONFIG = Annotated[
    str | None,
    typer.Option(
        "--config", "-c", metavar="FILE", help="YAML file with any configuration keys; flags override it",
        rich_help_panel=CONFIGURATION, show_default=False,
    ),
]  # fmt: skip
_SET = Annotated[
    list[str] | None,
    option(
        "--set",
        "KEY=VALUE",
        "set any key, for example method.mu=0.1 or partition.min_size=5; overrides flags; repeatable",
        CONFIGURATION,
    ),
]


def _values(flags: Mapping[Flag, str | bool | None], assignments: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for flag, value in flags.items():
        if value is not None and value is not False:
            values[flag.key] = parse_yaml(str(value), flag.name) if flag.is_yaml else value
    return values | {_ALIASES.get(key, key): value for key, value in parse_assignments(assignments).items()}


_ALIASES = {"data.name": "data", "partition.rule": "partition", "method.name": "method"}
"""Alternative spellings of keys, accepted by `--set`."""


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
