"""Runs that a callback stopped: whether a later call continues them.

A stopped run is finished, and its last checkpoint remains. A call whose callbacks would have stopped it as well gets
its result. Any other call continues it, so that nobody takes it for a run with all rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedskew.errors import UserError
from fedskew.experiment.callbacks import Callback, EarlyStopping
from fedskew.experiment.preparation import Prepared
from fedskew.experiment.round.server import Server
from fedskew.experiment.storage.run_folder import RunFolder

STOPPED_BY = "stopped_by"
"""The key in `summary.json` with the classes of the callbacks that stopped the run."""


def stopped_early(folder: RunFolder) -> bool:
    """Whether a callback stopped the finished run in this folder."""
    return bool((folder.summary() or {}).get("stopped_early"))


def must_continue(prepared: Prepared, server: Server, folder: RunFolder, callbacks: Sequence[Callback]) -> bool:
    """Whether a callback stopped the finished run in this folder, and none of these would have stopped it as well."""
    return stopped_early(folder) and not any(_stops(callback, prepared, server, folder) for callback in callbacks)


def _stops(callback: Callback, prepared: Prepared, server: Server, folder: RunFolder) -> bool:
    """Whether the callback would have stopped this run after its last recorded round or before.

    The callback sees the recorded rounds again. Only `EarlyStopping` and callbacks of a class that stopped the run are
    asked, because others may act on each round, for example print it. If the class is not recorded, all are asked.
    """
    stopped_by = (folder.summary() or {}).get(STOPPED_BY)  # None in runs of version 0.2
    known = stopped_by is None or _class_name(callback) in stopped_by
    if not isinstance(callback, EarlyStopping) and not known:
        return False
    state = server.start()
    ahead = server.rounds_left(state)
    callback.on_start(prepared, state, ahead)
    return any(callback.on_round(row, ahead - row.round) for row in folder.rounds() if row.round)


def can_continue(folder: RunFolder) -> bool:
    """Whether the run has a checkpoint that this version can read."""
    try:
        return folder.load_checkpoint() is not None
    except UserError:
        return False


def describe_stop(callbacks: Sequence[Callback]) -> dict[str, list[str]]:
    """Return what the summary records of the callbacks that stopped the run."""
    return {STOPPED_BY: [_class_name(callback) for callback in callbacks]}


def _class_name(callback: Callback) -> str:
    return f"{type(callback).__module__}.{type(callback).__qualname__}"
