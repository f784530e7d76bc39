"""A round's work and its result as facts and named tensors, in which form they go from process to process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import cast

import numpy as np
import torch
from torch import Tensor

from fedskew.engine.contract import Assignment, LocalTraining, RoundResult, RoundWork
from fedskew.engine.data.batches import RoundKey
from fedskew.engine.model.network import ModelState
from fedskew.engine.parallel.messages import Facts
from fedskew.methods.parts import Objective, Part, ServerRule, Solver, Tensors, pack, unpack


def work_facts(work: RoundWork) -> Facts:
    """What is not tensors; the parts of the method are known to the receiver."""
    return {
        "companions": _needed(work),
        "clients": [a.client for a in work.assignments],
        "ends": np.cumsum([len(a.samples) for a in work.assignments]).tolist(),
        "local": asdict(work.local),
        "key": asdict(work.key),
    }


def work_tensors(work: RoundWork) -> Mapping[str, Tensor | Sequence[Tensor]]:
    states = [a.state for a in work.assignments]
    tensors: dict[str, Tensor | Sequence[Tensor]] = {
        **_model("sent", work.sent),
        **pack("downlink", work.downlink),
        "samples": torch.from_numpy(np.concatenate([a.samples for a in work.assignments])),
        "label_counts": torch.from_numpy(np.stack([a.label_counts for a in work.assignments])),
        **{f"state/{name}": [state[name] for state in states] for name in states[0]},
        **_starts(work),
    }
    for place, name in enumerate(_needed(work)):
        tensors |= _model(f"companion{place}", work.companions[name])
    return tensors


def work_of(parts: tuple[Part, ...], facts: Facts, tensors: Tensors) -> RoundWork:
    """The share of the round that `facts["share"]` names."""
    objective, solver, server = parts
    starts = [0, *facts["ends"]]
    samples, counts = tensors["samples"].numpy(), tensors["label_counts"].numpy()
    states = unpack("state", tensors)
    return RoundWork(
        objective=cast(Objective, objective),
        solver=cast(Solver, solver),
        server=cast(ServerRule, server),
        sent=_model_of("sent", tensors),
        downlink=unpack("downlink", tensors),
        companions={name: _model_of(f"companion{i}", tensors) for i, name in enumerate(facts["companions"])},
        assignments=[
            Assignment(
                client=facts["clients"][row],
                samples=samples[starts[row] : starts[row + 1]],
                label_counts=counts[row],
                state={name: t[row] for name, t in states.items()},
                start=_start_of(row, tensors),
            )
            for row in facts["share"]
        ],
        local=LocalTraining(**facts["local"]),
        key=RoundKey(**facts["key"]),
    )


def _starts(work: RoundWork) -> Mapping[str, Sequence[Tensor]]:
    """Where clients go on from models of their own, which all of them do then, or none."""
    starts = [_model("start", a.start) for a in work.assignments if a.start is not None]
    return {name: [start[name] for start in starts] for name in starts[0]} if starts else {}


def _start_of(row: int, tensors: Tensors) -> ModelState | None:
    starts = _model_of("start", tensors)
    if not starts.params:
        return None
    return ModelState({n: t[row] for n, t in starts.params.items()}, {n: t[row] for n, t in starts.buffers.items()})


def result_tensors(result: RoundResult) -> Tensors:
    return {
        **_model("trained", result.trained),
        **pack("uplink", result.uplink),
        **pack("states", result.states),
        **pack("tally", result.tally),
        "loss": result.loss,
        "visits": torch.from_numpy(result.visits),
    }


def result_of(tensors: Tensors) -> RoundResult:
    return RoundResult(
        trained=_model_of("trained", tensors),
        uplink=unpack("uplink", tensors),
        states=unpack("states", tensors),
        loss=tensors["loss"],
        tally=unpack("tally", tensors),
        visits=tensors["visits"].numpy(),
    )


def _needed(work: RoundWork) -> list[str]:
    return [name for name in work.objective.companions() if name in work.companions]


def _model(name: str, model: ModelState) -> Tensors:
    return pack(f"{name}:params", model.params) | pack(f"{name}:buffers", model.buffers)


def _model_of(name: str, tensors: Tensors) -> ModelState:
    return ModelState(unpack(f"{name}:params", tensors), unpack(f"{name}:buffers", tensors))
