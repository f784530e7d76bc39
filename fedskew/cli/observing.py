"""Who looks on while runs go on: the live page, and other tools' logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from fedskew.cli.flags import CONFIGURATION

if TYPE_CHECKING:
    from fedskew.experiment.callbacks import Callback
    from fedskew.experiment.preparation import Prepared

Live = Annotated[
    bool, typer.Option("--live", help="serve the report on this machine (127.0.0.1) while the run goes on",
                       rich_help_panel=CONFIGURATION)
]  # fmt: skip
Log = Annotated[
    str | None, typer.Option("--log", metavar="TOOL", help="also tell tensorboard, mlflow or wandb (offline), or "
                             "several: a,b", rich_help_panel=CONFIGURATION, show_default=False)
]  # fmt: skip


class Onlookers(NamedTuple):
    """What the user asked for."""

    live: bool = False
    log: str | None = None


NOBODY = Onlookers()


@contextmanager
def observing(
    onlookers: Onlookers, folder_of: Callable[[Prepared], Path], folders: Sequence[Path]
) -> Iterator[list[Callback]]:
    """Callbacks to run under; meanwhile the folders' page is served, if wanted."""
    trackers: list[Callback] = []
    if onlookers.log is not None:
        from fedskew.tracking.choice import make_trackers

        trackers += make_trackers(onlookers.log, folder_of)
    if not onlookers.live:
        yield trackers
        return
    from fedskew.cli.terminal import notice
    from fedskew.live.process import live_page

    with live_page(folders) as url:
        notice(f"live on {url}")
        yield trackers
