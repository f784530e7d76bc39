"""fedskew's own engines as contenders: whole rounds as the server of a run does them, and their local steps alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from fedskew.engine import Assignment, LocalTraining, RoundKey, RoundWork, StackedEngine, arithmetic
from fedskew.experiment.loop import RoundLoop
from fedskew.experiment.preparation import prepare
from fedskew.experiment.round.phases import RoundInProgress
from fedskew.experiment.round.server import Server
from fedskew.lab.benchmark.cases import Case
from fedskew.lab.benchmark.loop import told
from fedskew.methods import Objective, Tensors


class OwnEngine:
    """A run that goes on for ever."""

    def __init__(self, case: Case, engine: str) -> None:
        self._case = case
        prepared = prepare(case.config(engine), case.federation())
        self._config, self._method = prepared.config, prepared.method
        self._server = Server(prepared.federation, prepared.method, prepared.model, prepared.config)
        self._state = self._server.start()
        self._rounds = RoundLoop(self._server, lambda _: None).rounds(self._state)
        self._next: RoundInProgress | None = None
        self.visits = 0
        """Samples trained on in the last round."""

    @property
    def name(self) -> str:
        return self._server.engine.name

    @property
    def notices(self) -> list[str]:
        """Of the engine; more may come while it runs."""
        return self._server.engine.notices

    @property
    def threads(self) -> int | None:
        """As the command line gives them to such a run."""
        one = self._config.engine == "stacked" and self._config.device == "cpu"
        return 1 if one and not os.environ.get("OMP_NUM_THREADS") else None

    def round(self) -> None:
        """One round, with everything that belongs to it, as in a run's loop of rounds."""
        under_way = next(self._rounds) if self._next is None else self._next
        began = time.perf_counter()
        result = self._server.train(under_way)
        self.visits = int(result.visits.sum())
        self._next = self._rounds.send((result, time.perf_counter() - began))
        self._state = self._next.state

    def global_model(self) -> Tensors:
        return self._state.model.params

    def bare_steps(self) -> tuple[Callable[[], None], int]:
        """Local training without aggregation and evaluation, and the samples that one call of it trains on.

        An engine that has no step to give, or too little memory for one of all clients, trains a round's epochs.
        """
        work, engine, precision = self.work(), self._server.engine, self._config.precision
        step, samples = self._step_of_all(work)
        if step is None:
            step, samples = (
                lambda: engine.train(work),
                work.local.epochs * sum(len(a.samples) for a in work.assignments),
            )

        def call() -> None:
            with arithmetic(precision):
                step()

        return call, samples

    def _step_of_all(self, work: RoundWork) -> tuple[Callable[[], object] | None, int]:
        """A step of as many clients as are stacked at a time, on a CPU perhaps not all of them, and its samples."""
        engine = self._server.engine
        if not isinstance(engine, StackedEngine):
            return None, 0
        said = len(engine.notices)
        with arithmetic(self._config.precision):
            step, clients = engine.bare_step(work)
        return step if len(engine.notices) == said else None, clients * self._case.setting.batch_size

    def close(self) -> None:
        """End the server's engine."""
        self._server.close()

    def work(self) -> RoundWork:
        """A round's training of every participant, from the present model."""
        federation, trainee, config = self._case.federation(), self._state.trainees["global"], self._config
        assert isinstance(self._method.objective, Objective)
        state = told(self._method, lambda part: part.client_state(trainee.model.params))
        return RoundWork(
            objective=self._method.objective,
            solver=self._method.solver,
            server=self._method.server,
            sent=trainee.model,
            downlink=told(self._method, lambda part: part.downlink(trainee.server)),
            companions={},
            assignments=[
                Assignment(client, federation.indices[client], federation.label_counts[client], state)
                for client in range(self._case.clients)
            ],
            local=LocalTraining(config.local_epochs, config.batch_size, config.lr, config.momentum),
            key=RoundKey(config.seed, 0, 0),
        )
