"""The evaluation as a program over static memory counts what the plain one counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from toy_runs import image_federation, norm_and_dropout

from fedskew.engine import DeviceSamples, Evaluator, ModelState, Network, evaluation
from fedskew.engine.evaluation import _Batch, _memory, _rows
from fedskew.engine.stacked.execution import compiled
from fedskew.engine.stacked.layouts import RowLayout


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("model", [norm_and_dropout(), nn.Sequential(nn.Flatten(), nn.Linear(64, 4))])
def test_batches_count_what_a_pass_counts(model: nn.Module, recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "_BATCH", 30)  # 100 samples in four parts
    monkeypatch.setattr(torch, "compile", lambda program, **options: program)
    dataset = image_federation(tests=100).dataset
    data = DeviceSamples(dataset, dataset.test, torch.device("cpu"))
    network = Network(model)
    state = network.state()
    layouts = RowLayout(state.params), RowLayout(state.buffers)
    memory = _memory(layouts, state, data)
    batch = _Batch(network, data, layouts, 25)
    program = compiled(batch, memory) if recorded else batch
    for _ in range(4):
        program(memory)
    counted = Evaluator(network, data).confusion(state)
    assert np.array_equal(memory["progress"]["cells"].view(4, 4).numpy(), counted)
    assert counted.sum() == 100
    program(memory)  # as before it is captured: more often than there are samples


def test_a_model_is_read_by_its_names_not_by_their_order() -> None:
    state = Network(norm_and_dropout()).state()
    layouts = RowLayout(state.params), RowLayout(state.buffers)
    turned = ModelState(*(dict(reversed(part.items())) for part in (state.params, state.buffers)))
    one, other = _rows(layouts, state), _rows(layouts, turned)
    assert all(torch.equal(other[kind][name], flat) for kind, flats in one.items() for name, flat in flats.items())
