"""Write a paper's table for the results page: the printed number and the rerun of each cell, and missing reruns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedskew.lab.papers.cells import Cell, CellChoice, make_job, table_cells, why_not_runnable
from fedskew.lab.papers.measures import measure
from fedskew.lab.papers.protocol import Protocol
from fedskew.lab.papers.rerun import CellRerun, collect_rerun, columns, compare_order, row
from fedskew.lab.sweep.records import Record, Records


def table_section(
    protocol: Protocol,
    table: str,
    variant: str | None,
    records: Records,
    seeds: Sequence[int],
    findings: Mapping[str, str],
    shown: set[str],
) -> list[str]:
    """Write the section of a table. It is empty if no cell was rerun, or if the variant changes no rerun cell.

    It is also empty if no column compares methods and other sections have already shown the runs. `shown` has the
    identities of all runs that were shown so far. This section adds its own.
    """
    choice = CellChoice(variant=variant)
    datasets = {record.config.data for record in records}
    cells = [cell for cell in table_cells(protocol.name, table) if cell.dataset in datasets]
    found = columns([collect_rerun(cell, seeds, records, choice) for cell in cells])
    rerun_columns = {key: column for key, column in found.items() if any(one.was_run for one in column)}
    new = [column for column in rerun_columns.values() if any(_belongs_here(one, choice) for one in column)]
    runs = {record.identity for column in new for one in column for record in one.records}
    if not any(_compares(column) for column in new) and runs <= shown:
        return []
    shown |= runs
    name = f"{protocol.name}/{table}" + ("" if variant is None else f" {variant}")
    lines = [f"## {name}: {protocol.tables[table].title}\n", f"{protocol.citation}; {protocol.reports}.\n"]
    if variant is not None:
        lines.append(f"Variant: {' '.join(protocol.variants[variant]['why'].split())}.\n")
    if name in findings:
        lines.append(findings[name] + "\n")
    lines.append(_describe_runs(one for column in rerun_columns.values() for one in column))
    lines += [_wide_table(protocol, list(group)) for group in _by_metric(rerun_columns.values())]
    lines += _orders(rerun_columns.values())
    if variant is not None:  # only some cells of a variant are run, so the others are not missing
        return lines
    missing = [cell for column in found.values() for cell in _missing(column)]
    return lines + _list_missing(missing)


def _compares(column: Sequence[CellRerun]) -> bool:
    """Whether at least two methods, or the whole column, were rerun."""
    number = sum(one.was_run for one in column)
    return number > 1 or number == len(column)


def _belongs_here(one: CellRerun, choice: CellChoice) -> bool:
    """Whether the cell was rerun. If there is a variant, it must also change the cell's run."""
    if not one.was_run or choice.variant is None:
        return one.was_run
    return make_job(one.cell, 0, choice).identity != make_job(one.cell, 0, CellChoice()).identity


def _by_metric(found: Iterable[Sequence[CellRerun]]) -> list[list[Sequence[CellRerun]]]:
    groups: dict[str, list[Sequence[CellRerun]]] = {}
    for column in found:
        groups.setdefault(column[0].cell.metric, []).append(column)
    return list(groups.values())


def _wide_table(protocol: Protocol, group: list[Sequence[CellRerun]]) -> str:
    """Write the table of one metric: methods × settings, with paper → rerun (difference) in each cell."""
    metric = group[0][0].cell.metric
    methods = list(dict.fromkeys(one.cell.method for column in group for one in column if one.was_run))
    settings = [" ".join(filter(None, column[0].cell.setting)).replace(";", " ") for column in group]
    compared = any(one.cell.printed is not None for column in group for one in column)
    unit = " (%)" if measure(metric).percent else ""
    heading = f"**{metric}**{unit}{', paper → rerun' if compared else ''}:\n"
    lines = [heading, markdown_row(("method", *settings)), markdown_row(["---"] * (1 + len(settings)))]
    for method in methods:
        cells = [next((_cell(one) for one in column if one.cell.method == method), "") for column in group]
        lines.append(markdown_row((_method(protocol, method), *cells)))
    return "\n".join(lines) + "\n"


def _method(protocol: Protocol, method: str) -> str:
    fedskew_name = protocol.methods[method]["method"]
    return method if fedskew_name == method.lower() else f"{method} (`{fedskew_name}`)"


def _cell(one: CellRerun) -> str:
    _, paper, rerun, difference, _ = row(one)
    if rerun == "–":
        return "" if paper == "–" else f"{paper} →"
    return f"{'' if paper == '–' else paper + ' → '}{rerun}{f' ({difference})' if difference else ''}"


def markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _describe_runs(reruns: Iterable[CellRerun]) -> str:
    """Describe seeds, rounds, machine and number format in a sentence."""
    used = {id(record): record for one in reruns for record in one.records}.values()
    seeds = Counter(record.config.seed for record in used)
    rounds = sorted({record.rounds for record in used})
    machines = ", ".join(sorted({f"{device(r)}, {r.config.precision}" for r in used}))
    span = f"{rounds[0]}" if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
    how_many_seeds = f"up to {len(seeds)} seeds" if len(seeds) > 1 else "one seed"
    dates = sorted({str(r.content["date"])[:10] for r in used})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    runs = "One run" if len(used) == 1 else f"{len(used)} runs"
    return f"{runs} of {span} round{'s' if span != '1' else ''}, {how_many_seeds}, on {machines}; {when}.\n"


def device(record: Record) -> str:
    machine: Mapping[str, Any] = record.content["machine"]
    return str(machine.get("gpu") or f"{machine['cpu']} ({machine['cores']} cores)")


def _orders(found: Iterable[Sequence[CellRerun]]) -> list[str]:
    """Say how far the rerun confirms the paper's order of methods."""
    lines = []
    for column in found:
        order = compare_order(column)
        if order is not None:
            cell = column[0].cell
            where = " ".join(filter(None, cell.setting)).replace(";", " ")
            lines.append(f"- {where}, {cell.metric}: {order}.")
    return ["Order of the methods:\n", "\n".join(lines) + "\n"] if lines else []


def _missing(column: Sequence[CellRerun]) -> list[Cell]:
    return [one.cell for one in column if not one.was_run]


def _list_missing(cells: Sequence[Cell]) -> list[str]:
    """List the cells that were not rerun, grouped by missing methods."""
    if not cells:
        return []
    by_setting: dict[tuple[str, str, str], list[str]] = {}
    for cell in cells:
        why = " (not in this version)" if why_not_runnable(cell) else ""
        methods = by_setting.setdefault(cell.setting, [])
        if cell.method + why not in methods:
            methods.append(cell.method + why)
    by_methods: dict[str, dict[str, list[str]]] = {}
    for (dataset, split, condition), methods in by_setting.items():
        listed_conditions = by_methods.setdefault(", ".join(methods), {}).setdefault(f"{dataset} {split}", [])
        listed_conditions.append(condition.replace(";", " "))
    listed = "; ".join(f"{_where(splits)}: {methods}" for methods, splits in by_methods.items())
    return [f"Not rerun: {listed}.\n"]


def _where(splits: Mapping[str, Sequence[str]]) -> str:
    return ", ".join(f"{split} {' / '.join(conditions)}".strip() for split, conditions in splits.items())
