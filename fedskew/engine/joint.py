"""Rounds of several runs trained as one: the clients of all of them in one stack.

The runs have the same data, model, method and settings, and differ in seeds, splits or numbers of the method. What
their servers send then differs from client to client, and so do those numbers: they go with each into the stack, beside
what the client keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from fedskew.engine.contract import RoundResult, RoundWork
from fedskew.engine.data.transfer import to_device
from fedskew.engine.model.network import ModelState
from fedskew.engine.part_numbers import differing_numbers, without_numbers
from fedskew.engine.stacked.rows import Flats, Places
from fedskew.engine.stacked.slot_layouts import Layouts
from fedskew.methods.parts import Tensors


def joinable(one: RoundWork, other: RoundWork) -> bool:
    """Whether one stack can hold the clients of both."""
    return (
        one.local == other.local
        and differing_numbers(one.parts, other.parts) is not None
        and _shapes(one.packed()) == _shapes(other.packed())
        and _of_clients(one) == _of_clients(other)
    )


def _shapes(tensors: Tensors) -> dict[str, object]:
    return {name: (t.dtype, t.shape) for name, t in tensors.items()}


def _of_clients(work: RoundWork) -> tuple[object, ...]:
    """What the clients of a run bring along, for they all bring the same."""
    first = work.assignments[0]
    return _shapes(first.state), first.start is None


def joint_work(works: Sequence[RoundWork]) -> RoundWork:
    """The clients of all these runs, in their order."""
    first = works[0]
    differing = (where for work in works for where in differing_numbers(first.parts, work.parts) or ())
    varied = tuple(sorted(set(differing)))
    assignments = [replace(assignment, given=work) for work in works for assignment in work.assignments]
    joint = replace(first, assignments=assignments, varied=varied)
    return joint.with_parts(without_numbers(first.parts, varied))


def shared_out(result: RoundResult, works: Sequence[RoundWork]) -> list[RoundResult]:
    """The result of joint work, to each run what its own clients came back with."""
    results, first = [], 0
    for work in works:
        rows = slice(first, first + len(work.assignments))
        first = rows.stop
        trained = ModelState(_rows(result.trained.params, rows), _rows(result.trained.buffers, rows))
        results.append(
            RoundResult(
                trained=trained,
                uplink=_rows(result.uplink, rows),
                states=_rows(result.states, rows),
                loss=result.loss[rows],
                tally=_rows(result.tally, rows),
                visits=result.visits[rows],
            )
        )
    return results


def _rows(tensors: Tensors, rows: slice) -> Tensors:
    return {name: t[rows] for name, t in tensors.items()}


class SentByRuns:
    """What the servers of several runs send, on the device: a row for each, of which their clients are given copies."""

    def __init__(self, layouts: Layouts, work: RoundWork, device: torch.device) -> None:
        places: dict[int, int] = {}
        of_client = [places.setdefault(id(a.given), len(places)) for a in work.assignments]
        firsts = [of_client.index(place) for place in range(len(places))]
        runs = [work.of(work.assignments[first]) for first in firsts]

        def stacked(tensors_of: Callable[[RoundWork], Tensors]) -> Tensors:
            each = [tensors_of(run) for run in runs]
            return {name: torch.stack([tensors[name] for tensors in each]) for name in each[0]}

        self._run = to_device(torch.tensor(of_client), device)
        self._rows: dict[str, Flats] = {
            "params": layouts.params.flat(stacked(lambda run: run.sent.params)),
            "buffers": layouts.buffers.flat(stacked(lambda run: run.sent.buffers)),
            "given": layouts.given.flat(stacked(lambda run: run.packed(work.varied))),
        }

    def of(self, kind: str, clients: Places) -> Flats:
        """That kind of memory as these clients are given it."""
        runs = self._run[clients]
        return {name: flat.index_select(0, runs) for name, flat in self._rows[kind].items()}
