"""Selections of cells and seeds, from the command line or from a plan in YAML.

    - tables: fedlmd/table3
      dataset: cifar10
      split: [dirichlet:0.05, shards:2]
      seeds: 3
    - tables: [pkd/table1, pkd/table2]
      set: {precision: bf16}

Entries start in order. All entries share the workers, so a worker does not wait for the others to finish an entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedskew.errors import UserError, unknown
from fedskew.experiment.config.values import integer, read_yaml
from fedskew.lab.papers.cells import Cell, CellChoice, make_job, select_cells, table_cells, why_not_runnable
from fedskew.lab.papers.protocol import papers, read_protocol
from fedskew.lab.sweep.job import NON_IDENTIFYING_KEYS, Job, merge_jobs


@dataclass(frozen=True)
class Selection:
    """Cells to run, the number of seeds, and settings that override the papers' protocols in all of these cells."""

    tables: tuple[str, ...]
    """Names such as `fedlmd/table3`, or a paper for all of its tables."""
    choice: CellChoice = field(default_factory=CellChoice)
    seeds: int = 1

    def cells(self) -> list[Cell]:
        """The cells that this version can run."""
        return [cell for cell in self._chosen() if not why_not_runnable(cell)]

    def missing(self) -> list[str]:
        """Methods that this version lacks."""
        return sorted({cell.method for cell in self._chosen() if why_not_runnable(cell)})

    def __str__(self) -> str:
        choice = self.choice
        parts = (choice.datasets, choice.splits, choice.conditions, choice.methods)
        only = [", ".join(filter(None, part)) for part in parts if any(part)]
        variant = [f"variant {choice.variant}"] if choice.variant else []
        seeds = "one seed" if self.seeds == 1 else f"{self.seeds} seeds"
        return "; ".join([", ".join(self.tables), *only, *variant, *([self.changed] if self.changed else []), seeds])

    @property
    def changed(self) -> str:
        """The settings that override the protocol, without those that do not affect results, such as the device."""
        changes = {key: value for key, value in self.choice.values.items() if key not in _WITHOUT_EFFECT_ON_RESULTS}
        return ", ".join(f"{key} {value}" for key, value in changes.items())

    def jobs(self) -> list[Job]:
        """List each run once. All runs of the first seed come first."""
        cells = self.cells()
        jobs = [make_job(cell, seed, self.choice) for seed in range(self.seeds) for cell in cells]
        return merge_jobs(jobs)

    def _chosen(self) -> list[Cell]:
        cells = [cell for paper, table in table_names(self.tables) for cell in table_cells(paper, table)]
        return select_cells(cells, self.choice)


def table_names(tables: Iterable[str]) -> list[tuple[str, str]]:
    """Parse names into (paper, table) pairs. A paper alone means all of its tables."""
    found = []
    for name in tables:
        paper, slash, table = name.partition("/")
        found += [(paper, table)] if slash else [(paper, each) for each in read_protocol(paper).tables]
    return found


def all_tables() -> list[tuple[str, str]]:
    return table_names(papers())


_WITHOUT_EFFECT_ON_RESULTS = tuple(key for key in NON_IDENTIFYING_KEYS if key not in ("rounds", "eval_every"))
_KEYS = ("tables", "dataset", "split", "condition", "methods", "variant", "seeds", "rounds", "set")


def read_plan(path: str | Path, values: Mapping[str, Any]) -> list[Selection]:
    """Read a plan from a YAML file. `values`, by dotted key, apply to all entries."""
    content = read_yaml(path)
    if not isinstance(content, list) or not content:
        raise UserError(f"{path}: expected a list of entries such as {{tables: fedlmd/table3, seeds: 3}}")
    return [_selection(entry, values, f"{path}, entry {number}") for number, entry in enumerate(content, start=1)]


def _selection(entry: Any, values: Mapping[str, Any], where: str) -> Selection:
    if not isinstance(entry, Mapping):
        raise UserError(f"{where}: {entry!r}; expected a mapping such as {{tables: fedlmd/table3}}")
    for key in entry:
        if key not in _KEYS:
            raise UserError(f"{where}: {unknown('key', str(key), _KEYS)}")
    tables = _as_tuple(entry.get("tables"))
    if not tables:
        raise UserError(f"{where}: no tables; expected a mapping such as {{tables: fedlmd/table3}}")
    changes = entry.get("set", {})
    if not isinstance(changes, Mapping):
        raise UserError(f"{where}: set is {changes!r}; expected a mapping such as {{precision: bf16}}")
    variant = entry.get("variant")
    if not isinstance(variant, str | None):
        raise UserError(f"{where}: variant is {variant!r}; expected the name of one variant")
    entry_values = {**changes, **({"rounds": entry["rounds"]} if "rounds" in entry else {})}
    choice = CellChoice(
        datasets=_as_tuple(entry.get("dataset")),
        splits=_as_tuple(entry.get("split")),
        conditions=_as_tuple(entry.get("condition")),
        methods=_as_tuple(entry.get("methods")),
        variant=variant,
        values={**entry_values, **values},
    )
    return Selection(tables, choice, integer(1)("seeds", entry.get("seeds", 1)))


def _as_tuple(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    return tuple(map(str, value)) if isinstance(value, list) else (str(value),)


def plan_jobs(plan: Sequence[Selection]) -> list[Job]:
    """List the runs of all entries in order, each once."""
    return merge_jobs(job for selection in plan for job in selection.jobs())
