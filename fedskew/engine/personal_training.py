"""Local training of methods with a personal part (`methods.personal`).

The training has phases, and some tensors stay on the clients. Each phase is ordinary work for an engine. An engine
trains only the `params` of a `ModelState`, so parameters that a phase does not train are among its `buffers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from torch import Tensor

from fedskew.engine.contract import Engine, RoundResult, RoundWork
from fedskew.engine.model.network import ModelState
from fedskew.methods.fedavg import SGD, Mean
from fedskew.methods.hook_results import wrong_tensors
from fedskew.methods.parts import Solver, Tensors, pack, same_form, unpack
from fedskew.methods.personal import PERSONAL, Personal, Phase, SharedSolver, without_personal


def initial_personal(part: Personal, personal_names: frozenset[str], initial: ModelState) -> Tensors:
    """Return the personal tensors in a client's state before its first round, in host memory."""
    tensors = {**initial.params, **initial.buffers}
    names = tensors.keys() if part.own_solver() is not None else personal_names & tensors.keys()
    own = {name: t for name, t in tensors.items() if name in names}
    return pack(PERSONAL, {name: t.cpu() for name, t in own.items()})


def personal_model(received: ModelState, state: Mapping[str, Tensor]) -> ModelState:
    """Return a client's model: the received model, with the client's personal tensors in place of received ones.

    If the client has a second model, all tensors of the second model are personal. So the result is the second model.
    """
    own = unpack(PERSONAL, state)

    def chosen(name: str, tensor: Tensor) -> Tensor:
        return own[name].to(tensor.device) if name in own else tensor

    return ModelState(
        {name: chosen(name, t) for name, t in received.params.items()},
        {name: chosen(name, t) for name, t in received.buffers.items()},
    )


def train_personal(engine: Engine, work: RoundWork, part: Personal) -> RoundResult:
    """Train the phases of a round, one after another, and then the clients' second models if there are any."""
    if type(part).start is not Personal.start:
        work = _with_starts(work, part)
    result = _train_phases(engine, work, part)
    solver = part.own_solver()
    return result if solver is None else _with_own_models(engine, work, solver, len(part.phases()), result)


def _with_starts(work: RoundWork, part: Personal) -> RoundWork:
    """Replace each client's personal tensors by those from which local training starts (`Personal.start`)."""
    first = next(iter(unpack(PERSONAL, work.assignments[0].state).values()), None)
    if first is None:
        return work
    received = {name: t.to(first.device) for name, t in (*work.sent.params.items(), *work.sent.buffers.items())}

    def started(state: Tensors) -> Tensors:
        own = unpack(PERSONAL, state)
        found = part.start(_copied(own), _copied(received))  # the hook may write into its arguments
        if not same_form(found, own):
            raise wrong_tensors(part, "start", found, own, "personal tensor")
        return {**state, **pack(PERSONAL, {name: t.detach() for name, t in found.items()})}

    return replace(work, assignments=[replace(a, state=started(a.state)) for a in work.assignments])


def _copied(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: t.clone() for name, t in tensors.items()}


def _train_phases(engine: Engine, work: RoundWork, part: Personal) -> RoundResult:
    """Train the phases.

    Loss, tally, uplink and the method's states are those of the phase that trains shared parameters.
    """
    carried: Tensors = {}
    shared = last = None
    visits = np.zeros(len(work.assignments), np.int64)
    for number, phase in enumerate(part.phases()):
        last = engine.train(phase_work(work, phase, number, carried, has_second_model=part.own_solver() is not None))
        shared = last if phase.trains != "personal" else shared
        whole = {**last.trained.params, **last.trained.buffers}
        changed = last.trained.params.keys() | work.sent.buffers.keys() | work.personal_names
        carried |= {n: t for n, t in whole.items() if n in changed}
        visits = visits + last.visits
    assert shared is not None
    assert last is not None
    whole = {**last.trained.params, **last.trained.buffers}
    return replace(
        shared,
        trained=ModelState(
            {n: whole[n] for n in work.sent.params if n not in work.personal_names},
            {n: whole[n] for n in work.sent.buffers if n not in work.personal_names},
        ),
        states=shared.states | pack(PERSONAL, {n: whole[n] for n in sorted(work.personal_names)}),
        visits=visits,
    )


def phase_work(
    work: RoundWork, phase: Phase, number: int, carried: Mapping[str, Tensor], has_second_model: bool = False
) -> RoundWork:
    """Return the work of one phase. `carried` has the tensors that earlier phases may have changed, stacked by client.

    `has_second_model` means that each client also has a second model, which the phases do not train.
    """
    trained = {
        "all": work.sent.params.keys(),
        "shared": work.sent.params.keys() - work.personal_names,
        "personal": work.sent.params.keys() & work.personal_names,
    }[phase.trains]
    sent = ModelState(
        {n: p for n, p in work.sent.params.items() if n in trained},
        {**work.sent.buffers, **{n: p for n, p in work.sent.params.items() if n not in trained}},
    )
    phase_of_round = replace(
        work,
        sent=sent,
        personal=None,
        assignments=[
            replace(a, state=_phase_state(a.state, {n: t[row] for n, t in carried.items()}, has_second_model))
            for row, a in enumerate(work.assignments)
        ],
        local=replace(work.local, epochs=work.local.epochs if phase.epochs is None else phase.epochs),
        key=replace(work.key, phase=number),
    )
    if phase.trains == "personal":  # the method's other parts see only the shared tensors
        return replace(phase_of_round, solver=SGD(), server=Mean(), weighting=None)
    if trained & work.personal_names and type(work.solver).direction is not Solver.direction:
        return replace(phase_of_round, solver=SharedSolver(work.solver, work.personal_names))
    return phase_of_round


def _phase_state(state: Tensors, carried: Tensors, has_second_model: bool) -> Tensors:
    """Return a client's state at the start of a phase, without its second model.

    `carried` is what earlier phases trained. It gets the prefix `PERSONAL`, also its shared tensors, because
    `RoundWork.start` replaces received tensors by those with this prefix.
    """
    return without_personal(state) if has_second_model else {**state, **pack(PERSONAL, carried)}


def _with_own_models(engine: Engine, work: RoundWork, solver: Solver, number: int, result: RoundResult) -> RoundResult:
    """Train the clients' second models with this solver, and add them to the clients' states."""
    starts = [unpack(PERSONAL, a.state) for a in work.assignments]
    own_work = replace(
        work,
        solver=solver,
        server=Mean(),
        weighting=None,
        personal=None,
        assignments=[
            replace(
                a,
                state=without_personal(a.state),
                start=ModelState({n: own[n] for n in work.sent.params}, {n: own[n] for n in work.sent.buffers}),
            )
            for a, own in zip(work.assignments, starts, strict=True)
        ],
        key=replace(work.key, phase=number),
    )
    trained = engine.train(own_work)
    models = pack(PERSONAL, {**trained.trained.params, **trained.trained.buffers})
    return replace(result, states=result.states | models, visits=result.visits + trained.visits)
