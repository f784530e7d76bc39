"""`fedskew results`: the page of everything that was rerun."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedskew.cli.run import examples
from fedskew.errors import UserError

EXAMPLES = ("fedskew results --results results --out RESULTS.md",)


def add_to(app: typer.Typer) -> None:
    app.command("results", epilog=examples(EXAMPLES))(_command)


def _command(
    results: Annotated[
        str, typer.Option("--results", metavar="FOLDER", help="the records that `reproduce` kept")
    ] = "results",
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="the page to write")] = "RESULTS.md",
) -> None:
    """Write the page that sets paper and rerun side by side, table by table, from the records of all runs."""
    from fedskew.cli.terminal import stdout
    from fedskew.experiment.storage.atomic import reporting_os_errors
    from fedskew.lab.papers.map_figure import draw_maps
    from fedskew.lab.papers.results_page import results_page

    if not any(Path(results).rglob("*.jsonl")):
        raise UserError(f"no records in {results!r}; expected PAPER.jsonl files, which `fedskew reproduce` keeps there")
    page = results_page(results)
    with reporting_os_errors("write", Path(out)):
        Path(out).write_text(page, encoding="utf-8")
    console = stdout()
    console.print(f"{out} written", markup=False, soft_wrap=True)
    for picture in draw_maps(results):
        console.print(f"{picture} drawn", markup=False, soft_wrap=True)
