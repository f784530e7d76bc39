"""One method on one federation with one seed: from the first round, or from a checkpoint, to the result."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from fedskew.data import Federation
from fedskew.engine import arithmetic
from fedskew.errors import UserError
from fedskew.experiment.callbacks import Callback
from fedskew.experiment.config import Config, PartitionConfig, with_values
from fedskew.experiment.loop import RunRounds, run_rounds
from fedskew.experiment.overlap import run_overlapping_rounds
from fedskew.experiment.preparation import Prepared, prepare
from fedskew.experiment.recorder import Recorder
from fedskew.experiment.result import Result
from fedskew.experiment.resume import begin_or_resume, load_result
from fedskew.experiment.round.server import Server
from fedskew.experiment.storage.run_folder import RunFolder
from fedskew.methods import Method, Part


def run(
    federation: Federation,
    method: str | Method | Part | None = None,
    model: str | nn.Module | None = None,
    *,
    config: Config | None = None,
    out: str | Path | None = None,
    method_params: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> Result:
    """Run a method on a federation; `settings` are the keys of a configuration, such as `rounds` and `lr`.

    They override `config`, whose own defaults are method `fedvls`, model `auto` and the federation's seed. Data and
    partition are always the federation's. With `out`, the run is kept in that folder, and continues there if it was
    interrupted.
    """
    if not isinstance(federation, Federation):
        raise UserError(
            f"federation is {federation!r}; expected one, such as fedskew.federation('digits', Dirichlet(10))"
        )
    if config is not None and not isinstance(config, Config):
        raise UserError(f"config is {config!r}; expected a fedskew.Config")
    values: dict[str, Any] = {"seed": federation.seed} if config is None else {}
    values |= settings
    if isinstance(method, str):
        values["method"] = {"name": method, **(method_params or {})}
    elif method_params:
        raise UserError("method_params are for a method given by name; set them on the object")
    if isinstance(model, str):
        values["model"] = model
    values["data"] = federation.dataset.name
    complete = with_values(replace(config or Config(), partition=PartitionConfig()), values)
    own_method = None if isinstance(method, str) else method
    prepared = prepare(complete, federation, own_method, None if isinstance(model, str) else model)
    return run_prepared(prepared, out, callbacks)


def run_prepared(
    prepared: Prepared,
    out: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    server: Server | None = None,
    rounds: RunRounds | None = None,
) -> Result:
    """Run what `prepare` returned: in simulation, unless another server with its own loop of rounds is given."""
    # The server comes first: if it refuses the run, no folder is left behind.
    server = server or Server(prepared.federation, prepared.method, prepared.model, prepared.config)
    rounds = rounds or _suitable_loop(server)
    with contextlib.closing(server), arithmetic(prepared.config.precision):
        if out is None:
            return _run(prepared, server, rounds, None, callbacks)
        with RunFolder(out).open(prepared.config, server.repeated_by) as folder:
            return _run(prepared, server, rounds, folder, callbacks)


def _suitable_loop(server: Server) -> RunRounds:
    """A GPU works ahead of the host; everything else runs one round after another."""
    return partial(run_overlapping_rounds if server.device.type == "cuda" else run_rounds, server)


def _run(
    prepared: Prepared, server: Server, rounds: RunRounds, folder: RunFolder | None, callbacks: Sequence[Callback]
) -> Result:
    recorder = Recorder(prepared, server, folder, callbacks)
    if folder is not None and folder.finished:
        result = load_result(server, folder, recorder)
        for callback in callbacks:
            callback.on_notice(f"{folder.path} is finished already; nothing was run")
            callback.on_end(result)
        return result
    state = begin_or_resume(prepared, server, folder, recorder)
    if not recorder.stopped:
        state = rounds(state, recorder)
    return recorder.finish(state)
