"""`fedskew methods`: what each method is, sends, reveals and costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedskew.cli.flags import Json
from fedskew.cli.run import examples

if TYPE_CHECKING:
    from fedskew.methods import Entry

EXAMPLES = (
    "fedskew methods",
    "fedskew methods 'fedlmd*'",
    "fedskew methods fedvls",
    "fedskew methods fedvls+fedsam",
    "fedskew methods --combinations",
)


def add_to(app: typer.Typer) -> None:
    app.command("methods", epilog=examples(EXAMPLES))(_command)


def _command(
    pattern: Annotated[
        str,
        typer.Argument(metavar="PATTERN", help="a name or a combination, shown in detail, or a pattern such as 'fed*'"),
    ] = "*",
    combinations: Annotated[
        bool, typer.Option("--combinations", help="which methods combine, as Markdown; the others are refused")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the methods. Join several with +: one objective, one regulariser, one solver, one server rule."""
    from fedskew.cli.terminal import print_json
    from fedskew.errors import unknown
    from fedskew.methods import METHODS, combined_entry, matching_entries

    if combinations:
        from fedskew.methods.compatibility import table

        typer.echo(table(), nl=False)
        return
    entries = [combined_entry(pattern)] if {"+", ":"} & set(pattern) else matching_entries(pattern)
    if not entries:
        raise unknown("method", pattern, [name for e in METHODS.values() for name in (e.name, *e.aliases)])
    if as_json:
        print_json({"methods": [_json(entry) for entry in entries]})
    elif len(entries) == 1 and not any(c in pattern for c in "*?["):
        _show_one(entries[0])
    else:
        _show(entries)


def _json(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "aliases": list(entry.aliases),
        "kinds": list(entry.kinds),
        "summary": entry.summary,
        "paper": entry.paper,
        "sends": entry.sends,
        "reveals": entry.reveals,
        "extra_compute": entry.extra_compute,
        "parameters": _defaults(entry),
    }


def _defaults(entry: Entry) -> dict[str, object]:
    """The hyper-parameters of all parts, under the names by which they are set."""
    from fedskew.methods import make_method

    return make_method(entry.name).params


def _parameters(entry: Entry, between: str, spaced: str) -> str:
    return between.join(f"{name}{spaced}{_value(value)}" for name, value in _defaults(entry).items())


def _value(value: object) -> str:
    return "none" if value in (None, ()) else str(value)


def _show(entries: list[Entry]) -> None:
    from rich.table import Table
    from rich.text import Text

    from fedskew.cli.terminal import stdout

    what = Table(title="what they are", title_justify="left")
    what.add_column("method", no_wrap=True)
    what.add_column("what it does, paper, parameters (--set method.NAME=VALUE)")
    cost = Table(title="what they send, reveal and cost", title_justify="left")
    cost.add_column("method", no_wrap=True)
    for heading in ("sets", "leaves the client", "server learns of labels", "extra compute"):
        cost.add_column(heading, overflow="fold")
    for entry in entries:
        name = Text(entry.name, style="bold")
        for alias in entry.aliases:
            name.append(f"\n{alias}", style="dim")
        does = Text(entry.summary)
        does.append(f" {entry.paper}", style="dim")
        if parameters := _parameters(entry, ", ", "="):
            does.append(f"\n{parameters}", style="cyan")
        what.add_row(name, does)
        cost.add_row(name, ", ".join(entry.kinds) or "-", entry.sends, entry.reveals, entry.extra_compute)
    console = stdout()
    console.print(what)
    console.print(cost)


def _show_one(entry: Entry) -> None:
    from rich.table import Table
    from rich.text import Text

    from fedskew.cli.terminal import stdout

    console = stdout()
    console.print(Text(entry.document), soft_wrap=True)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    rows = {
        "names": ", ".join((entry.name, *entry.aliases)),
        "sets": ", ".join(entry.kinds) or "-",
        "paper": entry.paper,
        "leaves the client": entry.sends,
        "server learns of labels": entry.reveals,
        "extra compute": entry.extra_compute,
        "parameters": _parameters(entry, "\n", " = ") or "none",
    }
    for heading, value in rows.items():
        table.add_row(Text(heading, style="bold"), Text(value))
    console.print()
    console.print(table)
