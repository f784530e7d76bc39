"""What memory there is is known before it runs out."""

from __future__ import annotations

from pathlib import Path

import torch

from fedskew.engine.stacked.trial import _bytes_left_to_container, bytes_taken, spare_bytes

CPU = torch.device("cpu")


def test_a_container_s_limit_counts(tmp_path: Path) -> None:
    assert _bytes_left_to_container(tmp_path) is None
    (tmp_path / "memory.current").write_text("300\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert _bytes_left_to_container(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert _bytes_left_to_container(tmp_path) == 700


def test_there_is_some_memory() -> None:
    spare = spare_bytes(CPU)
    assert spare is None or spare > 0


def test_what_autograd_keeps_is_counted_once() -> None:
    weight = torch.ones(1000, requires_grad=True)

    def step() -> None:
        (weight * weight).sum().backward()

    assert bytes_taken(step, CPU) == 2 * weight.nbytes
