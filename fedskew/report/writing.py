"""Write the report of runs to a file. This is `fedskew report` for Python."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from fedskew.errors import UserError
from fedskew.experiment.result import Result
from fedskew.experiment.storage.files import reporting_os_errors, write_file
from fedskew.report.charts.matplotlib_view import parse_formats, save_figure
from fedskew.report.document import Document, document
from fedskew.report.page.render import page
from fedskew.results import LoadedRuns, load_runs_and_races
from fedskew.results.ranking import DEFAULT_METRIC

Runs = str | Path | Result
"""A run folder, a folder of runs, or a result with a folder."""


@dataclass(frozen=True)
class Report:
    """A report that was written, and its conclusion."""

    path: Path
    answer: tuple[str, ...]
    """Which method is best, by how much, whether that is significant, and what is missing from the runs."""
    problems: tuple[str, ...]
    """One line about each run that could not be read."""
    figures: tuple[Path, ...]


def write_report(
    runs: Runs | Iterable[Runs],
    path: str | Path = "report.html",
    *,
    features: bool = True,
    figures: str | Path | None = None,
    formats: str = "pdf",
    rank_by: str = DEFAULT_METRIC,
) -> Report:
    """Write one self-contained HTML page about runs to `path`. `runs` are results, or folders of runs.

    `features` adds charts of the models' features. They take a few seconds per method and need the data. With
    `figures`, every figure of the page is also saved in that folder, in the given `formats`: `png`, `svg`, `pdf`, or
    several as in `svg,pdf`. `rank_by` is the metric that decides which method is best: accuracy, macro-f1, auroc or
    another one (`results.ranking.METRICS`).
    """
    target, kinds = page_path(path), parse_formats(formats)
    figures_folder = None if figures is None else Path(figures)
    return write_loaded(load_runs_and_races(_folders(runs)), target, features, figures_folder, kinds, rank_by)


def write_loaded(
    loaded: LoadedRuns,
    target: Path,
    features: bool,
    figures: Path | None,
    formats: Sequence[str],
    rank_by: str = DEFAULT_METRIC,
) -> Report:
    """Write the report of runs that have been loaded."""
    content = document(loaded, features, rank_by)
    write_text(target, page(content))
    saved = []
    if figures is not None:
        for figure in content.figures:
            for kind in formats:
                saved.append(figures / f"{figure.key}.{kind}")
                save_figure(figure, saved[-1])
    return Report(target, tuple(_answer(content)), tuple(content.problems), tuple(saved))


def _folders(runs: Runs | Iterable[Runs]) -> list[str | Path]:
    several: list[object] = list(runs) if isinstance(runs, Iterable) and not isinstance(runs, str) else [runs]
    if not several:
        raise UserError("no runs given; expected run folders, folders of run folders, or results")
    folders: list[str | Path] = []
    for run in several:
        if not isinstance(run, str | PathLike | Result):
            raise UserError(
                f"a report on an object of type {type(run).__name__}; expected run folders, folders of run folders, or "
                "results, such as the `runs` of a comparison"
            )
        folder = run.folder if isinstance(run, Result) else run if isinstance(run, str) else Path(run)
        if folder is None:
            raise UserError("a report needs runs saved in a folder; pass out='runs/NAME' to fedskew.run")
        folders.append(folder)
    return folders


def _answer(content: Document) -> Iterator[str]:
    """Yield the sentences of `Report.answer`."""
    for chapter in content.chapters:
        if len(content.chapters) > 1:
            yield f"{chapter.title}:"
        yield from chapter.verdict
    if content.summary is not None and not content.chapters:
        yield from content.summary.paragraphs
    for section in content.sections:
        if section.key.endswith("circumstances"):
            yield from section.missing


def page_path(out: str | Path) -> Path:
    """Return the path of the page. Refuse a file name that ends in neither .html nor .htm, before any run is read."""
    target = Path(out)
    if target.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"cannot write a page to {str(out)!r}; expected a file that ends in .html")
    return target


def write_text(target: Path, text: str) -> None:
    """Write a file atomically, and make its folder if necessary."""
    with reporting_os_errors("write", target):
        target.parent.mkdir(parents=True, exist_ok=True)
    write_file(target, text)
