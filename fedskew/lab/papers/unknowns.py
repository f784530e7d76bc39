"""Compare a sweep with a paper's table. The sweep varies values that the paper does not state.

A setting is one combination of the grid's values, without the method. It is compared with the column of the table that
has the same data and split, over the methods that are in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedskew.experiment.config import Config
from fedskew.lab.papers.cells import CellChoice, make_job, table_cells
from fedskew.lab.papers.rerun import Order, compare_orders
from fedskew.lab.papers.sweep_section import Sweep, sweep_section
from fedskew.lab.papers.table_section import markdown_row

_TABLES = {
    "fedgr-unknowns": ("fedgr", "table3"),
    "fedgr-unknowns-dnn": ("fedgr", "table3"),
    "fedgr-unknowns-dnn-200": ("fedgr", "table3"),
}
"""The paper and the table that a grid is compared with, by the name of the grid's file."""
_METRIC = "last-50 accuracy"


@dataclass(frozen=True)
class SettingComparison:
    """One setting of a sweep, compared with a column of the paper's table."""

    setting: tuple[str, ...]
    """The values on the grid's axes, without the method."""
    accuracies: Mapping[str, tuple[float, float]]
    """The printed accuracy and ours in percent, by the method's name in the paper."""

    @property
    def distance(self) -> float:
        """The mean of the methods' absolute differences from the paper, in points."""
        return sum(abs(ours - printed) for printed, ours in self.accuracies.values()) / len(self.accuracies)

    @property
    def order(self) -> Order:
        return compare_orders(self.accuracies)


def unknowns_section(sweep: Sweep, heading: str) -> list[str]:
    """Describe the sweep. If it is in `_TABLES`, also show how near each of its settings comes to the paper."""
    lines = sweep_section(sweep, heading)
    if sweep.path.stem not in _TABLES:
        return lines
    paper, table = _TABLES[sweep.path.stem]
    axes = [key for key in sweep.keys if key != "method"]
    headings = (*axes, "distance in points", "order of the methods")
    rows = [
        markdown_row((*found.setting, f"{found.distance:.1f}", str(found.order)))
        for found in compare_settings(sweep)
        if len(found.accuracies) > 1
    ]
    about = f"The distance from {paper}/{table} is the mean absolute difference over the methods:\n"
    return [*lines, about, "\n".join([markdown_row(headings), markdown_row(["---"] * len(headings)), *rows]) + "\n"]


def compare_settings(sweep: Sweep) -> list[SettingComparison]:
    """Compare each setting of the sweep with the table, in the order of the grid."""
    printed = [
        (cell.method, cell.printed.mean, make_job(cell, 0, CellChoice()).config)
        for cell in table_cells(*_TABLES[sweep.path.stem])
        if cell.metric == _METRIC and cell.printed is not None and cell.printed.mean is not None
    ]
    combinations = sweep.combinations()
    at = sweep.keys.index("method")
    found: dict[tuple[str, ...], dict[str, tuple[float, float]]] = {}
    for values, row in sweep.rows().items():
        run = combinations[values][0].config
        accuracies = found.setdefault(values[:at] + values[at + 1 :], {})
        for method, accuracy, config in printed:
            if _is_same_cell(config, run):
                accuracies[method] = accuracy, 100 * row.mean_last.mean
    return [SettingComparison(setting, accuracies) for setting, accuracies in found.items()]


def _is_same_cell(printed: Config, run: Config) -> bool:
    """Whether a run has the data, the split and the method of a printed number. A run may set more of the split."""
    return (
        printed.data == run.data
        and printed.partition.rule == run.partition.rule
        and printed.partition.params.items() <= run.partition.params.items()
        and (printed.method, printed.method_params) == (run.method, run.method_params)
    )
