"""Convert a round's work and result to JSON facts and named tensors, and back, to send them between processes."""

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
from fedskew.methods.parts import Objective, Part, ServerRule, Solver, Tensors, Weighting, pack, unpack


def work_facts(work: RoundWork) -> Facts:
    """Return the work without its tensors, the method's parts and the source of noise.

    The receiver already has the parts. Its source of noise is always `keyed_noise`.
    """
    return {
        "companions": _needed_companions(work),
        "clients": [a.client for a in work.assignments],
        "ends": np.cumsum([len(a.samples) for a in work.assignments]).tolist(),
        "local": asdict(work.local),
        "key": asdict(work.key),
        "personal_names": sorted(work.personal_names),
    }


def work_tensors(work: RoundWork) -> Mapping[str, Tensor | Sequence[Tensor]]:
    states = [a.state for a in work.assignments]
    tensors: dict[str, Tensor | Sequence[Tensor]] = {
        **_pack_model("sent", work.sent),
        **pack("downlink", work.downlink),
        "samples": torch.from_numpy(np.concatenate([a.samples for a in work.assignments])),
        "label_counts": torch.from_numpy(np.stack([a.label_counts for a in work.assignments])),
        **{f"state/{name}": [state[name] for state in states] for name in states[0]},
        **_starts(work),
    }
    for place, name in enumerate(_needed_companions(work)):
        tensors |= _pack_model(f"companion{place}", work.companions[name])
    return tensors


def unpack_work(parts: tuple[Part, ...], facts: Facts, tensors: Tensors) -> RoundWork:
    """Return the round's work for one share: the assignments at the positions that `facts["share"]` lists."""
    objective, solver, server, *weighting = parts
    bounds = [0, *facts["ends"]]
    samples, counts = tensors["samples"].numpy(), tensors["label_counts"].numpy()
    states = unpack("state", tensors)
    return RoundWork(
        objective=cast(Objective, objective),
        solver=cast(Solver, solver),
        server=cast(ServerRule, server),
        sent=_unpack_model("sent", tensors),
        downlink=unpack("downlink", tensors),
        companions={name: _unpack_model(f"companion{i}", tensors) for i, name in enumerate(facts["companions"])},
        assignments=[
            Assignment(
                client=facts["clients"][row],
                samples=samples[bounds[row] : bounds[row + 1]],
                label_counts=counts[row],
                state={name: t[row] for name, t in states.items()},
                start=_unpack_start(row, tensors),
            )
            for row in facts["share"]
        ],
        local=LocalTraining(**facts["local"]),
        key=RoundKey(**facts["key"]),
        weighting=cast(Weighting, weighting[0]) if weighting else None,
        personal_names=frozenset(facts["personal_names"]),
    )


def _starts(work: RoundWork) -> Mapping[str, Sequence[Tensor]]:
    """Return the clients' start models. Either all clients of a round have one, or none has."""
    starts = [_pack_model("start", a.start) for a in work.assignments if a.start is not None]
    return {name: [start[name] for start in starts] for name in starts[0]} if starts else {}


def _unpack_start(row: int, tensors: Tensors) -> ModelState | None:
    starts = _unpack_model("start", tensors)
    if not starts.params:
        return None
    return ModelState({n: t[row] for n, t in starts.params.items()}, {n: t[row] for n, t in starts.buffers.items()})


def result_tensors(result: RoundResult) -> Tensors:
    return {
        **_pack_model("trained", result.trained),
        **pack("uplink", result.uplink),
        **pack("states", result.states),
        **pack("tally", result.tally),
        "loss": result.loss,
        "visits": torch.from_numpy(result.visits),
    }


def unpack_result(tensors: Tensors) -> RoundResult:
    return RoundResult(
        trained=_unpack_model("trained", tensors),
        uplink=unpack("uplink", tensors),
        states=unpack("states", tensors),
        loss=tensors["loss"],
        tally=unpack("tally", tensors),
        visits=tensors["visits"].numpy(),
    )


def _needed_companions(work: RoundWork) -> list[str]:
    return [name for name in work.objective.companions() if name in work.companions]


def _pack_model(name: str, model: ModelState) -> Tensors:
    return pack(f"{name}:params", model.params) | pack(f"{name}:buffers", model.buffers)


def _unpack_model(name: str, tensors: Tensors) -> ModelState:
    return ModelState(unpack(f"{name}:params", tensors), unpack(f"{name}:buffers", tensors))
