"""Reference pages from the code: the command line, the configuration keys and the Python API."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any

from typer.main import get_command

import fedskew
from fedskew.cli.app import EXAMPLES, app
from fedskew.cli.commands import FLAGS
from fedskew.experiment.config import KEYS, PartitionConfig

# -- the command line --------------------------------------------------------------------------------------


def command_pages() -> dict[str, str]:
    root: Any = get_command(app)
    pages = {f"commands/{name}.md": _command_page(name, command, root) for name, command in root.commands.items()}
    return {"commands/index.md": _command_index(root), **pages}


def _command_index(root: Any) -> str:
    panels: dict[str, list[str]] = {}
    for name, command in root.commands.items():
        row = f"| [fedskew {name}]({name}.md) | {_cell(command.get_short_help_str(300))} |"
        panels.setdefault(command.rich_help_panel, []).append(row)
    lines = [
        "# The command line",
        "",
        "`fedskew --help` shows these groups, and `fedskew COMMAND --help` the options of a command. "
        "`fedskew --install-completion` lets the Tab key complete commands and options.",
    ]
    for panel, rows in panels.items():
        lines += ["", f"## {panel}", "", "| command | what it does |", "|---|---|", *rows]
    return "\n".join([*lines, ""])


def _command_page(name: str, command: Any, root: Any) -> str:
    context = root.make_context("fedskew", [], resilient_parsing=True)
    subcommands = getattr(command, "commands", {})
    lines = [f"# fedskew {name}", "", _help(command)]
    if subcommands:
        context = command.make_context(name, [], parent=context, resilient_parsing=True)
        for sub, subcommand in subcommands.items():
            lines += [
                "",
                f"## fedskew {name} {sub}",
                "",
                _help(subcommand),
                *_usage(f"{name} {sub}", subcommand, context),
            ]
    else:
        lines += _usage(name, command, context)
    return "\n".join([*lines, ""])


def _help(command: Any) -> str:
    paragraphs = (command.help or "").strip().split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _usage(name: str, command: Any, parent: Any) -> Iterator[str]:
    context = command.make_context(name.rpartition(" ")[2], [], parent=parent, resilient_parsing=True)
    pieces = " ".join(command.collect_usage_pieces(context))
    yield from ("", "```text", f"fedskew {name} {pieces}", "```")
    panels: dict[str, list[str]] = {}
    for parameter in command.params:
        if not getattr(parameter, "hidden", False):
            panel = getattr(parameter, "rich_help_panel", None)
            default = "Arguments" if parameter.param_type_name == "argument" else "Options"
            panels.setdefault(panel or default, []).append(_parameter_row(parameter, context))
    for panel, rows in panels.items():
        yield from ("", f"**{panel}**", "", "| option | meaning |", "|---|---|", *rows)
    if examples := EXAMPLES.get(name):
        yield from ("", "**Examples**", "", "```bash", *examples, "```")


def _parameter_row(parameter: Any, context: Any) -> str:
    metavar = parameter.make_metavar(context)
    if parameter.param_type_name == "argument":
        shown = metavar
    else:
        value = "" if getattr(parameter, "is_flag", False) else f" {metavar}"
        shown = ", ".join(parameter.opts) + value
    return f"| {_code(shown)} | {_cell(parameter.help or '')} |"


# -- the configuration -------------------------------------------------------------------------------------


def configuration_page() -> str:
    lines = [
        "# Configuration keys",
        "",
        "A YAML file (`-c FILE`), `--set KEY=VALUE` and `fs.run(..., KEY=VALUE)` take these keys. Unknown keys are "
        "refused with the nearest name. [Runs](runs.md) shows whole files.",
        "",
        "| key | default | flag | meaning |",
        "|---|---|---|---|",
    ]
    flags = {flag.key: f"--{name.replace('_', '-')}" for name, flag in FLAGS.items()}
    for key, spec in KEYS.items():
        if key != "partition":
            lines.append(_key_row(key, spec, flags.get(key)))
    for spec in fields(PartitionConfig):
        key = "partition" if spec.name == "rule" else f"partition.{spec.name}"
        if spec.name != "params":
            lines.append(_key_row(key, spec, flags.get(key)))
    lines += [
        "",
        "`method.NAME`, `partition.NAME` and `data.NAME` set parameters of the [method](methods/index.md), of the "
        "[partition](partitions.md) and of the [data](own-data.md).",
        "",
    ]
    return "\n".join(lines)


def _key_row(key: str, spec: Any, flag: str | None) -> str:
    default = "none" if spec.default in (None, (), MISSING) else spec.default
    return f"| `{key}` | `{default}` | {_code(flag) if flag else ''} | {_cell(spec.metadata.get('help', ''))} |"


def _code(text: str) -> str:
    return f"`{text}`"


def _cell(text: str) -> str:
    """Text for a table's cell: no line breaks, no markup but code."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


# -- the Python API ----------------------------------------------------------------------------------------

API = {
    "Run and compare": "run compare choose Config Callback EarlyStopping",
    "Results": "Result Comparison MethodRuns RoundRow Choice load_run write_report",
    "Data and federations": "load federation Dataset Samples Federation partitions",
    "Partitions": (
        "Partition Dirichlet Shards LabelsPerClient Quantity OneClass Balanced IID Column Counts Saved LabelImbalance "
        "QuantityImbalance DoubleImbalance"
    ),
    "Methods": (
        "methods MethodList make_method method Objective Regulariser Solver Weighting Calibration ServerRule Personal "
        "Schedule Stage Part Phase Survey Client Outputs Seen Trained Updates Tensors pack unpack"
    ),
    "Models, losses and errors": "make_model Classifier ModelAdapter losses UserError",
}
"""The public names by page. A test keeps this list complete."""


def api_pages() -> dict[str, str]:
    return {
        f"api/{title.lower().replace(',', '').replace(' ', '-')}.md": _api_page(title, names.split())
        for title, names in API.items()
    }


def _api_page(title: str, names: list[str]) -> str:
    lines = [f"# {title}", "", "```python", "import fedskew as fs", "```", ""]
    for name in names:
        lines += [f"::: {_home(name)}", ""]
    return "\n".join(lines)


def _home(name: str) -> str:
    """Where a public name is defined, for mkdocstrings. Names that are imported again have the same object."""
    value = getattr(fedskew, name)
    if inspect.ismodule(value):  # a package that is also a function, such as fedskew.methods
        value = getattr(value, name, value)
    if inspect.ismodule(value):
        return value.__name__
    is_defined = isinstance(value, type) or inspect.isfunction(value)
    return f"{value.__module__}.{value.__name__}" if is_defined else f"fedskew.methods.parts.{name}"
