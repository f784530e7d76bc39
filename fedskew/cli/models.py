"""`fedskew models`: the models by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from fedskew.cli.flags import Json
from fedskew.cli.run import examples

if TYPE_CHECKING:
    from fedskew.models.catalogue import ModelEntry

EXAMPLES = ("fedskew models",)


def add_to(app: typer.Typer) -> None:
    app.command("models", epilog=examples(EXAMPLES))(_command)


def _command(as_json: Json = False) -> None:
    """List the models. Your own: --model package.module:factory."""
    from rich.table import Table

    from fedskew.cli.terminal import print_json, stdout
    from fedskew.models.catalogue import MODELS

    if as_json:
        keys = ("name", "description", "paper", "kinds", "smallest_side")
        print_json({"models": [{key: getattr(entry, key) for key in keys} for entry in MODELS.values()]})
        return
    table = Table()
    for heading in ("model", "what it is", "as in", "takes"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "model")
    for entry in MODELS.values():
        table.add_row(entry.name, entry.description, entry.paper, _takes(entry))
    console = stdout()
    console.print(table)
    console.print("auto, the default: fasttext for text, cnn for images from 16×16 on, dnn otherwise", style="dim")


def _takes(entry: ModelEntry) -> str:
    size = f" from {entry.smallest_side}×{entry.smallest_side} on" if entry.smallest_side > 1 else ""
    plural = {"image": f"images{size}", "table": "tables", "text": "text"}
    return ", ".join(plural[kind] for kind in entry.kinds)
