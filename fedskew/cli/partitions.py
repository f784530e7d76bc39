"""`fedskew partitions`: the rules that split data, with their parameters."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

import typer

from fedskew.cli.flags import Json
from fedskew.cli.run import examples

if TYPE_CHECKING:
    from fedskew.data import Partition

EXAMPLES = ("fedskew partitions",)


def add_to(app: typer.Typer) -> None:
    app.command("partitions", epilog=examples(EXAMPLES))(_command)


def _command(as_json: Json = False) -> None:
    """List the rules that split the data over clients."""
    from rich.table import Table
    from rich.text import Text

    from fedskew.cli.terminal import print_json, stdout
    from fedskew.data import PARTITIONS

    told = [_json(rule) for _, rule in sorted(PARTITIONS.items())]
    if as_json:
        print_json({"partitions": told})
        return
    table = Table()
    table.add_column("rule", no_wrap=True)
    table.add_column("what it does")
    table.add_column("parameters", overflow="fold", min_width=20)
    for rule in told:
        parameters = "\n".join(_parameter(name, default) for name, default in rule["parameters"].items())
        table.add_row(rule["name"], Text(rule["summary"]), Text(parameters, style="cyan"))
    console = stdout()
    console.print(table)
    console.print("--partition RULE; parameters: a flag of that name or --set partition.NAME=VALUE", style="dim")


def _json(rule: type[Partition]) -> dict[str, Any]:
    summary = (rule.__doc__ or "").strip().split("\n\n")[0]
    return {
        "name": rule.name,
        "summary": " ".join(summary.split()),
        "parameters": {spec.name: None if spec.default is MISSING else spec.default for spec in fields(rule)},
        "uses_all": rule.uses_all,
    }


def _parameter(name: str, default: object) -> str:
    if default is None:
        return f"{name} (20 if not given)" if name == "clients" else f"{name} (needed)"
    return f"{name}={default}"
