"""The diagnosis as a page, in the frame of the report."""

from __future__ import annotations

from fedskew.lab.diagnosis.diagnosis import Diagnosis
from fedskew.report.charts.chart import Bars, BarSeries, Figure
from fedskew.report.document import Chapter, Document
from fedskew.report.sections.federation import class_groups, partition_map
from fedskew.report.sections.section import Section

START = (
    "For your own data. fedskew diagnose COUNTS --save start.yaml writes it to a file; without --data, with a dataset "
    "of as many classes as a stand-in."
)


def diagnosis_document(found: Diagnosis, title: str, config: str) -> Document:
    counts = found.counts
    chart = partition_map("map", "samples", counts.counts, counts.classes, counts.clients)
    groups = class_groups(counts.counts)
    kinds = [BarSeries(name, [int(v) for v in groups[name]], style=i)
             for i, name in enumerate(("majority", "minority", "vacant"))]  # fmt: skip
    bars = Bars("kinds", "classes by kind", "client", "classes", counts.clients, kinds, stacked=True)
    sections = [
        Section("map", "The federation",
                figures=[Figure("map", "Samples by client and class", [chart], wide=True),
                         Figure("kinds", "Classes of each client that are majority, minority, vacant", [bars])]),
        Section("measures", "Measures of skew", tables=[found.measures(), found.clients()]),
        Section("settings", "Near settings", tables=[found.settings()]),
        Section("methods", "What helped there", tables=[found.methods(), found.evidence()]),
        Section("start", "A configuration to start from", [START], listing=config),
    ]  # fmt: skip
    return Document(title, [Chapter(title, list(found.words()), [], sections)], None, [])
