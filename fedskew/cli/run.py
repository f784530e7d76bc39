"""`fedskew run`: one method on one federation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedskew.cli.flags import CONFIGURATION, FLAGS, TRAINING, Json, Quiet, Settings, takes_settings
from fedskew.cli.observing import Live, Log, Onlookers

if TYPE_CHECKING:
    from fedskew.data import Federation
    from fedskew.experiment.config import Config
    from fedskew.experiment.result import Result

EXAMPLES = (
    "fedskew run --method fedvls --beta 0.1 --clients-per-round 4 --rounds 20",
    "fedskew run --method fedprox --set method.mu=0.1 --partition shards --rounds 5",
    "fedskew run --method fedlmd+fedavgm --rounds 5 --seeds 2 --json",
)
RUNS = "runs"
"""The folder in which runs lie unless --out says otherwise."""


def add_to(app: typer.Typer) -> None:
    app.command("run", epilog=examples(EXAMPLES))(_command)


def examples(lines: tuple[str, ...]) -> str:
    """The end of a command's help."""
    return "\n\n".join(("Examples:" if len(lines) > 1 else "Example:", *lines))


@takes_settings(FLAGS)
def _command(
    settings: Settings,
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", metavar="N", help="runs, with seeds from --seed on (default: 1)",
                     rich_help_panel=TRAINING, show_default=False),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="FOLDER", help="the run's folder (default: runs/NAME-OF-THE-RUN); with --seeds, "
                     "the folder of the runs' folders", rich_help_panel=CONFIGURATION, show_default=False),
    ] = None,
    live: Live = False,
    log: Log = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Run a method on a federation. The same command again continues, or shows the result."""
    from fedskew.experiment.compare import prepare_comparison

    config = settings.config()
    numbers = seed_range(config, seeds)
    if len(numbers) == 1:
        _one(config, out, as_json, quiet, Onlookers(live, log))
        return
    from fedskew.cli.several_runs import report, run_all

    runs = prepare_comparison(config, [config], numbers)
    results = run_all(runs, Path(out or RUNS), as_json or quiet, Onlookers(live, log))
    report(results, runs[0].federation.dataset.classes, as_json)


def seed_range(config: Config, seeds: str | int | None) -> list[int]:
    """The seeds of so many runs."""
    from fedskew.experiment.config.checks import integer

    number: int = integer(1)("seeds", 1 if seeds is None else seeds)
    return list(range(config.seed, config.seed + number))


def _one(config: Config, out: str | None, as_json: bool, quiet: bool, onlookers: Onlookers) -> None:
    from fedskew.cli.observing import observing
    from fedskew.cli.progress import watching
    from fedskew.cli.terminal import print_json, stdout
    from fedskew.cli.threads import use_threads
    from fedskew.experiment.config import run_name
    from fedskew.experiment.preparation import prepare
    from fedskew.experiment.run import run_prepared
    from fedskew.report.run_summary import run_summary

    prepared = prepare(config)
    folder = Path(out) if out else Path(RUNS) / run_name(prepared.config)
    use_threads(prepared.config)
    quietly = as_json or quiet
    with observing(onlookers, lambda _: folder, [folder]) as trackers, watching(lambda _: folder, 1, quietly) as watch:
        result = run_prepared(prepared, folder, [watch, *trackers])
    if as_json:
        print_json(_json(result, prepared.federation))
    else:
        stdout().print(run_summary(result, prepared.federation.dataset.classes))


def _json(result: Result, federation: Federation) -> dict[str, Any]:
    return result.summary() | {
        "classes": list(federation.dataset.classes),
        "config": result.config.to_mapping(),
        "split": federation.hash,
        "folder": str(result.folder),
    }
