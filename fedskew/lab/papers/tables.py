"""Paper and rerun as tables: for a terminal, as JSON, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from fedskew.lab.papers.measures import measure
from fedskew.lab.papers.rerun import Rerun

HEADINGS = ("method", "paper", "rerun", "difference", "seeds")


def title(column: Sequence[Rerun]) -> str:
    """What is compared."""
    cell = column[0].cell
    unit = " (%)" if measure(cell.metric).percent else ""
    where = " ".join(part for part in (cell.dataset, cell.split, cell.condition.replace(";", " ")) if part)
    return f"{cell.paper}/{cell.table}: {where}, {cell.metric}{unit}"


def row(one: Rerun) -> tuple[str, str, str, str, str]:
    """As text, each number with the digits that the papers print."""
    printed = one.cell.printed
    paper = "–" if printed is None else _number(printed.mean, printed.std) if printed.mean is not None else "illegible"
    if printed is not None and printed.mean is None and "ailed" in printed.note:
        paper = "failed"
    mean = one.mean
    spread = mean.std if mean is not None and len(one.values) > 1 else None
    rerun = ("never" if one.never else "–") if mean is None else _number(mean.mean, spread)
    if one.never and mean is not None:
        rerun += f" ({one.never} of {one.never + len(one.values)} never)"
    if one.shortened is not None:
        rerun += f" ({'stopped after ' if one.stopped else ''}{one.shortened} of {one.wanted} rounds)"
    difference = "" if one.difference is None else f"{one.difference:+.2f}"
    return one.cell.method, paper, rerun, difference, str(len(one.values) + one.never)


def rich_table(column: Sequence[Rerun]) -> Table:
    table = Table(title=title(column), title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for one in column:
        table.add_row(*row(one))
    return table


def json_of(one: Rerun) -> dict[str, Any]:
    printed = one.cell.printed
    return {
        "paper": one.cell.paper,
        "table": one.cell.table,
        "dataset": one.cell.dataset,
        "split": one.cell.split,
        "condition": one.cell.condition,
        "method": one.cell.method,
        "metric": one.cell.metric,
        "printed": None if printed is None else {"mean": printed.mean, "std": printed.std, "note": printed.note},
        "rerun": None if one.mean is None else one.mean._asdict(),
        "difference": one.difference,
        "values": list(one.values),
        "never": one.never,
        "rounds": {"paper": one.wanted, "rerun": one.wanted if one.shortened is None else one.shortened},
    }


def _number(mean: float, std: float | None) -> str:
    return f"{mean:.2f}" + ("" if std is None else f" ± {std:.2f}")
