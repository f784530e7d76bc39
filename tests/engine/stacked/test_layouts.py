"""Named tensors of several clients in one array are the same tensors."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedskew.engine.stacked.layouts import RowLayout

DTYPES = (torch.float32, torch.float64, torch.int64)
SHAPES = st.lists(st.tuples(st.lists(st.integers(1, 5), max_size=3), st.sampled_from(DTYPES)), max_size=6)


@given(SHAPES, st.integers(1, 4))
def test_rows_hold_the_tensors(shapes: list[tuple[list[int], torch.dtype]], rows: int) -> None:
    one = {f"t{i}": torch.zeros(shape, dtype=dtype) for i, (shape, dtype) in enumerate(shapes)}
    layout = RowLayout(one)
    many = {name: torch.randint(0, 9, (rows, *t.shape)).to(t.dtype) for name, t in one.items()}
    views = layout.views(layout.flat(many))
    assert list(views) == list(one)
    for name, tensor in many.items():
        assert torch.equal(views[name], tensor)
        assert views[name].dtype == tensor.dtype


def test_views_write_into_the_rows() -> None:
    layout = RowLayout({"weight": torch.zeros(4, 8), "bias": torch.zeros(4)})
    flats = layout.zeros(3, torch.device("cpu"))
    layout.views(flats)["bias"][1] = 7
    assert flats["float32"].sum() == 28
    assert flats["float32"][1].sum() == 28


def test_large_tensors_begin_at_aligned_addresses() -> None:
    layout = RowLayout({"bias": torch.zeros(10), "weight": torch.zeros(10, 16), "head": torch.zeros(3)})
    flats = layout.zeros(2, torch.device("cpu"))
    assert flats["float32"].shape == (2, 176)
    assert all(row.data_ptr() % 64 == 0 for row in layout.views(flats)["weight"])
    assert layout.row_bytes == 176 * 4
