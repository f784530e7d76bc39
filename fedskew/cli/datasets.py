"""`fedskew datasets`: the datasets by name, and which are here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedskew.cli.flags import Json
from fedskew.cli.run import examples

if TYPE_CHECKING:
    from fedskew.data.catalogue import DatasetEntry

EXAMPLES = ("fedskew datasets",)


def add_to(app: typer.Typer) -> None:
    app.command("datasets", epilog=examples(EXAMPLES))(_command)


def _command(
    data_dir: Annotated[
        str | None, typer.Option("--data-dir", metavar="FOLDER", help="look here, too", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """List the datasets and where they are. Your own: --data PATH."""
    from rich.table import Table
    from rich.text import Text

    from fedskew.cli.terminal import print_json, stdout
    from fedskew.data.catalogue import DATASETS

    told = [_json(entry, data_dir) for entry in DATASETS.values()]
    if as_json:
        print_json({"datasets": told})
        return
    table = Table()
    for heading in ("dataset", "what it is", "size", "here?"):
        table.add_column(heading, no_wrap=heading in ("dataset", "size"), overflow="fold")
    for row in told:
        what = Text(row["description"])
        what.append(f"\nlicence: {row['licence']}", style="dim")
        if row["options"]:
            what.append(f"\noptions: {', '.join(row['options'])}", style="cyan")
        where = Text(row["where"] or "no: downloaded when used", style="" if row["where"] else "dim")
        if row["bytes"]:
            where.append(f"\n{_size(row['bytes'])}", style="dim")
        size = f"{row['classes']} classes\n{row['train']} train\n{row['test']} test"
        table.add_row(row["name"], what, size, where)
    console = stdout()
    console.print(table)
    console.print("looked for in --data-dir, FEDSKEW_DATA and the cache; options: --set data.NAME=X", style="dim")


def _json(entry: DatasetEntry, data_dir: str | None) -> dict[str, Any]:
    where, size = _here(entry, data_dir)
    keys = ("name", "kind", "description", "classes", "train", "test", "licence", "citation", "options", "sources")
    return {key: getattr(entry, key) for key in keys} | {"where": where, "bytes": size}


def _here(entry: DatasetEntry, data_dir: str | None) -> tuple[str | None, int | None]:
    """The folder of its files and their size, folders not counted; None and None if they are not here."""
    from fedskew.data.catalogue import DATASETS
    from fedskew.data.published.places import found_files

    if entry.made_of:
        parts = [_here(DATASETS[part], data_dir) for part in entry.made_of]
        here = all(where for where, _ in parts)
        return ("with its parts" if here else None), (sum(size or 0 for _, size in parts) if here else None)
    if entry.published is None:
        return "with scikit-learn", None
    files = found_files(entry.published, data_dir)
    if not files:
        return None, None
    return str(Path(files[0]).parent), sum(path.stat().st_size for path in files if path.is_file())


def _size(size: int) -> str:
    return f"{size / 1e6:.0f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"
