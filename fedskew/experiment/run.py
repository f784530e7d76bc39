"""Run one method on one federation with one seed, from the first round or from a checkpoint to the result."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedskew.data import Federation
from fedskew.engine import arithmetic, set_tensors
from fedskew.errors import UserError, shorten
from fedskew.experiment.callbacks import Callback, check_callbacks
from fedskew.experiment.config import Config, PartitionConfig, with_values
from fedskew.experiment.config.documentation import documents_settings
from fedskew.experiment.loop import RunRounds, run_rounds
from fedskew.experiment.overlap import run_overlapping_rounds
from fedskew.experiment.preparation import Prepared, prepare, refuse_data_settings, refuse_other_split
from fedskew.experiment.progress import showing_progress
from fedskew.experiment.recorder import Recorder
from fedskew.experiment.result import Result, recorded_scores, recorded_site_scores
from fedskew.experiment.round.server import Server
from fedskew.experiment.round.state import RunState
from fedskew.experiment.stopped_runs import can_continue, must_continue, stopped_early
from fedskew.experiment.storage.about import about
from fedskew.experiment.storage.checkpoints import Checkpoint
from fedskew.experiment.storage.run_folder import RunFolder
from fedskew.methods import Method, Part, unpack
from fedskew.models import has_features
from fedskew.models.concatenation import count_encoders, with_encoders


@documents_settings()
def run(
    federation: Federation,
    method: str | Mapping[str, Any] | Method | Part | None = None,
    model: str | nn.Module | None = None,
    *,
    config: Config | None = None,
    out: str | Path | None = None,
    method_params: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    **settings: Any,
) -> Result:
    """Run a method on a federation. `settings` are configuration keys such as `rounds` and `lr`, listed below.

    federation: the clients and their data, as `fedskew.federation` makes them.
    method: a name such as `fedvls` or `fedlmd+fedprox`, with settings as `fedprox:mu=1` or
        `{"name": "fedprox", "mu": 1}`, or an object such as `FedVLS(distill_weight=0.5)`. The default is the method of
        `config`, or `fedvls`.
    model: a name such as `cnn`, `package.module:factory`, or a `torch.nn.Module`. The default is the model of
        `config`, or `auto`, which chooses a small model for the data.
    config: a `Config`, whose values the settings override. Data and partition are always the federation's.
    out: a folder for the run. A repeated call resumes it there, or reads its result if it is finished. A run that a
        callback stopped continues, unless these callbacks would have stopped it as well.
    method_params: the parameters of a method that is given by name, such as `{"distill_weight": 0.5}`.
    callbacks: objects that watch the run, such as `EarlyStopping(patience=10)`.
    progress: whether to show a bar, and in a notebook a live curve. None shows them in a notebook and in a terminal,
        False never. True also prints lines in a log.

    The seed is the federation's, unless `seed` or `config` is given.
    """
    if not isinstance(federation, Federation):
        raise UserError(
            f"federation is {federation!r}; expected a Federation, as fedskew.federation('digits', Dirichlet(10)) makes"
        )
    if config is not None and not isinstance(config, Config):
        raise UserError(f"config is {config!r}; expected a fedskew.Config")
    refuse_data_settings(settings, federation)
    check_callbacks(callbacks)
    if method_params is not None and not isinstance(method_params, Mapping):
        raise UserError(f"method_params is {method_params!r}; expected a mapping such as {{'mu': 0.1}}")
    values: dict[str, Any] = {"seed": federation.seed} if config is None else {}
    values |= settings
    if isinstance(method, str | Mapping):
        named = {"name": method} if isinstance(method, str) else method
        values["method"] = {**named, **(method_params or {})}
    elif method_params:
        way_out = "set them on the method object instead" if method is not None else "pass it, too: method='fedprox'"
        raise UserError(f"method_params need a method given by name; {way_out}")
    elif method is not None:
        _refuse_parameters(settings)
    if isinstance(model, str):
        values["model"] = model
    values["data"] = federation.dataset.described
    full_config = with_values(replace(config or Config(), partition=PartitionConfig()), values)
    method_object = None if isinstance(method, str | Mapping) else method
    refuse_other_split(full_config, federation)
    prepared = prepare(full_config, federation, method_object, None if isinstance(model, str) else model)
    with showing_progress(progress) as shown:
        return run_prepared(prepared, out, [*shown, *callbacks])


def _refuse_parameters(settings: Mapping[str, Any]) -> None:
    """Refuse parameters such as `method.mu` beside a method object, which has its own."""
    key = next((key for key in settings if key.startswith("method.")), None)
    if key is not None:
        raise UserError(f"{key} is {settings[key]!r}, but the method is an object; set its parameters on the object")


def run_prepared(
    prepared: Prepared,
    out: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    server: Server | None = None,
    loop: RunRounds | None = None,
) -> Result:
    """Run a prepared experiment. It is simulated, unless another server with its own loop is given."""
    # The server is made first, so that no folder is left behind if it refuses the run.
    server = server or _make_server(prepared)
    loop = loop or _choose_loop(server)
    with contextlib.closing(server), arithmetic(prepared.config.precision):
        if out is None:
            return _run_or_load(prepared, server, loop, None, callbacks)
        with RunFolder(out).open(prepared.config, server.how_to_repeat) as folder:
            return _run_or_load(prepared, server, loop, folder, callbacks)


def _make_server(prepared: Prepared) -> Server:
    if prepared.config.train == "all":
        return Server(prepared.federation, prepared.method, prepared.model, prepared.config)
    from fedskew.experiment.trained_part import TrainedPartServer  # few runs need it

    assert has_features(prepared.model)
    return TrainedPartServer(prepared.federation, prepared.method, prepared.model, prepared.config)


def _choose_loop(server: Server) -> RunRounds:
    """Choose overlapping rounds on CUDA, and one round after another elsewhere."""
    return partial(run_overlapping_rounds if server.device.type == "cuda" else run_rounds, server)


def _run_or_load(
    prepared: Prepared, server: Server, loop: RunRounds, folder: RunFolder | None, callbacks: Sequence[Callback]
) -> Result:
    recorder = Recorder(prepared, server, folder, callbacks)
    if folder is not None and folder.finished:
        _check_data(folder, prepared.federation)
        is_incomplete = must_continue(prepared, server, folder, callbacks)
        if not is_incomplete or not can_continue(folder):
            return _load_finished(prepared, server, folder, recorder, callbacks, is_incomplete)
    state = begin_or_resume(prepared, server, folder, recorder)
    if folder is not None and folder.finished:  # a callback does not want a stopped run to continue
        return _load_finished(prepared, server, folder, recorder, callbacks)
    if not recorder.stopped:
        state = loop(state, recorder)
    return recorder.finish(state)


def _load_finished(
    prepared: Prepared,
    server: Server,
    folder: RunFolder,
    recorder: Recorder,
    callbacks: Sequence[Callback],
    is_incomplete: bool = False,
) -> Result:
    """Load the result. `is_incomplete` says whether the run should continue, but cannot."""
    result = load_result(server, folder, recorder)
    line = f"{folder.path} is already finished"
    if result.stopped_early:
        line += f": a callback stopped it {result.stopped_after}"
    line += "; nothing was run"
    lacks_predictions = prepared.config.save_predictions and not folder.config.save_predictions
    if lacks_predictions and not folder.predictions_path.exists():
        line += ", so no predictions were saved; to save them, choose another --out"
    if is_incomplete:
        line += ", because it has no checkpoint that can be used; to train all rounds, choose another --out"
    for callback in callbacks:
        callback.on_notice(line)
        callback.on_end(result)
    return result


def begin_or_resume(prepared: Prepared, server: Server, folder: RunFolder | None, recorder: Recorder) -> RunState:
    """Return the state to continue from, and start the recorder with the rows up to it."""
    state = server.start()
    if folder is None:
        _report_start(prepared, recorder)
        recorder.start([], state)
        return state
    checkpoint = folder.load_checkpoint()
    _require_space(server, folder, state, checkpoint)
    recorder.notify(folder.warnings)
    if checkpoint is None:
        _report_start(prepared, recorder)
        folder.truncate_rounds(-1)
        folder.write_about(about(prepared))
        state = server.start(folder.client_states())
        recorder.start([], state)
        return state
    _check_checkpoint(prepared, server, folder, checkpoint)
    _use_threads(server, recorder, checkpoint.meta.get("threads", torch.get_num_threads()))
    server.resume_with(checkpoint.meta.get("engine"))
    clients = folder.client_states(checkpoint.clients)
    state = RunState.restore(checkpoint.tensors, checkpoint.meta, clients, server.device)
    if folder.finished:
        _continue_stopped(folder, checkpoint.round, state, recorder)
        return state
    folder.truncate_rounds(checkpoint.round)
    recorder.start(folder.rounds(), state)
    return state


def _continue_stopped(folder: RunFolder, last: int, state: RunState, recorder: Recorder) -> None:
    """Continue a run that a callback stopped, from round `last`. Its result is removed once no callback objects."""
    rows = folder.rounds()
    recorder.start([row for row in rows if row.round <= last], state)
    if not recorder.stopped:
        recorder.notify([f"{folder.path}: a callback stopped this run after round {rows[-1].round}; now it continues"])
        folder.withdraw_result()
        folder.truncate_rounds(last)


def _report_start(prepared: Prepared, recorder: Recorder) -> None:
    """Pass on the notices, and which tensors the initial model took from a file of weights."""
    recorder.notify(list(prepared.notices))
    if prepared.init_report is not None:
        recorder.notify(prepared.init_report.lines())


def load_result(server: Server, folder: RunFolder, recorder: Recorder) -> Result:
    """Load the result of a run that finished earlier."""
    tensors, meta = folder.load_model()
    module = with_encoders(server.initial_module(), meta.get("encoders", 0))
    buffers, is_whole = dict(module.named_buffers()), count_encoders(module) or server.saves_whole_model
    # If the whole model was saved, the file also has the parameters that the run did not train.
    expected = dict(module.named_parameters()) if is_whole else server.network.state().params
    _check_model(folder, expected, {name: t for name, t in tensors.items() if name not in buffers})
    set_tensors(module, tensors)
    rows = folder.rounds()
    if not any(row.is_evaluated for row in rows):
        raise UserError(
            f"{folder.path} is finished, but {folder.rounds_path.name} is missing or has no evaluated round; "
            "restore it, or delete the folder to run again"
        )
    summary = folder.summary() or {}
    engine = summary.get("engine", server.engine_name)
    stopped = stopped_early(folder)
    return recorder.result(module, rows, engine, stopped, recorded_scores(summary), recorded_site_scores(summary))


def _require_space(server: Server, folder: RunFolder, start: RunState, checkpoint: Checkpoint | None) -> None:
    """Require disk space for two checkpoints, a third being written, the final model, and the client states to come."""
    shared = 4 * sum(t.nbytes for t in start.tensors().values())
    present = 0 if checkpoint is None else sum(map(len, checkpoint.clients.values()))
    folder.require_space(shared + server.client_bytes(start, present))


def _check_checkpoint(prepared: Prepared, server: Server, folder: RunFolder, checkpoint: Checkpoint) -> None:
    _check_data(folder, prepared.federation, checkpoint.meta["split"])
    _check_order_of_inputs(folder, prepared.federation.dataset.columns)
    models = [unpack(f"{name}:params", checkpoint.tensors) for name in checkpoint.meta["trainees"]]
    expected = server.network.state().params
    _check_model(folder, expected, next((m for m in models if m.keys() == expected.keys()), models[0]))


def _check_data(folder: RunFolder, federation: Federation, split: str | None = None) -> None:
    """Refuse another split or other labels than those that the run began with. `split` is the hash in a checkpoint.

    Label counts tell if labels have changed, because the split of some rules does not depend on the labels.
    """
    recorded = (folder.about() or {}).get("federation") or {}
    splits = {recorded.get("split", federation.hash), split or federation.hash, federation.hash}
    counts = recorded.get("label_counts", federation.label_counts)
    if len(splits) > 1 or not np.array_equal(counts, federation.label_counts):
        raise UserError(
            f"the data or the split has changed since the run in {folder.path} began; restore it, or choose another "
            "--out"
        )


def _check_order_of_inputs(folder: RunFolder, columns: Sequence[str]) -> None:
    """Refuse a run with the same inputs in another order.

    Each category of a column is an input, and categories are sorted by name. Up to version 0.2, the categories
    true and false were spelled as in the file. Now they are spelled True and False, so their place can differ.
    """
    recorded = ((folder.about() or {}).get("federation") or {}).get("inputs", {}).get("columns", ())
    # Lower case, because names that differ only in case mean the same input.
    before, now = ([name.lower() for name in names] for names in (recorded, columns))
    if before != now and sorted(before) == sorted(now):
        raise UserError(
            f"the order of the table's inputs has changed since the run in {folder.path} began, from "
            f"{shorten(recorded)} to {shorten(columns)}; choose another --out"
        )


def _check_model(folder: RunFolder, expected: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Refuse a folder with another model.

    The configuration cannot tell, because it records only the class name of a model object.
    """
    if {name: p.shape for name, p in expected.items()} != {name: p.shape for name, p in saved.items()}:
        raise UserError(
            f"{folder.path} holds a run of another model (its parameters have other names or shapes); "
            "choose another --out, or delete that folder"
        )


def _use_threads(server: Server, recorder: Recorder, threads: int) -> None:
    """Use as many threads as the run started with, because their number affects the last bits of sums."""
    current = torch.get_num_threads()
    if server.device.type == "cpu" and threads != current:
        number = f"{threads} CPU thread{'s' * (threads != 1)}"
        recorder.notify([f"the run continues with {number}, the number it started with, instead of {current}"])
        torch.set_num_threads(threads)
