"""The cells of a table: the printed number, and the runs to compare with it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from fedskew.errors import UserError, unknown
from fedskew.experiment.config import Config, with_values
from fedskew.experiment.config.values import integer
from fedskew.lab.papers.measures import MEASURES
from fedskew.lab.papers.protocol import PrintedNumber, Protocol, conditions, numbers, read_protocol
from fedskew.lab.sweep.job import Job
from fedskew.methods import make_method

BEFORE_UPDATE = "global model"
"""In tables about clients' updates, the name of the row for the model before the update."""


@dataclass(frozen=True)
class Cell:
    """One number in one table."""

    paper: str
    table: str
    dataset: str
    split: str
    """The split, such as `dirichlet:0.1`."""
    condition: str
    """What else the table varies, such as `rounds=40`. Empty for nothing."""
    method: str
    """The method's name in the paper."""
    metric: str
    printed: PrintedNumber | None = None

    @property
    def column(self) -> tuple[str, str, str, str]:
        """The column of the table. Cells in one column differ only in the method."""
        return self.dataset, self.split, self.condition, self.metric

    @property
    def setting(self) -> tuple[str, str, str]:
        """Dataset, split and condition. Cells with the same setting may differ in the method and the metric."""
        return self.dataset, self.split, self.condition

    @property
    def budget(self) -> int | None:
        """The number of rounds after which the table reports accuracy, if it states one."""
        rounds = conditions(self.condition).get("rounds")
        return None if rounds is None else int(rounds)


@dataclass(frozen=True)
class CellChoice:
    """The cells to run, and how to run them. An empty collection means all."""

    datasets: Collection[str] = ()
    splits: Collection[str] = ()
    conditions: Collection[str] = ()
    methods: Collection[str] = ()
    variant: str | None = None
    """A named deviation from the paper's protocol."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values by dotted key that override the protocol."""


def table_cells(paper: str, table: str) -> list[Cell]:
    """List the cells of a table, including those of methods that this version lacks (see `why_not_runnable`)."""
    protocol = read_protocol(paper)
    if table not in protocol.tables:
        raise unknown(f"table of {paper}", table, protocol.tables)
    spec = protocol.tables[table]
    printed = [
        n for n in numbers(paper) if n.table == table and n.metric in MEASURES and n.dataset in protocol.datasets
    ]
    cells = [
        Cell(paper, table, n.dataset, n.split, n.condition, n.method, n.metric, n)
        for n in printed
        if n.method in protocol.methods
    ]
    columns = dict.fromkeys(cell.column for cell in cells)
    for dataset, split, condition, metric in columns:
        cells += [Cell(paper, table, dataset, split, condition, method, metric) for method in spec.also]
    for block in spec.cells:
        for dataset in block["datasets"]:
            for split in block["splits"]:
                for condition in block.get("conditions", [""]):
                    cells += [
                        Cell(paper, table, dataset, split, condition, method, metric)
                        for metric in spec.metrics
                        for method in spec.methods
                    ]
    return sorted(cells, key=_setting_order(cells))


def _setting_order(cells: Sequence[Cell]) -> Any:
    """Return a sort key that keeps the cells of a setting together. An interrupted rerun then has complete columns."""
    order = {setting: i for i, setting in enumerate(dict.fromkeys(cell.setting for cell in cells))}
    return lambda cell: order[cell.setting]


def select_cells(cells: Sequence[Cell], choice: CellChoice) -> list[Cell]:
    """Select cells. Raise a UserError for a value that none of `cells` has, or if nothing is selected."""
    filters = (
        ("dataset", choice.datasets, lambda c: {c.dataset}),
        ("split", choice.splits, lambda c: {c.split}),
        ("condition", choice.conditions, lambda c: {c.condition}),
        ("method", choice.methods, method_names),
    )
    where = "this table" if len({(cell.paper, cell.table) for cell in cells}) == 1 else "these tables"
    found = list(cells)
    for kind, selected, names in filters:
        known = {name for cell in cells for name in names(cell)}
        for name in selected:
            if name not in known:
                raise unknown(f"{kind} of {where}", name, known)
        found = [cell for cell in found if not selected or names(cell) & set(selected)]
    if not found:
        raise UserError(
            "no cell combines the selected datasets, splits, conditions and methods; "
            "`fedskew reproduce PAPER/TABLE --list` lists the cells"
        )
    return found


def method_names(cell: Cell) -> set[str]:
    """Names that select the cell's method: its name in the paper, and its name in fedskew.

    If several methods of the paper have the same name in fedskew, fedskew's name selects only the first of them.
    """
    known = read_protocol(cell.paper).methods
    fedskew_name = known[cell.method]["method"]
    is_first = next(name for name, entry in known.items() if entry["method"] == fedskew_name) == cell.method
    return {cell.method, cell.method.lower()} | ({fedskew_name} if is_first else set())


def why_not_runnable(cell: Cell) -> str | None:
    """Return why this version cannot run the cell, or None if it can."""
    entry = read_protocol(cell.paper).methods[cell.method]
    try:
        make_method(entry["method"])
    except UserError as error:
        return str(error)
    return None


def make_job(cell: Cell, seed: int, choice: CellChoice) -> Job:
    """Make the run for a cell and a seed. If the choice sets a seed, seeds are counted from that one."""
    protocol = read_protocol(cell.paper)
    seed += int(integer(0)("seed", choice.values.get("seed", 0)))
    values = protocol.values(cell.table, *cell.setting, cell.method, choice.variant) | {**choice.values, "seed": seed}
    config = _config(_to_json(values))
    words = [f"{cell.paper}/{cell.table}", *cell.setting, cell.method, choice.variant or "", f"seed {seed}"]
    label = " ".join(filter(None, words))
    update = protocol.tables[cell.table].update
    if update is None:
        return Job(config, label)
    return _update_job(cell, config, label, seed, choice, update["of"])


def _update_job(cell: Cell, config: Config, label: str, seed: int, choice: CellChoice, trained_by: str) -> Job:
    """Make a run of one round. It starts from a model that `trained_by` trained, and evaluates each client's update."""
    protocol = read_protocol(cell.paper)
    values = protocol.values(cell.table, *cell.setting, trained_by, choice.variant) | {**choice.values, "seed": seed}
    start = _config(_to_json(values))
    return Job(with_values(config, {"rounds": 1, "eval_local": True}), label, start=start)


def _to_json(values: Mapping[str, Any]) -> str:
    """Return the values as JSON. Dates become text, because JSON has none."""
    return json.dumps(values, default=str)


@lru_cache(maxsize=100_000)
def _config(values: str) -> Config:
    """Make a configuration from JSON. By default, a run of ten or more rounds has at least ten checkpoints.

    Configurations are cached, because tables share many runs.
    """
    dotted = json.loads(values)
    rounds = int(integer(1)("rounds", dotted.get("rounds", Config.rounds)))
    return with_values(Config(), {"checkpoint_every": max(1, rounds // 10), **dotted})


def paper_rounds(cell: Cell, protocol: Protocol) -> int:
    """The number of rounds in the paper."""
    if cell.budget is not None:
        return cell.budget
    return int(protocol.values(cell.table, *cell.setting, cell.method)["rounds"])
