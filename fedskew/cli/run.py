"""`fedskew run`: run one method on one federation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedskew.cli.commands import (
    CONFIGURATION,
    FLAGS,
    TRAINING,
    Json,
    Live,
    Log,
    Quiet,
    RankBy,
    Settings,
    add_command,
    option,
    takes_settings,
)

if TYPE_CHECKING:
    from fedskew.data import Federation
    from fedskew.experiment.config import Config
    from fedskew.experiment.result import Result

RUNS = "runs"
"""The default parent folder of run folders."""


def add_to(app: typer.Typer) -> None:
    add_command(
        app, "run", _command,
        "fedskew run --method fedvls --beta 0.1 --clients-per-round 4 --rounds 20",
        "fedskew run --method fedprox --set method.mu=0.1 --partition shards --rounds 5",
        "fedskew run --method fedlmd+fedavgm --rounds 5 --seeds 2 --json",
    )  # fmt: skip


@takes_settings(FLAGS)
def _command(
    settings: Settings,
    seeds: Annotated[
        str | None, option("--seeds", "N", "number of runs, with consecutive seeds from --seed (default: 1)", TRAINING)
    ] = None,
    out: Annotated[
        str | None,
        option("--out", "FOLDER", "run folder (default: runs/NAME); with several seeds, the parent of the run folders",
               CONFIGURATION),
    ] = None,
    live: Live = False,
    log: Log = None,
    rank_by: RankBy = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Run a method on a federation. Repeat the command to resume the run or show its result."""
    from fedskew.cli.running import Observers, print_comparison, run_all, run_one
    from fedskew.cli.terminal import print_json, stdout
    from fedskew.experiment.compare import prepare_comparison
    from fedskew.experiment.config import run_folder
    from fedskew.experiment.preparation import prepare
    from fedskew.report.terminal import run_summary
    from fedskew.results.ranking import DEFAULT_METRIC, find_metric

    metric = None if rank_by is None else find_metric(rank_by)
    config, observers = settings.config(), Observers(live, log, metric.name if metric else DEFAULT_METRIC)
    run_seeds = seed_range(config, seeds)
    if len(run_seeds) > 1:
        runs = prepare_comparison(config, [config], run_seeds)
        comparison = run_all(runs, Path(out or RUNS), as_json or quiet, observers)
        print_comparison(comparison, as_json)
        return
    prepared = prepare(config)
    folder = Path(out) if out else run_folder(RUNS, prepared.config)
    result = run_one(prepared, folder, as_json or quiet, observers)
    if as_json:
        print_json(_json_summary(result, prepared.federation))
    else:
        stdout().print(run_summary(result, metric))


def seed_range(config: Config, seeds: str | int | None) -> list[int]:
    """Return consecutive seeds, from the configuration's seed on. `seeds` is their number (default: 1)."""
    from fedskew.experiment.config.values import integer

    number: int = integer(1)("seeds", 1 if seeds is None else seeds)
    return list(range(config.seed, config.seed + number))


def _json_summary(result: Result, federation: Federation) -> dict[str, Any]:
    return result.summary() | {
        "classes": list(federation.dataset.classes),
        "config": result.config.to_mapping(),
        "split": federation.hash,
        "folder": str(result.folder),
    }
