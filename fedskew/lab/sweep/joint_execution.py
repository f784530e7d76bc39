"""Several jobs from start to records as one: runs of a kind (`bundles`), which share a stack.

Each has its record, its folder and its end as if it ran by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from fedskew.experiment.preparation import Prepared
from fedskew.experiment.round.server import Server
from fedskew.experiment.run import rounds_of
from fedskew.experiment.together import run_together
from fedskew.lab.sweep.execution import Attempt, execute, free
from fedskew.lab.sweep.job import Job, Outcome, Terms

TellOf = Callable[[int, int, int, float | None], None]
"""Takes which job it is about, the rounds done, the rounds in all and the last accuracy."""


def execute_together(jobs: Sequence[Job], terms: Terms, tell: TellOf) -> Iterator[tuple[int, Outcome]]:
    """Run a bundle's jobs; which of them ended, and what came of it, in the order of their ends."""
    attempts = [Attempt(job, terms, partial(tell, place)) for place, job in enumerate(jobs)]
    if len(jobs) == 1:
        yield 0, execute(jobs[0], terms, partial(tell, 0))
        return
    try:
        prepared: dict[int, Prepared] = {}
        for place, attempt in enumerate(attempts):
            try:
                prepared[place] = attempt.prepare()
            except Exception as error:
                yield place, attempt.outcome(error)
        if any(one.config.engine != "stacked" for one in prepared.values()):
            for place in prepared:
                yield place, execute(jobs[place], terms, partial(tell, place))
            return
        yield from _in_one_stack(attempts, prepared)
    finally:
        free()


def _in_one_stack(attempts: Sequence[Attempt], prepared: dict[int, Prepared]) -> Iterator[tuple[int, Outcome]]:
    servers: dict[int, Server] = {}
    for place, this in prepared.items():
        try:
            servers[place] = _server(this, [(prepared[other], server) for other, server in servers.items()])
        except Exception as error:
            yield place, attempts[place].outcome(error)
    runs = []
    for place, server in servers.items():
        attempt = attempts[place]
        attempt.together = len(servers)
        runs.append((server, rounds_of(prepared[place], server, attempt.folder, [attempt.watch])))
    places = list(servers)
    for number, ended in run_together(runs):
        yield places[number], attempts[places[number]].outcome(ended)


def _server(this: Prepared, others: Sequence[tuple[Prepared, Server]]) -> Server:
    """On the workbench of a run with the same data, if there is one."""
    same = (server for other, server in others if other.federation.dataset is this.federation.dataset)
    return Server(this.federation, this.method, this.model, this.config, next(same, None))
