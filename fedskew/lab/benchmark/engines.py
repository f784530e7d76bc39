"""fedskew's engines, prepared to be timed: whole rounds as in a run, or local steps only."""

from __future__ import annotations

from collections.abc import Callable

from fedskew.engine import Assignment, LocalTraining, RoundKey, RoundWork, StackedEngine, arithmetic
from fedskew.experiment.loop import run_round
from fedskew.experiment.overlap import OverlappingRounds
from fedskew.experiment.preparation import default_threads, prepare
from fedskew.experiment.recorder import Recorder
from fedskew.experiment.round.server import Server
from fedskew.lab.benchmark.cases import Case
from fedskew.lab.benchmark.loop import collect
from fedskew.methods import Objective, Tensors


class FedskewEngine:
    """Trains any number of rounds on one of fedskew's engines."""

    def __init__(self, case: Case, engine: str) -> None:
        self._case = case
        prepared = prepare(case.config(engine), case.federation())
        self._config, self._method = prepared.config, prepared.method
        self._server = Server(prepared.federation, prepared.method, prepared.model, prepared.config)
        self._recorder = Recorder(prepared, self._server)
        self._overlapping = OverlappingRounds(self._server, self._recorder)
        self._state = self._server.start()

    @property
    def name(self) -> str:
        return self._server.engine_name

    @property
    def notices(self) -> list[str]:
        """The engine's notices. More may be added while it runs."""
        return self._server.notices

    @property
    def threads(self) -> int | None:
        """The number of CPU threads that the command line would set."""
        return default_threads(self._config)

    @property
    def visits(self) -> int:
        """Samples trained on in the last recorded round."""
        return self._recorder.rows[-1].visits if self._recorder.rows else 0

    def round(self) -> None:
        """Train one whole round, as in a run."""
        stage = self._server.next_stage(self._state)
        assert stage is not None
        with arithmetic(self._config.precision):
            if self._server.device.type == "cuda":
                self._state = self._overlapping.run_round(stage, self._state)
                return
            self._state, row = run_round(self._server, stage, self._state)
            self._recorder.add(row, self._state)

    def global_model(self) -> Tensors:
        return self._state.model.params

    def bare_steps(self) -> tuple[Callable[[], None], int]:
        """Return a function that trains locally, and the number of samples that a call trains.

        The function neither aggregates nor evaluates. On the stacked engine, it does one step of the clients that are
        stacked together. On other engines, or if the stacked engine gives a notice (for example, too little memory), it
        trains all local epochs of a round.
        """
        work, engine, precision = self.make_work(), self._server.engine, self._config.precision
        step, samples = self._stacked_step(work)
        if step is None:
            step, samples = (
                lambda: engine.train(work),
                work.local.epochs * sum(len(a.samples) for a in work.assignments),
            )

        def call() -> None:
            with arithmetic(precision):
                step()

        return call, samples

    def _stacked_step(self, work: RoundWork) -> tuple[Callable[[], object] | None, int]:
        """Return a function that does one step, and the number of samples in a step.

        A step trains the clients that are stacked together. On a CPU, these can be fewer than the round's clients. The
        function is None on other engines, or if the stacked engine gives a notice.
        """
        engine = self._server.engine
        if not isinstance(engine, StackedEngine):
            return None, 0
        notices_before = len(engine.notices)
        with arithmetic(self._config.precision):
            step, clients = engine.bare_step(work)
        return step if len(engine.notices) == notices_before else None, clients * self._case.setting.batch_size

    def close(self) -> None:
        self._server.close()

    def make_work(self) -> RoundWork:
        """Make a round's work: every participant trains from the current model."""
        federation, current, config = self._case.federation(), self._state.models["global"], self._config
        assert isinstance(self._method.objective, Objective)
        state = collect(self._method, lambda part: part.client_state(current.model.params))
        return RoundWork(
            objective=self._method.objective,
            solver=self._method.solver,
            server=self._method.server,
            sent=current.model,
            downlink=collect(self._method, lambda part: part.downlink(current.server_state)),
            companions={},
            assignments=[
                Assignment(client, federation.indices[client], federation.label_counts[client], state)
                for client in range(self._case.clients)
            ],
            local=LocalTraining(config.local_epochs, config.batch_size, config.lr, config.momentum),
            key=RoundKey(config.seed, 0, 0),
            weighting=self._method.weighting,
        )
