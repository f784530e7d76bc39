"""The report of runs as a file: what `fedskew report` does, for Python."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedskew.errors import UserError
from fedskew.experiment.result import Result
from fedskew.experiment.storage.atomic import replace_file, reporting_os_errors
from fedskew.report.charts.matplotlib_view import checked_formats, save_figure
from fedskew.report.document import Document, document
from fedskew.report.page.render import page
from fedskew.results import LoadedRuns, load_runs

Runs = str | Path | Result
"""A run's folder, a folder of runs, or what `fedskew.run` gave back."""


@dataclass(frozen=True)
class Report:
    """A page that was written, and what it says first."""

    path: Path
    answer: tuple[str, ...]
    """Which method is best here, by how much, whether that is sure; what is missing from the runs."""
    problems: tuple[str, ...]
    """A line on each run that could not be read."""
    figures: tuple[Path, ...]


def write_report(
    runs: Runs | Iterable[Runs],
    path: str | Path = "report.html",
    *,
    features: bool = True,
    figures: str | Path | None = None,
    formats: str = "pdf",
) -> Report:
    """Make one self-contained HTML page of runs.

    `features` takes some seconds a method and needs the data. With `figures`, every figure of the page is also saved
    in that folder, as `formats` says: `png`, `svg`, `pdf`, or several: `svg,pdf`.
    """
    target, kinds = page_path(path), checked_formats(formats)
    return report_of(load_runs(_folders(runs)), target, features, None if figures is None else Path(figures), kinds)


def report_of(loaded: LoadedRuns, target: Path, features: bool, figures: Path | None, formats: Sequence[str]) -> Report:
    """The same of runs that have been read."""
    content = document(loaded, features)
    write_text(target, page(content))
    saved = []
    if figures is not None:
        for figure in content.figures:
            for kind in formats:
                saved.append(figures / f"{figure.key}.{kind}")
                save_figure(figure, saved[-1])
    return Report(target, tuple(_answer(content)), tuple(content.problems), tuple(saved))


def _folders(runs: Runs | Iterable[Runs]) -> list[str | Path]:
    several = [runs] if isinstance(runs, str | Path | Result) else list(runs)
    if not several:
        raise UserError("no runs; expected run folders, or folders of them")
    folders: list[str | Path] = []
    for run in several:
        place = run.folder if isinstance(run, Result) else run
        if place is None:
            raise UserError("a result without a folder cannot be reported; give fedskew.run a folder: out='runs/NAME'")
        folders.append(place)
    return folders


def _answer(content: Document) -> Iterator[str]:
    for chapter in content.chapters:
        if len(content.chapters) > 1:
            yield f"{chapter.title}:"
        yield from chapter.verdict
    if content.summary is not None and not content.chapters:
        yield from content.summary.words
    for section in content.sections:
        if section.key.endswith("circumstances"):
            yield from section.missing


def page_path(out: str | Path) -> Path:
    """Refuse, before anything is read, what would not open in a browser."""
    target = Path(out)
    if target.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"cannot write a page to {str(out)!r}; expected a file that ends in .html")
    return target


def write_text(target: Path, text: str) -> None:
    """Whole or not at all."""
    content = text.encode()
    with reporting_os_errors("write", target):
        target.parent.mkdir(parents=True, exist_ok=True)
    replace_file(target, lambda draft: _put(draft, content))


def _put(path: Path, content: bytes) -> None:
    path.write_bytes(content)
