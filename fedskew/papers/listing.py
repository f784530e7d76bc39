"""What `reproduce --list` shows: tables and cells with what they would cost here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fedskew.papers.cells import Cell, Choice, job, missing_method, table_cells
from fedskew.papers.cost import seconds, work
from fedskew.papers.protocol import protocol
from fedskew.sweep.job import Job


@dataclass(frozen=True)
class Line:
    """One line of a list."""

    what: str
    about: str
    runs: int
    steps: float
    seconds: float

    def __str__(self) -> str:
        cost = f"{self.runs} runs of one seed, {self.steps / 1e6:.2f} M local steps, about {duration(self.seconds)}"
        return f"{self.what}: {self.about}" + (f" [{cost}]" if self.runs else "")

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def listed_tables(names: Iterable[tuple[str, str]], choice: Choice, device: str) -> list[Line]:
    """A line for each table, and what else a paper's protocol says."""
    lines, before = [], ""
    for paper, table in names:
        rules = protocol(paper)
        if paper != before:
            before = paper
            lines.append(Line(paper, rules.citation, 0, 0.0, 0.0))
            lines += [
                Line(f"  --variant {name}", " ".join(v["why"].split()), 0, 0.0, 0.0)
                for name, v in rules.variants.items()
            ]
        cells = table_cells(paper, table)
        jobs = _jobs(cells, choice)
        lines.append(_line(f"  {paper}/{table}", f"{rules.tables[table].title}, {len(cells)} cells", jobs, device))
    return lines


def listed_cells(cells: Sequence[Cell], choice: Choice, device: str) -> list[Line]:
    """A line for each run, with the cells that it fills."""
    lines = []
    for (place, method), found in _by_run(cells).items():
        printed = [f"{c.metric} {c.printed.mean:g}" for c in found if c.printed and c.printed.mean is not None]
        about = ", ".join(printed) or "no published number"
        if why := missing_method(found[0]):
            lines.append(Line(f"{place} {method}", f"{about}; {why.partition(';')[0]}", 0, 0.0, 0.0))
        else:
            lines.append(_line(f"{place} {method}", about, _jobs(found, choice), device))
    return lines


def _by_run(cells: Sequence[Cell]) -> dict[tuple[str, str], list[Cell]]:
    found: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        found.setdefault((" ".join(filter(None, cell.place)), cell.method), []).append(cell)
    return found


def _jobs(cells: Sequence[Cell], choice: Choice) -> list[Job]:
    jobs = (job(cell, 0, choice) for cell in cells if not missing_method(cell))
    return list({one.identity: one for one in jobs}.values())


def _line(what: str, about: str, jobs: Sequence[Job], device: str) -> Line:
    steps = sum(work(one).steps for one in jobs)
    return Line(what, about, len(jobs), steps, sum(seconds(one, device) for one in jobs))


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
