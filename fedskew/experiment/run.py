"""One method on one federation with one seed: from the first round, or from where a folder stands, to the end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedskew.data import Federation
from fedskew.engine import Fetch, RoundResult
from fedskew.errors import UserError
from fedskew.experiment.callbacks import Callback
from fedskew.experiment.config import Config, with_values
from fedskew.experiment.loop import RoundDone, RoundLoop
from fedskew.experiment.preparation import Prepared, prepare
from fedskew.experiment.result import Result
from fedskew.experiment.round.phases import RoundInProgress
from fedskew.experiment.round.row import RoundRow
from fedskew.experiment.round.server import Server
from fedskew.experiment.round.state import RunState
from fedskew.experiment.storage.about import about, described
from fedskew.experiment.storage.run_folder import Checkpoint, RunFolder
from fedskew.methods import Method, Part, unpack
from fedskew.models.concatenation import count_encoders, with_encoders


def run(
    federation: Federation,
    method: str | Method | Part = "fedvls",
    model: str | nn.Module = "auto",
    *,
    out: str | Path | None = None,
    method_params: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> Result:
    """Run a method on a federation; `settings` are the keys of a configuration, such as `rounds` and `lr`.

    With `out`, the run is kept in that folder, and continues there if it was interrupted.
    """
    if not isinstance(federation, Federation):
        raise UserError(
            f"federation is {federation!r}; expected one, such as fedskew.federation('digits', Dirichlet(10))"
        )
    values: dict[str, Any] = {"seed": federation.seed, **settings}
    if isinstance(method, str):
        values["method"] = {"name": method, **(method_params or {})}
    elif method_params:
        raise UserError("method_params are for a method given by name; set them on the object")
    if isinstance(model, str):
        values["model"] = model
    values["data"] = federation.dataset.name
    config = with_values(Config(), values)
    own_method = None if isinstance(method, str) else method
    prepared = prepare(config, federation, own_method, None if isinstance(model, str) else model)
    return run_prepared(prepared, out, callbacks)


def run_prepared(
    prepared: Prepared,
    out: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    server: Server | None = None,
) -> Result:
    """Run what `prepare` made ready, by a simulation unless another `server` is given."""
    # The server first: what it refuses must not leave a folder behind.
    server = server or Server(prepared.federation, prepared.method, prepared.model, prepared.config)
    rounds = rounds_of(prepared, server, out, callbacks)
    try:
        under_way = next(rounds)
        while True:
            under_way = rounds.send(_trained(server, under_way, rounds))
    except StopIteration as end:
        result: Result = end.value
        return result


Rounds = Generator[RoundInProgress, tuple[RoundResult, float], Result]
"""A run that somebody else trains the clients of: it gives a round's work, and is sent the result and the seconds that
were spent on it."""


def rounds_of(prepared: Prepared, server: Server, out: str | Path | None, callbacks: Sequence[Callback]) -> Rounds:
    """The run, round by round."""
    with contextlib.closing(server):
        if out is None:
            return (yield from _Run(prepared, server, None, callbacks).rounds())
        with RunFolder(out).open(prepared.config, server.repeated_by) as folder:
            return (yield from _Run(prepared, server, folder, callbacks).rounds())


def _trained(server: Server, under_way: RoundInProgress, rounds: Rounds) -> tuple[RoundResult, float]:
    began = time.perf_counter()
    try:
        result = server.train(under_way)
    except BaseException as error:
        rounds.throw(error)  # it has a folder to close
        raise
    return result, time.perf_counter() - began


class _Run:
    """A run under way."""

    def __init__(
        self, prepared: Prepared, server: Server, folder: RunFolder | None, callbacks: Sequence[Callback]
    ) -> None:
        self._prepared = prepared
        self._server = server
        self._folder = folder
        self._callbacks = callbacks
        self._rows: list[RoundRow] = []

    def rounds(self) -> Rounds:
        if self._folder is not None and self._folder.finished:
            return self._recalled(self._folder)
        state = self._begin()
        for callback in self._callbacks:
            callback.on_start(self._prepared, state, self._server.rounds_ahead(state))
        state = yield from RoundLoop(self._server, self._one_round, self._secured).rounds(state)
        return self._end(state)

    def _begin(self) -> RunState:
        """The state to go on from: the folder's last checkpoint, or the start."""
        state = self._server.start()
        if self._folder is not None:
            checkpoint = self._folder.load_checkpoint()
            self._require_space(self._folder, state, checkpoint)
            self._notify(self._folder.warnings)
            if checkpoint is not None:
                self._check_split(checkpoint.meta)
                models = [unpack(f"{name}:params", checkpoint.tensors) for name in checkpoint.meta["trainees"]]
                own = self._server.network.state().params
                self._check_model(own, next((m for m in models if m.keys() == own.keys()), models[0]))
                self._use_threads(checkpoint.meta.get("threads", torch.get_num_threads()))
                self._server.resume_with(checkpoint.meta.get("engine"))
                self._folder.truncate_rounds(checkpoint.round)
                self._rows = self._folder.rounds()
                clients = self._folder.client_states(checkpoint.clients)
                return RunState.restored(checkpoint.tensors, checkpoint.meta, clients, self._server.device)
            self._folder.truncate_rounds(-1)
            self._folder.write_about(about(self._prepared))
            state = self._server.start(self._folder.client_states())
        self._record(RoundRow(round=0, evaluation=self._server.evaluate(state.model)))
        return state

    def _require_space(self, folder: RunFolder, start: RunState, checkpoint: Checkpoint | None) -> None:
        """For two checkpoints, a third being written and the model; and for the client states still to come."""
        shared = 4 * sum(t.nbytes for t in start.tensors().values())
        there = 0 if checkpoint is None else sum(map(len, checkpoint.clients.values()))
        folder.require_space(shared + self._server.client_bytes(start, there))

    def _check_split(self, meta: Mapping[str, Any]) -> None:
        if meta["split"] != self._prepared.federation.hash:
            raise UserError(
                f"the data or their split changed since {self._folder and self._folder.path} was begun; "
                "restore them, or choose another --out"
            )

    def _check_model(self, own: Mapping[str, torch.Tensor], kept: Mapping[str, torch.Tensor]) -> None:
        """Two models of a user's may share the name of their class; the tensors of one do not fit the other."""
        if {name: p.shape for name, p in own.items()} != {name: p.shape for name, p in kept.items()}:
            raise UserError(
                f"{self._folder and self._folder.path} holds a run of another model (its parameters have other names "
                "or shapes); choose another --out, or delete that folder"
            )

    def _use_threads(self, threads: int) -> None:
        """As many as the run began with: their number decides the order of sums, hence the last bits."""
        if self._server.device.type == "cpu" and threads != torch.get_num_threads():
            self._notify([f"continues with {threads} CPU threads, as it began, instead of {torch.get_num_threads()}"])
            torch.set_num_threads(threads)

    def _secured(self, state: RunState) -> Fetch | None:
        """What the checkpoint of this state will hold, on its way from the device; None if there will be none."""
        ahead, every = self._server.rounds_ahead(state), self._prepared.config.checkpoint_every
        if self._folder is None or (ahead and state.round % every):
            return None
        return Fetch.beside(state.tensors(), self._server.device)

    def _one_round(self, done: RoundDone) -> None:
        state = done.state
        self._record(done.row)
        if self._folder is not None and done.secured is not None:
            meta = state.meta() | self._circumstances()
            tensors, versions = done.secured.read(), state.clients.versions
            self._folder.save_checkpoint(state.round, tensors, meta, versions, wait=False)
        self._notify(self._server.engine.notices)
        ahead = self._server.rounds_ahead(state)
        for callback in self._callbacks:
            callback.on_round(done.row, ahead)

    def _circumstances(self) -> dict[str, Any]:
        """What must be the same when the run goes on, for it to end with the same bits."""
        return {
            "split": self._prepared.federation.hash,
            "threads": torch.get_num_threads(),
            "engine": self._server.engine.name,
        }

    def _record(self, row: RoundRow) -> None:
        self._rows.append(row)
        if self._folder is not None:
            self._folder.append_round(row)

    def _notify(self, lines: list[str]) -> None:
        for line in lines:
            for callback in self._callbacks:
                callback.on_notice(line)
        lines.clear()

    def _end(self, state: RunState) -> Result:
        module = self._server.module(state)
        result = self._result(module, self._rows, self._server.engine.name)
        if self._folder is not None:
            tensors, encoders = {**state.model.params, **state.model.buffers}, count_encoders(module)
            about: dict[str, Any] = {"config": self._prepared.config.to_mapping()}
            if encoders:
                tensors, about = {**dict(module.named_parameters()), **tensors}, {**about, "encoders": encoders}
            self._folder.save_model(tensors, about)
            self._folder.write_summary(result.summary())
        for callback in self._callbacks:
            callback.on_end(result)
        return result

    def _recalled(self, folder: RunFolder) -> Result:
        """The result of a run that was finished before."""
        tensors, meta = folder.load_model()
        network = self._server.network
        module = with_encoders(network.module(network.state()), meta.get("encoders", 0))
        buffers = dict(module.named_buffers())
        own = dict(module.named_parameters()) if count_encoders(module) else network.state().params
        self._check_model(own, {name: t for name, t in tensors.items() if name not in buffers})
        module.load_state_dict({name: t.to(self._server.device) for name, t in tensors.items()}, strict=False)
        engine = (folder.summary() or {}).get("engine", self._prepared.config.engine)
        result = self._result(module, folder.rounds(), engine)
        for callback in self._callbacks:
            callback.on_notice(f"{folder.path} is finished already; nothing was run")
            callback.on_end(result)
        return result

    def _result(self, module: nn.Module, rows: list[RoundRow], engine: str) -> Result:
        recorded = None if self._folder is None else self._folder.about()
        return Result(
            config=self._prepared.config,
            history=rows,
            source=module.to(torch.device("cpu")),
            engine=engine,
            folder=None if self._folder is None else self._folder.path,
            about=recorded or {"federation": described(self._prepared.federation)},
        )
