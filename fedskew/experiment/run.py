"""Run one method on one federation with one seed, from the first round or from a checkpoint to the result."""

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
    """Run a method on a federation. `settings` are configuration keys such as `rounds` and `lr`.

    The settings override `config`. By default, the method is `fedvls`, the model is `auto`, and the seed is the
    federation's. Data and partition are always the federation's. With `out`, the run is saved in that folder, and a
    repeated call resumes it there.
    """
    if not isinstance(federation, Federation):
        raise UserError(
            f"federation is {federation!r}; expected a Federation, as fedskew.federation('digits', Dirichlet(10)) makes"
        )
    if config is not None and not isinstance(config, Config):
        raise UserError(f"config is {config!r}; expected a fedskew.Config")
    values: dict[str, Any] = {"seed": federation.seed} if config is None else {}
    values |= settings
    if isinstance(method, str):
        values["method"] = {"name": method, **(method_params or {})}
    elif method_params:
        raise UserError("method_params need a method given by name; set them on the method object instead")
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
    loop: RunRounds | None = None,
) -> Result:
    """Run a prepared experiment. It is simulated, unless another server with its own loop is given."""
    # The server is made first, so that no folder is left behind if it refuses the run.
    server = server or Server(prepared.federation, prepared.method, prepared.model, prepared.config)
    loop = loop or _choose_loop(server)
    with contextlib.closing(server), arithmetic(prepared.config.precision):
        if out is None:
            return _run(prepared, server, loop, None, callbacks)
        with RunFolder(out).open(prepared.config, server.repeated_by) as folder:
            return _run(prepared, server, loop, folder, callbacks)


def _choose_loop(server: Server) -> RunRounds:
    """Choose overlapping rounds on a GPU, and one round after another elsewhere."""
    return partial(run_overlapping_rounds if server.device.type == "cuda" else run_rounds, server)


def _run(
    prepared: Prepared, server: Server, loop: RunRounds, folder: RunFolder | None, callbacks: Sequence[Callback]
) -> Result:
    recorder = Recorder(prepared, server, folder, callbacks)
    if folder is not None and folder.finished:
        result = load_result(server, folder, recorder)
        for callback in callbacks:
            callback.on_notice(f"{folder.path} is already finished; nothing was run")
            callback.on_end(result)
        return result
    state = begin_or_resume(prepared, server, folder, recorder)
    if not recorder.stopped:
        state = loop(state, recorder)
    return recorder.finish(state)
