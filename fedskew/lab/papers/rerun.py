"""Compare a rerun with the paper: means over the seeds, differences, and the order of the methods."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from rich.table import Table

from fedskew.lab.papers.cells import BEFORE_UPDATE, Cell, CellChoice, make_job, paper_rounds, why_not_runnable
from fedskew.lab.papers.measures import NEVER, Measure, MetricInputs, measure
from fedskew.lab.papers.protocol import read_protocol
from fedskew.lab.sweep.records import Record, Records
from fedskew.metrics.summary import MeanStd, population_mean_std

BASELINE = "FedAvg"


@dataclass(frozen=True)
class CellRerun:
    """A cell and the results of its runs."""

    cell: Cell
    values: tuple[float, ...]
    """One value per seed. Seeds without a value, and runs that never reached the target, are left out."""
    records: tuple[Record, ...]
    """Records of all runs used, including FedAvg's if the metric compares with it."""
    paper_rounds: int
    """The number of rounds in the paper."""
    never: int = 0
    """The number of runs that never reached the target, such as FedAvg's accuracy."""

    @property
    def was_run(self) -> bool:
        """Whether any run has a result for the cell."""
        return bool(self.values) or self.never > 0

    @property
    def mean(self) -> MeanStd | None:
        return population_mean_std(self.values) if self.values else None

    @property
    def difference(self) -> float | None:
        """Rerun minus paper. None if one of them is missing, or if they are not comparable.

        A rerun is not comparable if a run was stopped or never reached the target. If the metric compares with FedAvg,
        each run must also have the paper's number of rounds.
        """
        printed = self.cell.printed
        is_too_short = measure(self.cell.metric).needs_baseline and self.shortened is not None
        if self.mean is None or printed is None or printed.mean is None or self.stopped or self.never or is_too_short:
            return None
        return self.mean.mean - printed.mean

    @property
    def shortened(self) -> int | None:
        """The fewest rounds of any run, if fewer than the paper's."""
        fewest = min((_rounds_that_count(record) for record in self.records), default=self.paper_rounds)
        return fewest if fewest < self.paper_rounds else None

    @property
    def stopped(self) -> bool:
        """Whether a run is unfinished."""
        return not all(record.finished for record in self.records)


def _rounds_that_count(record: Record) -> int:
    """Return the rounds of the run. If the run is one update of a trained model, the rounds of that model count."""
    return record.start_rounds or record.rounds


@dataclass(frozen=True)
class Order:
    """How many pairs of methods have the same order in the paper and in the rerun."""

    agreeing: int
    pairs: int
    best_printed: str
    best_rerun: str
    is_tie: bool = False
    """Whether the best of the paper and the best of the rerun are equally good in the rerun."""

    @property
    def holds(self) -> bool:
        return self.agreeing == self.pairs

    def __str__(self) -> str:
        if self.best_printed == self.best_rerun:
            best = "the same best"
        elif self.is_tie:
            best = f"{self.best_rerun} ties with the paper's best, {self.best_printed}"
        else:
            best = f"best is {self.best_rerun}, not {self.best_printed}"
        pairs = f"{self.pairs} pair{'' if self.pairs == 1 else 's'}"
        return f"{self.agreeing} of {pairs} in the paper's order, {best}"


def collect_rerun(cell: Cell, seeds: Iterable[int], records: Records, choice: CellChoice) -> CellRerun:
    """Collect the results of a cell from the records."""
    protocol = read_protocol(cell.paper)
    rounds = paper_rounds(cell, protocol)
    client = int((protocol.tables[cell.table].update or {}).get("client", 0))
    if why_not_runnable(cell):
        return CellRerun(cell, (), (), rounds)
    values: list[float] = []
    used: list[Record] = []
    for seed in seeds:
        record = records.longest(make_job(cell, seed, choice))
        if record is None:
            continue
        baseline = _baseline(cell, seed, records, choice)
        value = _cell_measure(cell)(MetricInputs(record, rounds, baseline, client))
        if value is not None:
            values.append(value)
            used += [record] if baseline is None else [record, baseline]
    reached = tuple(value for value in values if value != NEVER)
    return CellRerun(cell, reached, tuple(used), rounds, len(values) - len(reached))


def _cell_measure(cell: Cell) -> Measure:
    """Return how the metric is computed. In the row `BEFORE_UPDATE`, it is measured before the update."""
    return measure(cell.metric.replace("after", "before") if cell.method == BEFORE_UPDATE else cell.metric)


def _baseline(cell: Cell, seed: int, records: Records, choice: CellChoice) -> Record | None:
    """Return FedAvg's run in the same column, if the metric compares with it."""
    if not _cell_measure(cell).needs_baseline:
        return None
    return records.longest(make_job(Cell(cell.paper, cell.table, *cell.setting, BASELINE, cell.metric), seed, choice))


def columns(reruns: Sequence[CellRerun]) -> dict[tuple[str, str, str, str], list[CellRerun]]:
    """Group reruns by column, in the order of the cells."""
    found: dict[tuple[str, str, str, str], list[CellRerun]] = {}
    for one in reruns:
        found.setdefault(one.cell.column, []).append(one)
    return found


def compare_order(column: Sequence[CellRerun]) -> Order | None:
    """Compare the order of all pairs of methods in the paper and in the rerun, or return None if there are no pairs.

    Only methods with the most common number of rounds count. Methods with a run that is unfinished, or that never
    reached the target, do not.
    """
    lengths = Counter(one.shortened for one in column if one.mean is not None and not one.stopped)
    most_common = lengths.most_common(1)[0][0] if lengths else None
    known = {
        one.cell.method: (one.cell.printed.mean, one.mean.mean)
        for one in column
        if one.cell.printed is not None and one.cell.printed.mean is not None and one.mean is not None
        if not one.stopped and not one.never and one.shortened == most_common
    }
    return compare_orders(known, measure(column[0].cell.metric).higher_is_better) if len(known) > 1 else None


def compare_orders(known: Mapping[str, tuple[float, float]], higher_is_better: bool = True) -> Order:
    """Compare the order of methods, given the printed number and the rerun of each.

    Two methods that tie in the paper agree with any order. If several methods share the paper's best number, the
    rerun's best counts as the paper's best if it is one of them.
    """
    pairs = list(combinations(known.values(), 2))
    agreeing = sum((a[0] - b[0]) * (a[1] - b[1]) > 0 or a[0] == b[0] for a, b in pairs)
    sign = 1 if higher_is_better else -1
    best_printed = max(known, key=lambda method: sign * known[method][0])
    best_rerun = max(known, key=lambda method: sign * known[method][1])
    if known[best_rerun][0] == known[best_printed][0]:
        best_printed = best_rerun
    is_tie = known[best_rerun][1] == known[best_printed][1]
    return Order(agreeing, len(pairs), best_printed, best_rerun, is_tie)


HEADINGS = ("method", "paper", "rerun", "difference", "seeds")


def title(column: Sequence[CellRerun]) -> str:
    """The title of a column."""
    cell = column[0].cell
    unit = " (%)" if measure(cell.metric).percent else ""
    where = " ".join(part for part in (cell.dataset, cell.split, cell.condition.replace(";", " ")) if part)
    return f"{cell.paper}/{cell.table}: {where}, {cell.metric}{unit}"


def row(one: CellRerun) -> tuple[str, str, str, str, str]:
    """Format a rerun as a row, with two decimals."""
    printed = one.cell.printed
    paper = "–" if printed is None else _number(printed.mean, printed.std) if printed.mean is not None else "illegible"
    if printed is not None and printed.mean is None and "failed" in printed.note.lower():
        paper = "failed"
    mean = one.mean
    spread = mean.std if mean is not None and len(one.values) > 1 else None
    rerun = ("never" if one.never else "–") if mean is None else _number(mean.mean, spread)
    if one.never and mean is not None:
        rerun += f" ({one.never} of {one.never + len(one.values)} never)"
    if one.shortened is not None:
        rerun += f" ({'stopped after ' if one.stopped else ''}{one.shortened} of {one.paper_rounds} rounds)"
    difference = "" if one.difference is None else f"{one.difference:+.2f}"
    return one.cell.method, paper, rerun, difference, str(len(one.values) + one.never)


def rich_table(column: Sequence[CellRerun]) -> Table:
    table = Table(title=title(column), title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for one in column:
        table.add_row(*row(one))
    if any(len(one.values) > 1 for one in column):
        table.caption = "rerun: mean ± population standard deviation over the seeds, as in the papers' code"
    return table


def rerun_json(one: CellRerun) -> dict[str, Any]:
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
        "rounds": {"paper": one.paper_rounds, "rerun": one.paper_rounds if one.shortened is None else one.shortened},
    }


def _number(mean: float, std: float | None) -> str:
    return f"{mean:.2f}" + ("" if std is None else f" ± {std:.2f}")
