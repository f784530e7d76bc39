"""What `reproduce --list` shows: tables, cells or a plan's entries, with what they would cost here.

Tables and cells are counted for one seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fedskew.lab.papers.cells import Cell, Choice, job, missing_method
from fedskew.lab.papers.cost import seconds, trained, work
from fedskew.lab.papers.protocol import Protocol, protocol
from fedskew.lab.papers.selection import Selection
from fedskew.lab.sweep.job import Job, each_once


@dataclass(frozen=True)
class Line:
    """One line of a list."""

    what: str
    about: str
    runs: int
    steps: float
    seconds: float

    def __str__(self) -> str:
        runs = "one run" if self.runs == 1 else f"{self.runs} runs"
        cost = f"{runs}, {self.steps / 1e6:.2f} M local steps, about {duration(self.seconds)}"
        return f"{self.what}: {self.about}" + (f" [{cost}]" if self.runs else "")

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def listed_tables(cells: Sequence[Cell], choice: Choice, device: str) -> list[Line]:
    """A line for each table with what is wanted of it, and what else a paper's protocol says."""
    lines, before = [], ""
    for (paper, table), found in _grouped(cells, lambda cell: (cell.paper, cell.table)).items():
        rules = protocol(paper)
        if paper != before:
            before = paper
            lines += _about(rules)
        about = f"{rules.tables[table].title}, {len(found)} cells"
        lines.append(_line(f"  {paper}/{table}", about, _jobs(found, choice), device))
    return lines


def _about(rules: Protocol) -> list[Line]:
    said = [(rules.name, rules.citation)]
    said += [(f"  --variant {name}", " ".join(variant["why"].split())) for name, variant in rules.variants.items()]
    said += [("  known flaw", flaw) for flaw in rules.misprints]
    return [Line(what, about, 0, 0.0, 0.0) for what, about in said]


def listed_plan(plan: Sequence[Selection], device: str) -> list[Line]:
    """A line for each of a plan's entries, all their seeds counted."""
    return [_line(str(entry), f"{len(entry.cells())} cells", entry.jobs(), device) for entry in plan]


def listed_cells(cells: Sequence[Cell], choice: Choice, device: str) -> list[Line]:
    """A line for each run, with the cells that it fills."""
    lines = []
    for (place, method), found in _grouped(cells, lambda c: (" ".join(filter(None, c.place)), c.method)).items():
        printed = [f"{c.metric} {c.printed.mean:g}" for c in found if c.printed and c.printed.mean is not None]
        about = ", ".join(printed) or "no published number"
        if why := missing_method(found[0]):
            lines.append(Line(f"{place} {method}", f"{about}; {why.partition(';')[0]}", 0, 0.0, 0.0))
        else:
            lines.append(_line(f"{place} {method}", about, _jobs(found, choice), device))
    return lines


def _grouped(cells: Sequence[Cell], key: Callable[[Cell], tuple[str, str]]) -> dict[tuple[str, str], list[Cell]]:
    found: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        found.setdefault(key(cell), []).append(cell)
    return found


def _jobs(cells: Sequence[Cell], choice: Choice) -> list[Job]:
    jobs = (job(cell, 0, choice) for cell in cells if not missing_method(cell))
    return each_once(jobs)


def _line(what: str, about: str, jobs: Sequence[Job], device: str) -> Line:
    runs = trained(jobs)
    return Line(what, about, len(jobs), sum(work(run).steps for run in runs), sum(seconds(run, device) for run in runs))


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
