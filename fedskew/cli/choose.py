"""`fedskew choose`: race methods on a federation and choose one."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from fedskew.cli.commands import (
    CONFIGURATION,
    FLAGS,
    TRAINING,
    Json,
    Quiet,
    Settings,
    Workers,
    add_command,
    option,
    split_names,
    takes_settings,
)

if TYPE_CHECKING:
    from fedskew.results.race import RaceRecord

_FLAGS = [name for name in FLAGS if name not in ("method", "eval_every", "eval_local")]


def add_to(app: typer.Typer) -> None:
    add_command(
        app, "choose", _command,
        "fedskew choose --data digits --beta 0.1 --clients-per-round 4 --budget 3m",
        "fedskew choose --methods fedprox,fedlmd,fedvls --budget 2000r",
    )  # fmt: skip


@takes_settings(_FLAGS, {"lr": "learning rate; the race also tries a third and three times this rate (default: 0.05)"})
def _command(
    settings: Settings,
    budget: Annotated[
        str,
        option("--budget", "TIME|ROUNDS", "how long to race: a time such as 5m, 200s or 1h, or a total number of "
               "rounds over all runs, such as 2000r (default: 5m)", TRAINING),
    ] = "5m",
    methods: Annotated[
        str | None,
        option("--methods", "A,B,C", "methods to race; FedAvg always takes part (default: 14 methods)", TRAINING),
    ] = None,
    rank_by: Annotated[
        str | None,
        option("--rank-by", "METRIC", "metric that decides which method is best: accuracy, macro-f1, worst-class or "
               "balanced-accuracy (default: accuracy)", CONFIGURATION),
    ] = None,
    out: Annotated[
        str | None, option("--out", "FOLDER", "folder of the race (default: runs/choose-NAME)", CONFIGURATION)
    ] = None,
    workers: Workers = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Race methods on a federation and recommend one, with its lead over FedAvg, its costs and what it reveals.

    Methods, their settings and learning rates are compared on validation data, held out from the training data. The
    test set is never used. Repeat the command to continue a race that was interrupted.
    """
    from fedskew.choose.choice import choose
    from fedskew.choose.trial import RACE_METRICS
    from fedskew.cli.campaigns import parse_count
    from fedskew.cli.race_display import racing
    from fedskew.cli.terminal import print_json, stdout
    from fedskew.report.race import final_table
    from fedskew.results.ranking import DEFAULT_METRIC, find_metric

    config, metric = settings.config(), find_metric(rank_by or DEFAULT_METRIC, RACE_METRICS).name
    with racing(config, metric, as_json or quiet) as watcher:
        choice = choose(
            config=config, methods=split_names(methods) or None, budget=budget, rank_by=metric, out=out,
            workers=parse_count("workers", workers), watcher=watcher,
        )  # fmt: skip
    if as_json:
        print_json(choice.to_json())
        return
    console = stdout()
    console.print(final_table(choice.race))
    console.print(_note_on_columns(choice.race), markup=False, soft_wrap=True)
    for line in choice.answer:
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"fedskew run -c {quote(str(choice.run_file))}", markup=False, soft_wrap=True)
    console.print(choice.federate_command("my-federation"), markup=False, soft_wrap=True)


def _note_on_columns(race: RaceRecord) -> str:
    """Say why the gains are not differences of the means."""
    fresh, many = len(race.winner.standing.scores), race.repeats.many
    earlier = race.plan["splits"] if race.plan else 0
    return f"The mean is over all {fresh + earlier} {many}, the gain over the {fresh} fresh {many} of the final only."
