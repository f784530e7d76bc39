"""CUDA graphs of several steps: they give the bits of one step after another."""

from __future__ import annotations

import pytest
import torch
from toy_runs import distance, image_federation, linear, trained

from fedskew.engine.stacked import graph_program


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("compiled", ["never", "always"])
@pytest.mark.parametrize("method", ["fedavg", "fedvls", "scaffold"])
def test_a_block_of_steps_has_the_same_bits_on_a_gpu(
    method: str, compiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Client 0 takes 40 steps, so blocks and single steps alternate. The other clients enter and leave meanwhile."""
    federation = image_federation(((10, 10, 0, 20), (3, 0, 2, 5), (0, 8, 7, 0)))
    settings = {"engine": "stacked", "device": "cuda", "compile": compiled, "local_epochs": 5, "batch_size": 5}
    blocks = trained(federation, method, linear(), **settings)[0]
    monkeypatch.setattr(graph_program, "_SHORT_STEP_BYTES", 0)
    single_steps = trained(federation, method, linear(), **settings)[0]
    assert distance(blocks, single_steps) == 0
