"""`fedskew report`: runs as a page to look at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedskew.cli.run import examples

if TYPE_CHECKING:
    from fedskew.report.charts.chart import Figure
    from fedskew.report.document import Document

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
    from fedskew.report.document import document
    from fedskew.report.page.render import page
    from fedskew.report.recorded import gather

    target, kinds = page_path(out), checked_formats(format)
    gathered = gather(runs)
    notice(f"reading {len(gathered.runs)} runs" + (", drawing features" if features else ""))
    content = document(gathered, features)
    size = write_text(target, page(content))
    if figures:
        _save(content.figures, Path(figures), kinds)
    console = stdout()
    for line in _told(content):
        console.print(line, markup=False, soft_wrap=True)
    for line in content.problems:
        notice(line)
    saved = f"; {len(content.figures) * len(kinds)} figures in {figures}" if figures else ""
    console.print(f"report in {target} ({size / 1e6:.1f} MB){saved}", markup=False, soft_wrap=True)


def page_path(out: str) -> Path:
    """Refuse, before anything is read, what would not open in a browser."""
    from fedskew.errors import UserError

    target = Path(out)
    if target.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"cannot write a page to {out!r}; expected a file that ends in .html")
    return target


def write_text(target: Path, text: str) -> int:
    """Whole or not at all; its bytes."""
    from fedskew.experiment.durable import replace_file, reporting_os_errors

    content = text.encode()
    with reporting_os_errors("write", target):
        target.parent.mkdir(parents=True, exist_ok=True)
    replace_file(target, lambda draft: _put(draft, content))
    return len(content)


def _put(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _save(figures: Sequence[Figure], folder: Path, kinds: Sequence[str]) -> None:
    from fedskew.report.charts.matplotlib_view import save_figure

    for figure in figures:
        for kind in kinds:
            save_figure(figure, folder / f"{figure.key}.{kind}")


def _told(content: Document) -> Iterator[str]:
    """The answers, and what is wrong with the runs."""
    for chapter in content.chapters:
        if len(content.chapters) > 1:
            yield f"{chapter.title}:"
        yield from chapter.verdict
    if content.summary is not None and not content.chapters:
        yield from content.summary.words
    for section in content.sections:
        if section.key.endswith("circumstances"):
            yield from section.missing
