"""The content of a report: chapters on races and settings, and an overview if there are several settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedskew.experiment.config import Config
from fedskew.report.charts.chart import Figure
from fedskew.report.overview import overview
from fedskew.report.sections.circumstances import circumstances
from fedskew.report.sections.classes import classes
from fedskew.report.sections.curves import curves
from fedskew.report.sections.experts import experts
from fedskew.report.sections.features import features
from fedskew.report.sections.federation import federation
from fedskew.report.sections.local import local
from fedskew.report.sections.predictions import confusion, predictions
from fedskew.report.sections.race import race_section
from fedskew.report.sections.results import results
from fedskew.report.sections.scores import scores
from fedskew.report.sections.section import Section
from fedskew.report.sections.sites import sites
from fedskew.report.sections.timing import timing
from fedskew.report.verdict import verdict
from fedskew.results import Comparison, LoadedRuns, MethodRuns, comparisons
from fedskew.results.naming import setting_name
from fedskew.results.race import RaceRecord
from fedskew.results.ranking import DEFAULT_METRIC

MAX_SETTINGS = 4
"""With more settings than this, the report has an overview instead of chapters on single settings."""


@dataclass(frozen=True)
class Chapter:
    """The verdict and the sections of one setting, or of one race of methods."""

    title: str
    verdict: Sequence[str]
    methods: Sequence[MethodRuns]
    sections: Sequence[Section]


@dataclass(frozen=True)
class Document:
    """The content of a report."""

    title: str
    chapters: Sequence[Chapter]
    summary: Section | None
    """The overview, if there are several settings."""
    problems: Sequence[str]
    """Lines about problems, such as a run folder that could not be read."""

    @property
    def sections(self) -> list[Section]:
        summary = [self.summary] if self.summary else []
        return [*summary, *(section for chapter in self.chapters for section in chapter.sections)]

    @property
    def figures(self) -> list[Figure]:
        return [figure for section in self.sections for figure in section.figures]


def document(loaded: LoadedRuns, with_features: bool = True, rank_by: str = DEFAULT_METRIC) -> Document:
    """Build the report of these runs and races. The section on features takes seconds per method and needs the data."""
    found = comparisons(loaded.runs, rank_by)
    has_several = len(found) > 1
    detailed = found if len(found) <= MAX_SETTINGS else []
    styles = {method.label: method.index for comparison in found for method in comparison.methods}
    chapters = [_race_chapter(race, i, styles) for i, race in enumerate(loaded.races)]
    chapters += [_chapter(one, i if has_several else None, with_features) for i, one in enumerate(detailed)]
    summary = overview(found) if has_several else None
    if summary is not None and not detailed:
        note = f"{len(found)} settings are too many to show in detail; for details, report on the runs of one setting."
        summary = replace(summary, paragraphs=[*summary.paragraphs, note])
    if has_several:
        title = f"{sum(len(comparison.runs) for comparison in found)} runs in {len(found)} settings"
    else:
        title = setting_name(found[0].config) if found else chapters[0].title
    return Document(title, chapters, summary, loaded.unreadable)


def _race_chapter(race: RaceRecord, number: int, styles: dict[str, int]) -> Chapter:
    answer = race.answer or ("The race is not finished.",)
    title = f"Race of methods on {setting_name(Config.from_mapping(race.config))}"
    return Chapter(title, answer, (), [_with_unique_keys(race_section(race, styles), f"r{number}")])


def _chapter(comparison: Comparison, number: int | None, with_features: bool) -> Chapter:
    """Build the chapter of a setting. `number` makes the keys unique. It is None if there is only one setting."""
    sections = [
        results(comparison),
        curves(comparison),
        classes(comparison),
        federation(comparison),
        local(comparison),
        *([by_site] if (by_site := sites(comparison)) else []),
        scores(comparison),
        confusion(comparison),
        predictions(comparison),
        *([features(comparison)] if with_features else []),
        *([found] if (found := experts(comparison)) else []),
        timing(comparison),
        circumstances(comparison),
    ]
    if number is not None:
        sections = [_with_unique_keys(section, f"s{number}") for section in sections]
    return Chapter(comparison.label, verdict(comparison), comparison.methods, sections)


def _with_unique_keys(section: Section, prefix: str) -> Section:
    """Prefix the keys, because they must be unique on a page with several chapters."""
    figures = [
        replace(
            figure,
            key=f"{prefix}-{figure.key}",
            charts=[replace(chart, key=f"{prefix}-{chart.key}") for chart in figure.charts],
        )
        for figure in section.figures
    ]
    tables = [replace(table, key=f"{prefix}-{table.key}") for table in section.tables]
    return replace(section, key=f"{prefix}-{section.key}", figures=figures, tables=tables)
