"""Several runs and what is shown of them: shared by `run --seeds`, `compare` and `demo`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedskew.cli.observing import NOBODY, Onlookers, observing
from fedskew.cli.progress import watching
from fedskew.cli.terminal import print_json, stdout
from fedskew.cli.threads import use_threads
from fedskew.experiment.compare import MethodResults, compare
from fedskew.experiment.config import run_name
from fedskew.experiment.preparation import Prepared
from fedskew.report.comparison_table import class_accuracy_table, comparison_table


def run_all(runs: Sequence[Prepared], out: Path, quiet: bool, onlookers: Onlookers = NOBODY) -> list[MethodResults]:
    """Run what is not finished yet, each in a folder of its own under `out`."""

    def folder_of(prepared: Prepared) -> Path:
        return out / run_name(prepared.config)

    use_threads(runs[0].config)
    folders = [folder_of(prepared) for prepared in runs]
    with observing(onlookers, folder_of, folders) as trackers, watching(folder_of, len(runs), quiet) as watch:
        return compare(runs, out, [watch, *trackers])


def report(results: Sequence[MethodResults], classes: Sequence[str], as_json: bool) -> None:
    """The tables, or one JSON object."""
    if as_json:
        print_json(_json(results, classes))
        return
    console = stdout()
    console.print(comparison_table(results, classes))
    console.print(class_accuracy_table(results, classes, console.width))
    folders = {folder.parent for result in results for r in result.results if (folder := r.folder)}
    for folder in sorted(folders):
        console.print(f"runs kept in {folder}; to look at them: fedskew report {folder}", markup=False, soft_wrap=True)


def _json(results: Sequence[MethodResults], classes: Sequence[str]) -> dict[str, Any]:
    config = results[0].results[0].config.to_mapping()
    method_of_each = [result.results[0].config.to_mapping()["method"] for result in results]
    return {
        "classes": list(classes),
        "config": {key: value for key, value in config.items() if key not in ("method", "seed")},
        "methods": [
            result.to_json() | {"params": {k: v for k, v in method.items() if k != "name"}}
            for result, method in zip(results, method_of_each, strict=True)
        ],
    }
