"""`fedskew report`: runs as a page to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedskew.cli.run import examples

EXAMPLES = (
    "fedskew report runs",
    "fedskew report runs/digits-* -o comparison.html --figures figures --format pdf",
)


def add_to(app: typer.Typer) -> None:
    app.command("report", epilog=examples(EXAMPLES))(_command)


def _command(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="run folders, or folders of them", show_default=False)
    ],
    out: Annotated[str, typer.Option("--out", "-o", metavar="FILE", help="the page")] = "report.html",
    figures: Annotated[
        str | None,
        typer.Option("--figures", metavar="FOLDER", help="also save every figure there, for papers",
                     show_default=False),
    ] = None,
    format: Annotated[
        str, typer.Option("--format", metavar="KIND", help="of those figures: png, svg, pdf, or several: svg,pdf")
    ] = "pdf",
    features: Annotated[
        bool, typer.Option("--features/--no-features", help="draw the models' features, which takes some seconds a "
                           "method and needs the data")
    ] = True,
) -> None:  # fmt: skip
    """Make one self-contained HTML page of runs: what came out, what it rests on, and the answer in words."""
    from fedskew.cli.terminal import notice, stdout
    from fedskew.report.charts.matplotlib_view import checked_formats
    from fedskew.report.recorded import gather
    from fedskew.report.writing import page_path, report_of

    target, kinds = page_path(out), checked_formats(format)
    gathered = gather(runs)
    count = len(gathered.runs)
    notice(f"reading {count} run{'s' if count > 1 else ''}" + (", drawing features" if features else ""))
    report = report_of(gathered, target, features, Path(figures) if figures else None, kinds)
    console = stdout()
    for line in report.answer:
        console.print(line, markup=False, soft_wrap=True)
    for line in report.problems:
        notice(line)
    saved = f"; {len(report.figures)} figures in {figures}" if figures else ""
    size = target.stat().st_size / 1e6
    console.print(f"report in {target} ({size:.1f} MB){saved}", markup=False, soft_wrap=True)
