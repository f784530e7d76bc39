"""Run one or several experiments with progress, live report and logs: shared by `run`, `compare` and `demo`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from fedskew.cli.progress import RunProgress, showing_runs
from fedskew.cli.terminal import notice, print_json, stdout
from fedskew.experiment.callbacks import Callback
from fedskew.experiment.compare import run_comparison
from fedskew.experiment.config import Config, run_name
from fedskew.experiment.preparation import Prepared
from fedskew.experiment.result import Result
from fedskew.experiment.run import run_prepared
from fedskew.report.terminal import class_accuracy_table, comparison_table
from fedskew.results import Comparison, compare_runs

FolderOf = Callable[[Prepared], Path]


class Observers(NamedTuple):
    """What follows a run besides the terminal."""

    live: bool = False
    log: str | None = None
    """Names of tracking tools, comma-separated."""


def run_one(prepared: Prepared, folder: Path, quiet: bool, observers: Observers) -> Result:
    """Run, resume or read one experiment."""
    _set_threads(prepared.config)
    with _callbacks(observers, lambda _: folder, [folder], quiet) as callbacks:
        return run_prepared(prepared, folder, callbacks)


def run_all(runs: Sequence[Prepared], out: Path, quiet: bool, observers: Observers | None = None) -> Comparison:
    """Run the experiments that are not finished yet, each in its folder under `out`."""

    def folder_of(prepared: Prepared) -> Path:
        return out / run_name(prepared.config)

    _set_threads(runs[0].config)
    folders = [folder_of(prepared) for prepared in runs]
    with _callbacks(observers or Observers(), folder_of, folders, quiet) as callbacks:
        return compare_runs(run_comparison(runs, out, callbacks))


def _set_threads(config: Config) -> None:
    """Use one thread for the stacked engine on a CPU and torch's default otherwise; OMP_NUM_THREADS overrides both.

    Stacked small networks gain nothing from a second thread (2.0 s against 1.9 s for 15 rounds of the demo) and
    lose much if the other cores are busy. The number is fixed, not measured: it decides the order of sums, and
    a resumed run must repeat them bit for bit.
    """
    if config.engine == "stacked" and config.device == "cpu" and not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(1)


@contextmanager
def _callbacks(
    observers: Observers, folder_of: FolderOf, folders: Sequence[Path], quiet: bool
) -> Iterator[list[Callback]]:
    """Progress and trackers; the live report is served meanwhile."""
    trackers: list[Callback] = []
    if observers.log is not None:
        from fedskew.tracking.choice import make_trackers

        trackers += make_trackers(observers.log, folder_of)
    progress: RunProgress
    with _live_report(folders if observers.live else ()), showing_runs(folder_of, len(folders), quiet) as progress:
        yield [progress, *trackers]


@contextmanager
def _live_report(folders: Sequence[Path]) -> Iterator[None]:
    if not folders:
        yield
        return
    from fedskew.live.process import live_page

    with live_page(folders) as url:
        notice(f"live report: {url}")
        yield


def report(comparison: Comparison, as_json: bool) -> None:
    """Print the tables of a comparison, or one JSON object."""
    if as_json:
        print_json(comparison.to_json())
        return
    console = stdout()
    console.print(comparison_table(comparison))
    console.print(class_accuracy_table(comparison, console.width))
    folders = {folder.parent for run in comparison.runs if (folder := run.folder)}
    for folder in sorted(folders):
        console.print(f"runs saved in {folder}; for a report: fedskew report {folder}", markup=False, soft_wrap=True)
