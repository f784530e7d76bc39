"""Record a run: write rows, checkpoints and the final model to its folder, and call its callbacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fedskew.engine import Fetch
from fedskew.experiment.callbacks import Callback
from fedskew.experiment.preparation import Prepared
from fedskew.experiment.result import Result
from fedskew.experiment.round.record import RoundRow
from fedskew.experiment.round.server import Server
from fedskew.experiment.round.state import RunState
from fedskew.experiment.stopped_runs import describe_stop
from fedskew.experiment.storage.about import describe_federation
from fedskew.experiment.storage.run_folder import RunFolder
from fedskew.metrics.scores import Scores
from fedskew.metrics.site_scores import SiteScore


class Recorder:
    """Records one run. Without a folder, it only keeps the rows and calls the callbacks."""

    def __init__(
        self, prepared: Prepared, server: Server, folder: RunFolder | None = None, callbacks: Sequence[Callback] = ()
    ) -> None:
        self._prepared, self._server, self._folder, self._callbacks = prepared, server, folder, callbacks
        self.rows: list[RoundRow] = []
        self._stopped_by: list[Callback] = []

    @property
    def stopped(self) -> bool:
        """Whether a callback has stopped the run."""
        return bool(self._stopped_by)

    def start(self, rows: list[RoundRow], state: RunState) -> None:
        """Continue after these rows. Without any, record an evaluation of the initial model as row 0."""
        self.rows = rows
        if not rows:
            self._append(RoundRow(0, evaluation=self._server.evaluate_model(state.model)))
        left = self._server.rounds_left(state)
        for callback in self._callbacks:
            callback.on_start(self._prepared, state, left)
        for callback in self._callbacks if state.round else ():
            if callback.on_resume(rows) and left:
                self._stopped_by.append(callback)

    def snapshot(self, state: RunState) -> Fetch | None:
        """Start copying this state's tensors to the host for a checkpoint. Return None if no checkpoint is due."""
        left, every = self._server.rounds_left(state), self._prepared.config.checkpoint_every
        if self._folder is None or (left and state.round % every):
            return None
        return Fetch.in_parallel(state.tensors(), self._server.device)

    def add(self, row: RoundRow, state: RunState, snapshot: Fetch | None = None) -> None:
        """Record a round: write its row and a checkpoint if one is due. Then ask the callbacks whether to stop."""
        self._append(row)
        snapshot = snapshot or self.snapshot(state)
        if self._folder is not None and snapshot is not None:
            meta = state.meta() | self._fixed_on_resume()
            self._folder.save_checkpoint(state.round, snapshot.read(), meta, state.clients.versions, wait=False)
        self.notify(self._server.notices)
        left = self._server.rounds_left(state)
        for callback in self._callbacks:
            if callback.on_round(row, left) and left:
                self._stopped_by.append(callback)

    def notify(self, lines: list[str]) -> None:
        """Pass these lines to the callbacks, and empty the list."""
        for line in lines:
            for callback in self._callbacks:
                callback.on_notice(line)
        lines.clear()

    def finish(self, state: RunState) -> Result:
        """Write the final model, its predictions if requested, and the summary. Call the callbacks' `on_end`.

        Scores such as AUROC are computed only here, because they need the probabilities of every sample.
        """
        module = self._server.module(state)
        scores = self._server.scores(state) if self.rows[-1].is_evaluated else None
        sites = self._server.site_scores(state)
        result = self.result(module, self.rows, self._server.engine_name, self.stopped, scores, sites)
        if self._folder is not None:
            tensors, encoders = {**state.model.params, **state.model.buffers}, self._server.encoder_count(state)
            meta: dict[str, Any] = {"config": self._prepared.config.to_mapping()}
            if encoders:  # they are frozen, so the state lacks their parameters
                tensors, meta = {**dict(module.named_parameters()), **tensors}, {**meta, "encoders": encoders}
            elif self._server.saves_whole_model:
                tensors = module.state_dict()
            self._folder.save_model(tensors, meta)
            self._save_predictions(self._folder, state)
            stop = describe_stop(self._stopped_by) if self._stopped_by else {}
            self._folder.write_summary(result.summary() | stop)
        for callback in self._callbacks:
            callback.on_end(result)
        return result

    def result(
        self,
        module: nn.Module,
        rows: list[RoundRow],
        engine: str,
        stopped: bool,
        scores: Scores | None,
        sites: Mapping[str, SiteScore],
    ) -> Result:
        """Make the result of a run that ended with this model."""
        recorded = None if self._folder is None else self._folder.about()
        return Result(
            config=self._prepared.config,
            history=rows,
            model_or_loader=module.to(torch.device("cpu")),
            engine=engine,
            folder=None if self._folder is None else self._folder.path,
            about=recorded or {"federation": describe_federation(self._prepared.federation)},
            stopped_early=stopped,
            scores=scores,
            site_scores=sites,
        )

    def _save_predictions(self, folder: RunFolder, state: RunState) -> None:
        if not self._prepared.config.save_predictions or (predicted := self._server.predict(state)) is None:
            return
        from fedskew.experiment.storage.predictions import write_predictions

        write_predictions(folder.predictions_path, self._prepared.federation.dataset, *predicted)

    def _append(self, row: RoundRow) -> None:
        self.rows.append(row)
        if self._folder is not None:
            self._folder.append_round(row)

    def _fixed_on_resume(self) -> dict[str, Any]:
        """Settings that a resumed run must keep, so that its result is the same to the last bit."""
        return {
            "split": self._prepared.federation.hash,
            "threads": torch.get_num_threads(),
            "engine": self._server.engine_name,
        }
