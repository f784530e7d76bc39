"""The memory layout of the stacked engine. The named tensors of several clients are stored with one row per client.

Each kind of tensors (parameters, buffers, state, …) has one array per dtype, with a row for each client. So a few
copies move a client into or out of a slot, which is one row in each of these arrays. On a CUDA GPU, the optimiser
updates whole rows if it has no kernel or if the step is compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedskew.accurate_sums import ACCURATE
from fedskew.engine.contract import RoundWork
from fedskew.engine.model.network import ModelState
from fedskew.engine.optimisers import STEPS, LocalOptimiser
from fedskew.engine.stacked.execution import Memory
from fedskew.methods.parts import Tensors

_ALIGNMENT = 16
"""Tensors start at multiples of this many elements, if possible. Matrix products are fastest if tensors start at
multiples of 64 bytes, which are 16 float32 numbers."""

Flats = dict[str, Tensor]
"""Arrays [rows, width] by the name of their dtype."""

Rows = slice | Tensor
"""Row indices."""


@dataclass(frozen=True)
class _Place:
    dtype: str
    offset: int
    shape: torch.Size


class RowLayout:
    """Where each named tensor lies in a row."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._names = list(tensors)
        self._places: dict[str, _Place] = {}
        self._widths: dict[str, int] = {}
        self._dtypes = {_dtype_name(t): t.dtype for t in tensors.values()}
        # Tensors whose size is a multiple of the alignment come first, so that each of them starts aligned.
        for name in sorted(tensors, key=lambda n: tensors[n].numel() % _ALIGNMENT != 0):
            tensor, dtype = tensors[name], _dtype_name(tensors[name])
            self._places[name] = _Place(dtype, self._widths.get(dtype, 0), tensor.shape)
            self._widths[dtype] = self._widths.get(dtype, 0) + tensor.numel()
        self._widths = {dtype: -(-width // _ALIGNMENT) * _ALIGNMENT for dtype, width in self._widths.items()}

    @property
    def row_bytes(self) -> int:
        return sum(width * self._dtypes[dtype].itemsize for dtype, width in self._widths.items())

    def zeros(self, rows: int, device: torch.device, pinned: bool = False) -> Flats:
        return {
            dtype: torch.zeros(rows, width, dtype=self._dtypes[dtype], device=device, pin_memory=pinned)
            for dtype, width in self._widths.items()
        }

    def views(self, flats: Mapping[str, Tensor]) -> Tensors:
        """Return the named tensors [rows, …] as views of the arrays."""
        return {name: self._view(flats, self._places[name]) for name in self._names}

    def _view(self, flats: Mapping[str, Tensor], place: _Place) -> Tensor:
        flat = flats[place.dtype]
        return flat[:, place.offset : place.offset + place.shape.numel()].view(len(flat), *place.shape)

    def flat(self, tensors: Mapping[str, Tensor]) -> Flats:
        """Pack named tensors [rows, …] into arrays."""
        flats: Flats = {}
        for dtype, width in self._widths.items():
            parts = [
                tensors[name].reshape(len(tensors[name]), -1)
                for name, place in self._places.items()
                if place.dtype == dtype
            ]
            rows, gap = len(parts[0]), width - sum(part.shape[1] for part in parts)
            flats[dtype] = torch.cat([*parts, parts[0].new_zeros(rows, gap)], dim=1) if gap else torch.cat(parts, dim=1)
        return flats


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Layouts:
    """The row layouts of what a round stores."""

    params: RowLayout
    buffers: RowLayout
    state: RowLayout
    downlink: RowLayout
    companions: Mapping[str, tuple[RowLayout, RowLayout]]
    tally: Mapping[str, torch.dtype]

    @classmethod
    def for_work(cls, work: RoundWork, tally: Mapping[str, torch.dtype]) -> Layouts:
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

    def optimiser_memory(self, optimiser: LocalOptimiser, rows: int, device: torch.device) -> Memory:
        """Allocate memory for the optimiser's state of `rows` clients."""
        memory = {kind: self.params.zeros(rows, device) for kind in optimiser.shaped_state}
        if optimiser.counts_steps:
            memory[STEPS] = {"": torch.zeros(rows, dtype=ACCURATE[device.type], device=device)}
        return memory

    def common_memory(self, work: RoundWork) -> Memory:
        """Allocate memory for what all clients of a round receive, and fill it from the work."""
        memory = {
            "sent": self.params.flat(_as_row(work.sent.params)),
            "sent buffers": self.buffers.flat(_as_row(work.sent.buffers)),
            "downlink": self.downlink.flat(_as_row(work.downlink)),
        }
        for name, (params, buffers) in self.companions.items():
            memory[f"companion {name}"] = params.flat(_as_row(work.companions[name].params))
            memory[f"companion buffers {name}"] = buffers.flat(_as_row(work.companions[name].buffers))
        return memory

    def work_from_memory(self, work: RoundWork, memory: Memory) -> RoundWork:
        """Return the work with models and downlink that are views of the memory."""

        def model(kind: str, params: RowLayout, buffers: RowLayout) -> ModelState:
            role, _, name = kind.partition(" ")
            buffer_kind = f"{role} buffers {name}".strip()  # the keys of `common_memory`
            return ModelState(_first_row(params.views(memory[kind])), _first_row(buffers.views(memory[buffer_kind])))

        return replace(
            work,
            sent=model("sent", self.params, self.buffers),
            downlink=_first_row(self.downlink.views(memory["downlink"])),
            companions={name: model(f"companion {name}", *both) for name, both in self.companions.items()},
        )


def _as_row(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: t.unsqueeze(0) for name, t in tensors.items()}


def _first_row(tensors: Tensors) -> Tensors:
    return {name: t[0] for name, t in tensors.items()}
