"""Named tensors of several clients side by side: one row of one array for each client.

A client enters or leaves a slot by one copy, whatever the number of its tensors, and SGD is one operation on all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedskew.methods.parts import Tensors

_ALIGNMENT = 16
"""Elements: matrix products read best from addresses that are multiples of 64 bytes or more."""

Flats = dict[str, Tensor]
"""[rows, width], by the name of the dtype."""

Places = slice | Tensor
"""Rows of a stack."""


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
        for name in sorted(tensors, key=lambda n: tensors[n].numel() % _ALIGNMENT != 0):  # the others push none aside
            tensor, kind = tensors[name], _dtype_name(tensors[name])
            self._places[name] = _Place(kind, self._widths.get(kind, 0), tensor.shape)
            self._widths[kind] = self._widths.get(kind, 0) + tensor.numel()
        self._widths = {kind: -(-width // _ALIGNMENT) * _ALIGNMENT for kind, width in self._widths.items()}

    @property
    def row_bytes(self) -> int:
        return sum(width * self._dtypes[kind].itemsize for kind, width in self._widths.items())

    def zeros(self, rows: int, device: torch.device, pinned: bool = False) -> Flats:
        return {
            kind: torch.zeros(rows, width, dtype=self._dtypes[kind], device=device, pin_memory=pinned)
            for kind, width in self._widths.items()
        }

    def views(self, flats: Mapping[str, Tensor]) -> Tensors:
        """The named tensors [rows, …] in the rows' own memory."""
        return {name: self._view(flats, self._places[name]) for name in self._names}

    def _view(self, flats: Mapping[str, Tensor], place: _Place) -> Tensor:
        flat = flats[place.dtype]
        return flat[:, place.offset : place.offset + place.shape.numel()].view(len(flat), *place.shape)

    def flat(self, tensors: Mapping[str, Tensor]) -> Flats:
        """Named tensors [rows, …] as rows."""
        flats: Flats = {}
        for kind, width in self._widths.items():
            parts = [
                tensors[name].reshape(len(tensors[name]), -1)
                for name, place in self._places.items()
                if place.dtype == kind
            ]
            rows, gap = len(parts[0]), width - sum(part.shape[1] for part in parts)
            flats[kind] = torch.cat([*parts, parts[0].new_zeros(rows, gap)], dim=1) if gap else torch.cat(parts, dim=1)
        return flats


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
