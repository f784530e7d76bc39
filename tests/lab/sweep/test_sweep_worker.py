"""Whether a worker's process can go on after a run that failed."""

from __future__ import annotations

import pytest
import torch

from fedskew.lab.sweep.worker import _gpu_works


def test_a_process_whose_gpu_gives_errors_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _gpu_works(), "no GPU in use"

    def broken() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert _gpu_works()
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    assert not _gpu_works()
