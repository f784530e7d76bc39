"""Where a run goes on: at the last checkpoint of its folder, or at the start; a finished run is read back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedskew.errors import UserError
from fedskew.experiment.preparation import Prepared
from fedskew.experiment.recorder import Recorder
from fedskew.experiment.result import Result
from fedskew.experiment.round.server import Server
from fedskew.experiment.round.state import RunState
from fedskew.experiment.storage.about import about
from fedskew.experiment.storage.checkpoints import Checkpoint
from fedskew.experiment.storage.run_folder import RunFolder
from fedskew.methods import unpack
from fedskew.models.concatenation import count_encoders, with_encoders


def begin_or_resume(prepared: Prepared, server: Server, folder: RunFolder | None, recorder: Recorder) -> RunState:
    """The state to go on from; the recorder is given the rows up to it."""
    state = server.start()
    if folder is None:
        recorder.start([], state)
        return state
    checkpoint = folder.load_checkpoint()
    _require_space(server, folder, state, checkpoint)
    recorder.notify(folder.warnings)
    if checkpoint is None:
        folder.truncate_rounds(-1)
        folder.write_about(about(prepared))
        state = server.start(folder.client_states())
        recorder.start([], state)
        return state
    _check_checkpoint(prepared, server, folder, checkpoint)
    _use_threads(server, recorder, checkpoint.meta.get("threads", torch.get_num_threads()))
    server.resume_with(checkpoint.meta.get("engine"))
    folder.truncate_rounds(checkpoint.round)
    clients = folder.client_states(checkpoint.clients)
    state = RunState.restored(checkpoint.tensors, checkpoint.meta, clients, server.device)
    recorder.start(folder.rounds(), state)
    return state


def recall(server: Server, folder: RunFolder, recorder: Recorder) -> Result:
    """The result of a run that finished earlier."""
    tensors, meta = folder.load_model()
    network = server.network
    module = with_encoders(network.module(network.state()), meta.get("encoders", 0))
    buffers = dict(module.named_buffers())
    own = dict(module.named_parameters()) if count_encoders(module) else network.state().params
    _check_model(folder, own, {name: t for name, t in tensors.items() if name not in buffers})
    module.load_state_dict({name: t.to(server.device) for name, t in tensors.items()}, strict=False)
    summary = folder.summary() or {}
    engine = summary.get("engine", server.engine_name)
    return recorder.result(module, folder.rounds(), engine, bool(summary.get("stopped_early")))


def _require_space(server: Server, folder: RunFolder, start: RunState, checkpoint: Checkpoint | None) -> None:
    """Room for two checkpoints, a third while it is written, the model, and the client states still to come."""
    shared = 4 * sum(t.nbytes for t in start.tensors().values())
    present = 0 if checkpoint is None else sum(map(len, checkpoint.clients.values()))
    folder.require_space(shared + server.client_bytes(start, present))


def _check_checkpoint(prepared: Prepared, server: Server, folder: RunFolder, checkpoint: Checkpoint) -> None:
    if checkpoint.meta["split"] != prepared.federation.hash:
        raise UserError(
            f"the data or their split changed since {folder.path} was begun; restore them, or choose another --out"
        )
    models = [unpack(f"{name}:params", checkpoint.tensors) for name in checkpoint.meta["trainees"]]
    own = server.network.state().params
    _check_model(folder, own, next((m for m in models if m.keys() == own.keys()), models[0]))


def _check_model(folder: RunFolder, own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Two models of a user may share the name of their class, but the tensors of one do not fit the other."""
    if {name: p.shape for name, p in own.items()} != {name: p.shape for name, p in saved.items()}:
        raise UserError(
            f"{folder.path} holds a run of another model (its parameters have other names or shapes); "
            "choose another --out, or delete that folder"
        )


def _use_threads(server: Server, recorder: Recorder, threads: int) -> None:
    """Use as many threads as the run began with: their number decides the order of sums, hence the last bits."""
    now = torch.get_num_threads()
    if server.device.type == "cpu" and threads != now:
        recorder.notify([f"continues with {threads} CPU threads, as it began, instead of {now}"])
        torch.set_num_threads(threads)
