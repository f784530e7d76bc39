"""`fedskew federate backup`: copy what a server needs to resume elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedskew.cli.commands import option


def backup(
    app: Annotated[str, typer.Argument(metavar="APP", help="folder of the federation's app")],
    target: Annotated[str, typer.Argument(metavar="BACKUP", help="folder for the backup; it must be new or empty")],
    database: Annotated[
        str, option("--database", "FILE", "the SuperLink's database (default: superlink.db)")
    ] = "superlink.db",
    keys: Annotated[
        str | None, option("--keys", "DIR", "also copy this folder of certificates and keys, including private ones")
    ] = None,
    folder: Annotated[
        str | None, option("--folder", "RUN", "the run's folder (default: federation.folder of the app)")
    ] = None,
) -> None:
    """Copy the server's database, app and run, even while the run is in progress.

    The command checks the copy, and prints after which round the copy would resume.
    """
    from fedskew.cli.terminal import stdout
    from fedskew.flower.backup import back_up
    from fedskew.flower.planning import read_app

    source = Path(folder or read_app(app)[0].folder).expanduser()
    made = back_up(Path(target), source, Path(app), Path(database), None if keys is None else Path(keys))
    if made.is_finished:
        state = "the run is finished"
    else:
        state = (
            "the copy has no checkpoint" if made.round is None else f"the copy would resume after round {made.round}"
        )
    stdout().print(f"{made.folder}: {state}", soft_wrap=True, markup=False)
