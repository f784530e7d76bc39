"""What lies in the memory of the stacked engine: the shapes of a kind of work, and what all its clients are given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedskew.engine.contract import RoundWork
from fedskew.engine.model.network import ModelState
from fedskew.engine.optimisers import STEPS, LocalOptimiser
from fedskew.engine.stacked.execution import Memory
from fedskew.engine.stacked.rows import RowLayout
from fedskew.methods.parts import Tensors


@dataclass(frozen=True)
class Layouts:
    """The shapes of what the clients of a kind of work have; the same in every round."""

    params: RowLayout
    buffers: RowLayout
    state: RowLayout
    downlink: RowLayout
    companions: Mapping[str, tuple[RowLayout, RowLayout]]
    tally: Mapping[str, torch.dtype]

    @classmethod
    def of(cls, work: RoundWork, tally: Mapping[str, torch.dtype]) -> Layouts:
        used = [name for name in work.objective.companions() if name in work.companions]
        return cls(
            params=RowLayout(work.sent.params),
            buffers=RowLayout(work.sent.buffers),
            state=RowLayout(work.assignments[0].state),
            downlink=RowLayout(work.downlink),
            companions={
                name: (RowLayout(work.companions[name].params), RowLayout(work.companions[name].buffers))
                for name in used
            },
            tally=tally,
        )

    def optimiser_state(self, optimiser: LocalOptimiser, rows: int, device: torch.device) -> Memory:
        """Memory for the optimiser's state of so many clients."""
        memory = {kind: self.params.zeros(rows, device) for kind in optimiser.shaped_state}
        if optimiser.counts_steps:
            memory[STEPS] = {"": torch.zeros(rows, dtype=torch.float64, device=device)}
        return memory

    def common(self, work: RoundWork) -> Memory:
        """What all clients of a round are given."""
        memory = {
            "sent": self.params.flat(_one_row(work.sent.params)),
            "sent buffers": self.buffers.flat(_one_row(work.sent.buffers)),
            "downlink": self.downlink.flat(_one_row(work.downlink)),
        }
        for name, (params, buffers) in self.companions.items():
            memory[f"companion {name}"] = params.flat(_one_row(work.companions[name].params))
            memory[f"companion buffers {name}"] = buffers.flat(_one_row(work.companions[name].buffers))
        return memory

    def work(self, work: RoundWork, memory: Memory) -> RoundWork:
        """The same work with what is common to all clients read from memory."""

        def model(kind: str, params: RowLayout, buffers: RowLayout) -> ModelState:
            head, _, name = kind.partition(" ")
            statistics = f"{head} buffers {name}".strip()
            return ModelState(_row(params.views(memory[kind])), _row(buffers.views(memory[statistics])))

        return replace(
            work,
            sent=model("sent", self.params, self.buffers),
            downlink=_row(self.downlink.views(memory["downlink"])),
            companions={name: model(f"companion {name}", *both) for name, both in self.companions.items()},
        )


def _one_row(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: t.unsqueeze(0) for name, t in tensors.items()}


def _row(tensors: Tensors) -> Tensors:
    return {name: t[0] for name, t in tensors.items()}
