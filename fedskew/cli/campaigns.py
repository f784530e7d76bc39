"""Many runs at once from the command line: shared by `sweep` and `reproduce`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedskew.cli import INTERRUPTED
from fedskew.cli.flags import MACHINE

if TYPE_CHECKING:
    from fedskew.lab.sweep.campaign import Campaign
    from fedskew.lab.sweep.job import Job

FAILED = 1
Workers = Annotated[
    str | None,
    typer.Option("--workers", metavar="N", help="processes that share the machine (default: one for each CPU core, or "
                 "4 for each GPU)", rich_help_panel=MACHINE, show_default=False),
]  # fmt: skip
TimeLimit = Annotated[
    str | None,
    typer.Option("--time-limit", metavar="SECONDS", help="stop then; the same command continues",
                 rich_help_panel=MACHINE, show_default=False),
]  # fmt: skip
NoFolders = Annotated[
    bool,
    typer.Option("--no-folders", help="keep results only: no run folders, no checkpoints; a stopped run begins again",
                 rich_help_panel=MACHINE),
]  # fmt: skip


def whole(name: str, value: str | None) -> int | None:
    from fedskew.experiment.config.checks import integer

    return None if value is None else int(integer(1)(name, value))


def positive(name: str, value: str | None) -> float | None:
    from fedskew.experiment.config.checks import real

    return None if value is None else float(real(above=0)(name, value))


def absolute(path: str | None) -> str | None:
    """Workers, on other machines of a cluster too, have working folders of their own."""
    return None if path is None else str(Path(path).expanduser().absolute())


def in_percent(accuracies: Sequence[float]) -> str:
    """The mean, and how far the runs lie apart where there are several."""
    from fedskew.metrics.summary import mean_std

    return str(mean_std(accuracies)) if len(accuracies) > 1 else f"{100 * accuracies[0]:.2f}"


def run_campaign(campaign: Campaign, jobs: Sequence[Job], quiet: bool) -> None:
    """With progress; ^C ends the program with one line."""
    from fedskew.cli.sweep_progress import showing
    from fedskew.cli.terminal import notice, stderr

    todo = campaign.todo(jobs)
    if len(todo) < len(jobs) and not quiet:
        notice(f"{len(jobs) - len(todo)} of {len(jobs)} runs are done already")
    try:
        with showing(todo, quiet, stderr()) as progress:
            campaign.run(todo, progress)
    except KeyboardInterrupt as interrupt:
        notice("stopped; the same command continues")
        raise typer.Exit(INTERRUPTED) from interrupt


def conclude(campaign: Campaign) -> None:
    """List what did not come to its end; failed runs make the command fail."""
    from fedskew.cli.terminal import notice

    if campaign.stopped:
        notice(f"time is up: {len(campaign.stopped)} runs are not done; the same command continues")
    for label, reason in campaign.failures.items():
        notice(f"failed: {label}: {reason}")
    if campaign.failures:
        raise typer.Exit(FAILED)
