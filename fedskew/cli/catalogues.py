"""`fedskew methods`, `models`, `datasets` and `partitions`: list the available choices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedskew.cli.commands import Json, add_command, option

if TYPE_CHECKING:
    from fedskew.data import Partition
    from fedskew.data.catalogue import DatasetEntry
    from fedskew.methods import Entry
    from fedskew.models.catalogue import ModelEntry


def add_to(app: typer.Typer) -> None:
    add_command(
        app, "methods", _methods,
        "fedskew methods",
        "fedskew methods 'fedlmd*'",
        "fedskew methods fedvls",
        "fedskew methods fedvls+fedsam",
        "fedskew methods --combinations",
    )  # fmt: skip
    add_command(app, "models", _models, "fedskew models")
    add_command(app, "datasets", _datasets, "fedskew datasets")
    add_command(app, "partitions", _partitions, "fedskew partitions")


def _methods(
    pattern: Annotated[
        str,
        typer.Argument(metavar="PATTERN", help="a method or combination to show in detail, or a pattern like 'fed*'"),
    ] = "*",
    combinations: Annotated[
        bool, typer.Option("--combinations", help="print which methods can be combined, as Markdown")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the methods. Combine them with + if they set different parts, such as the objective and the solver."""
    from fedskew.cli.terminal import print_json
    from fedskew.errors import UserError, unknown
    from fedskew.methods import METHODS, combined_entry, matching_entries

    if combinations:
        if as_json:
            raise UserError("--combinations prints Markdown and cannot be used with --json; remove one of them")
        if pattern != "*":
            raise UserError(f"--combinations lists all methods; expected it without {pattern!r}")
        from fedskew.methods.compatibility import markdown_tables

        typer.echo(markdown_tables(), nl=False)
        return
    entries = [combined_entry(pattern)] if {"+", ":"} & set(pattern) else matching_entries(pattern)
    if not entries:
        raise unknown("method", pattern, [name for e in METHODS.values() for name in (e.name, *e.aliases)])
    if as_json:
        print_json({"methods": [_method_json(entry) for entry in entries]})
    elif len(entries) == 1 and not any(c in pattern for c in "*?["):
        _show_method(entries[0])
    else:
        _show_methods(entries)


def _method_json(entry: Entry) -> dict[str, Any]:
    from fedskew.methods.method_list import needs

    keys = ("name", "aliases", "summary", "paper", "sends", "extra_compute", "kinds")
    works_with = ("secure_aggregation", "example_privacy")
    values = {key: getattr(entry, key) for key in (*keys, *works_with)}
    return values | {"reveals": entry.revealed, "needs": needs(entry), "parameters": _defaults(entry)}


def _defaults(entry: Entry) -> dict[str, object]:
    """Default hyper-parameters of all parts, by the names used in `--set method.NAME=VALUE`."""
    from fedskew.methods import make_method

    return make_method(entry.name).params


def _parameters(entry: Entry, separator: str, equals: str) -> str:
    shown = {name: "none" if value in (None, ()) else str(value) for name, value in _defaults(entry).items()}
    return separator.join(f"{name}{equals}{value}" for name, value in shown.items())


def _show_methods(entries: list[Entry]) -> None:
    from rich.table import Table
    from rich.text import Text

    from fedskew.cli.terminal import stdout
    from fedskew.methods.catalogue import UPDATES_REVEAL

    methods = Table(title="methods", title_justify="left")
    methods.add_column("method", no_wrap=True)
    methods.add_column("description, paper, parameters (--set method.NAME=VALUE)")
    cost = Table(title="data sent and revealed, and cost", title_justify="left")
    cost.add_column("method", no_wrap=True)
    for heading in ("sent by clients", "revealed about the data", "extra compute"):
        cost.add_column(heading)
    for entry in entries:
        name = Text(entry.name, style="bold")
        for alias in entry.aliases:
            name.append(f"\n{alias}", style="dim")
        description = Text(entry.summary)
        description.append(f" {entry.paper}", style="dim")
        if parameters := _parameters(entry, ", ", "="):
            description.append(f"\n{parameters}", style="cyan")
        methods.add_row(name, description)
        cost.add_row(name, entry.sends, entry.revealed, entry.extra_compute)
    console = stdout()
    console.print(methods)
    console.print(cost)
    if any(entry.sends_updates for entry in entries):
        console.print(f"{UPDATES_REVEAL}.", style="dim")
    console.print(
        "secure aggregation, example-level privacy and combinations: fedskew methods --combinations", style="dim"
    )


def _show_method(entry: Entry) -> None:
    from rich.table import Table
    from rich.text import Text

    from fedskew.cli.terminal import stdout
    from fedskew.methods.catalogue import UPDATES_REVEAL
    from fedskew.methods.method_list import needs

    console = stdout()
    console.print(Text(entry.document), soft_wrap=True)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    rows = {
        "names": ", ".join((entry.name, *entry.aliases)),
        "parts": ", ".join(entry.kinds) or "-",
        "paper": entry.paper,
        "needs": needs(entry),
        "sent by clients": entry.sends,
        "revealed about the data": entry.revealed,
        "extra compute": entry.extra_compute,
        "secure aggregation": "yes" if entry.secure_aggregation else f"no: it {entry.individual_updates_reason}",
        "example-level privacy": "yes" if entry.example_privacy else f"no: it {entry.unprotected_use}",
        "parameters": _parameters(entry, "\n", " = ") or "none",
    }
    for heading, value in rows.items():
        table.add_row(Text(heading, style="bold"), Text(value))
    console.print()
    console.print(table)
    if entry.sends_updates:
        console.print(f"{UPDATES_REVEAL}.", style="dim")


def _models(as_json: Json = False) -> None:
    """List the models. For your own, use --model package.module:factory."""
    from rich.table import Table

    from fedskew.cli.terminal import print_json, stdout
    from fedskew.models.catalogue import MODELS

    if as_json:
        keys = ("name", "description", "paper", "kinds", "smallest_side")
        print_json({"models": [{key: getattr(entry, key) for key in keys} for entry in MODELS.values()]})
        return
    table = Table()
    for heading in ("model", "description", "source", "inputs"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "model")
    for entry in MODELS.values():
        table.add_row(entry.name, entry.description, entry.paper, _inputs(entry))
    console = stdout()
    console.print(table)
    console.print("auto (default): fasttext for text, cnn for images of 16×16 or more, dnn otherwise", style="dim")


def _inputs(entry: ModelEntry) -> str:
    size = f" of {entry.smallest_side}×{entry.smallest_side} or more" if entry.smallest_side > 1 else ""
    plural = {"image": f"images{size}", "table": "tables", "text": "text"}
    return ", ".join(plural[kind] for kind in entry.kinds)


def _datasets(
    data_dir: Annotated[str | None, option("--data-dir", "FOLDER", "also search this folder")] = None,
    as_json: Json = False,
) -> None:
    """List the datasets and where their files are. For your own, use --data PATH."""
    from rich.table import Table
    from rich.text import Text

    from fedskew.cli.terminal import print_json, stdout
    from fedskew.data.catalogue import DATASETS

    rows = [_dataset_json(entry, data_dir) for entry in DATASETS.values()]
    if as_json:
        print_json({"datasets": rows})
        return
    table = Table()
    for heading in ("dataset", "description", "size", "location"):
        table.add_column(heading, no_wrap=heading in ("dataset", "size"), overflow="fold")
    for row in rows:
        description = Text(row["description"])
        description.append(f"\nlicence: {row['licence']}", style="dim")
        if row["options"]:
            description.append(f"\noptions: {', '.join(row['options'])}", style="cyan")
        source = "downloaded on first use" if row["downloaded"] else "make it with its publisher's scripts"
        where = Text(row["where"] or f"not on this machine; {source}", style="" if row["where"] else "dim")
        if row["bytes"]:
            where.append(f"\n{_format_size(row['bytes'])}", style="dim")
        parts = f"{row['train']} train\n{row['test']} test" if row["test"] else f"{row['train']} samples"
        size = f"{row['classes']} classes\n{parts}"
        table.add_row(row["name"], description, size, where)
    console = stdout()
    console.print(table)
    console.print(
        "searched folders: --data-dir, FEDSKEW_DATA and the cache; set an option with --set data.NAME=VALUE",
        style="dim",
    )


def _dataset_json(entry: DatasetEntry, data_dir: str | None) -> dict[str, Any]:
    from fedskew.data.catalogue import find_location, size_on_disk

    where, size = find_location(entry, data_dir), size_on_disk(entry, data_dir)
    keys = ("name", "kind", "description", "classes", "train", "test", "licence", "citation", "options", "sources")
    downloaded = bool(entry.components or (entry.published and entry.published.files))
    return {key: getattr(entry, key) for key in keys} | {"where": where, "bytes": size, "downloaded": downloaded}


def _format_size(size: int) -> str:
    return f"{size / 1e6:.0f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"


def _partitions(as_json: Json = False) -> None:
    """List the partitions, the rules that split data over clients."""
    from rich.table import Table
    from rich.text import Text

    from fedskew.cli.terminal import print_json, stdout
    from fedskew.data import PARTITIONS

    rules = [_partition_json(rule) for _, rule in sorted(PARTITIONS.items())]
    if as_json:
        print_json({"partitions": rules})
        return
    table = Table()
    table.add_column("partition", no_wrap=True)
    table.add_column("description")
    table.add_column("parameters", overflow="fold", min_width=20)
    for rule in rules:
        parameters = "\n".join(_partition_parameters(rule))
        table.add_row(rule["name"], Text(rule["summary"]), Text(parameters, style="cyan"))
    console = stdout()
    console.print(table)
    console.print(
        "choose one with --partition NAME; set a parameter with its flag or with --set partition.NAME=VALUE",
        style="dim",
    )


def _partition_json(rule: type[Partition]) -> dict[str, Any]:
    summary = (rule.__doc__ or "").strip().split("\n\n")[0]
    return {
        "name": rule.name,
        "summary": " ".join(summary.split()),
        "parameters": {spec.name: None if spec.default is MISSING else spec.default for spec in fields(rule)},
        "required": [spec.name for spec in fields(rule) if spec.default is MISSING and spec.name != "clients"],
        "uses_all": rule.uses_all,
    }


def _partition_parameters(rule: dict[str, Any]) -> Iterator[str]:
    for name, default in rule["parameters"].items():
        if default is not None:
            yield f"{name}={default}"
        elif name == "clients":
            yield "clients (default: 20)"
        else:
            yield f"{name} ({'required' if name in rule['required'] else 'optional'})"
