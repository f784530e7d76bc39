"""The content of a report: for each setting the verdict and its sections, and an overview of many settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
from fedskew.report.sections.results import results
from fedskew.report.sections.section import Section
from fedskew.report.sections.timing import timing
from fedskew.report.verdict import verdict
from fedskew.results import Comparison, LoadedRuns, MethodRuns, comparisons
from fedskew.results.naming import setting_name
from fedskew.results.ranking import DEFAULT_METRIC

MOST_SETTINGS = 4
"""At most this many settings are shown in detail; more are a sweep, which has an overview only."""


@dataclass(frozen=True)
class Chapter:
    """One setting: its verdict and its sections."""

    title: str
    verdict: Sequence[str]
    methods: Sequence[MethodRuns]
    sections: Sequence[Section]


@dataclass(frozen=True)
class Document:
    """The content of the page."""

    title: str
    chapters: Sequence[Chapter]
    summary: Section | None
    """The overview, if there are several settings."""
    problems: Sequence[str]

    @property
    def sections(self) -> list[Section]:
        summary = [self.summary] if self.summary else []
        return [*summary, *(section for chapter in self.chapters for section in chapter.sections)]

    @property
    def figures(self) -> list[Figure]:
        return [figure for section in self.sections for figure in section.figures]


def document(loaded: LoadedRuns, with_features: bool = True, rank_by: str = DEFAULT_METRIC) -> Document:
    """The report of these runs. Features take some seconds per method and need the data."""
    found = comparisons(loaded.runs, rank_by)
    many = len(found) > 1
    shown = found if len(found) <= MOST_SETTINGS else []
    chapters = [_chapter(setting, i if many else None, with_features) for i, setting in enumerate(shown)]
    summary = overview(found) if many else None
    if summary is not None and not shown:
        note = f"{len(found)} settings are too many to show in detail; for details, report on the runs of one setting."
        summary = replace(summary, words=[*summary.words, note])
    title = (
        setting_name(found[0].config)
        if not many
        else f"{sum(len(s.runs) for s in found)} runs in {len(found)} settings"
    )
    return Document(title, chapters, summary, loaded.unreadable)


def _chapter(setting: Comparison, number: int | None, with_features: bool) -> Chapter:
    sections = [
        results(setting),
        curves(setting),
        classes(setting),
        federation(setting),
        local(setting),
        confusion(setting),
        predictions(setting),
        *([features(setting)] if with_features else []),
        *([found] if (found := experts(setting)) else []),
        timing(setting),
        circumstances(setting),
    ]
    if number is not None:
        sections = [_numbered(section, number) for section in sections]
    return Chapter(setting.label, verdict(setting), setting.methods, sections)


def _numbered(section: Section, number: int) -> Section:
    """Make keys unique if several settings are on one page."""
    figures = [
        replace(
            figure,
            key=f"s{number}-{figure.key}",
            charts=[replace(chart, key=f"s{number}-{chart.key}") for chart in figure.charts],
        )
        for figure in section.figures
    ]
    tables = [replace(table, key=f"s{number}-{table.key}") for table in section.tables]
    return replace(section, key=f"s{number}-{section.key}", figures=figures, tables=tables)
