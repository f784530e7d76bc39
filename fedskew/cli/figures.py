"""`fedskew figures`: the papers' figures from one's own runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedskew.cli.run import examples

EXAMPLES = (
    "fedskew figures --list",
    "fedskew figures fedlmd/2 runs -o figure2.pdf",
)


def add_to(app: typer.Typer) -> None:
    app.command("figures", epilog=examples(EXAMPLES))(_command)


def _command(
    name: Annotated[
        str | None, typer.Argument(metavar="FIGURE", help="such as fedlmd/2; --list names them", show_default=False)
    ] = None,
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="RUN...", help="run folders, or folders of them", show_default=False)
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="FILE", help="a .pdf, .svg, .png, or .csv of the numbers "
                                 "(default: FIGURE.pdf)", show_default=False)
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="list the figures and the runs that each wants")] = False,
) -> None:  # fmt: skip
    """Draw a figure of the papers, in their layout, from runs on disk."""
    from fedskew.cli.terminal import stdout
    from fedskew.errors import UserError
    from fedskew.report.contenders import settings
    from fedskew.report.figures.catalogue import find
    from fedskew.report.recorded import gather
    from fedskew.report.writing import write_text

    if listing or name is None:
        _list()
        return
    entry = find(name)
    if not runs:
        raise UserError(f"figure {name} needs runs: {entry.wants}; expected run folders after its name")
    target = Path(out or f"{name.replace('/', '-')}.pdf")
    figure = entry.draw(settings(gather(runs).runs))
    if target.suffix.lower() == ".csv":
        write_text(target, "\n".join(chart.table().csv() for chart in figure.charts))
    else:
        from fedskew.report.charts.matplotlib_view import save_figure

        save_figure(figure, target)
    stdout().print(f"{figure.caption}: {target}", markup=False, soft_wrap=True)


def _list() -> None:
    from rich.table import Table
    from rich.text import Text

    from fedskew.cli.terminal import stdout
    from fedskew.report.figures.catalogue import FIGURES

    table = Table(title="figures of the papers", title_justify="left")
    for heading in ("figure", "shows", "runs that it wants"):
        table.add_column(heading, overflow="fold")
    for entry in FIGURES.values():
        table.add_row(Text(entry.name, style="bold"), Text(entry.shows), Text(entry.wants))
    stdout().print(table)
