"""The evaluation as a program over static memory counts what the plain one counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss
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
    counted, lost = Evaluator(network, data).begin(state)()
    assert float(memory["progress"]["log_loss"]) == pytest.approx(lost, rel=1e-6)
    assert np.array_equal(memory["progress"]["cells"].view(4, 4).numpy(), counted)
    assert counted.sum() == 100
    program(memory)  # as before it is captured: more often than there are samples


class Counting(nn.Module):
    """Counts its calls in two buffers: it changes one and replaces the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 4)
        self.register_buffer("changed", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.changed += 1
        self.replaced = self.replaced + 1
        return self.layer(x.flatten(1))


def test_an_evaluation_does_not_change_the_model() -> None:
    dataset = image_federation(tests=100).dataset
    network = Network(Counting())
    state = network.state()
    Evaluator(network, DeviceSamples(dataset, dataset.test, torch.device("cpu"))).begin(state)()
    assert {name: float(buffer) for name, buffer in state.buffers.items()} == {"changed": 0, "replaced": 0}


def test_a_model_is_read_by_its_names_not_by_their_order() -> None:
    state = Network(norm_and_dropout()).state()
    layouts = RowLayout(state.params), RowLayout(state.buffers)
    turned = ModelState(*(dict(reversed(part.items())) for part in (state.params, state.buffers)))
    one, other = _rows(layouts, state), _rows(layouts, turned)
    assert all(torch.equal(other[kind][name], flat) for kind, flats in one.items() for name, flat in flats.items())


def test_probabilities_are_those_of_the_whole_test_set() -> None:
    dataset = image_federation(tests=100).dataset
    data = DeviceSamples(dataset, dataset.test, torch.device("cpu"))
    network = Network(norm_and_dropout())
    evaluator, state = Evaluator(network, data), network.state()
    probabilities, true = evaluator.probabilities(state)
    assert torch.allclose(probabilities.sum(dim=1), torch.ones(100, dtype=torch.float64), atol=1e-12)
    predicted = torch.bincount(true * 4 + probabilities.argmax(dim=1), minlength=16).view(4, 4)
    assert np.array_equal(predicted.numpy(), evaluator.confusion(state))
    lost = evaluator.begin(state)().log_loss
    assert lost == pytest.approx(100 * log_loss(true, probabilities, labels=range(4)), rel=1e-9)


class Recurrent(nn.Module):
    """Reads the columns of an image one after another, with a layer that `vmap` cannot lift."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.reader, self.head = nn.Conv2d(1, 2, 3, padding=1), nn.GRU(16, 5), nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        columns = self.convolution(x).flatten(1, 2).permute(2, 0, 1)
        logits: torch.Tensor = self.head(self.reader(columns)[0][-1])
        return logits


class ChangesACopy(nn.Module):
    """Changes a tensor that shares memory with another one only in some orders."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv2d(1, 2, 3), nn.Linear(72, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.convolution(x)
        features.contiguous().relu_()
        logits: torch.Tensor = self.head(features.flatten(1))
        return logits


@pytest.mark.parametrize("kind", [Recurrent, ChangesACopy])
def test_a_model_that_cannot_be_stacked_is_evaluated_without_kernels(
    monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module]
) -> None:
    dataset = image_federation(tests=100).dataset
    data = DeviceSamples(dataset, dataset.test, torch.device("cpu"))
    model = kind()
    network = Network(model)
    state = network.state()
    expected = Evaluator(network, data).confusion(state)
    monkeypatch.setattr(Network, "prefers_channels_last", lambda *_: True)  # as on a GPU
    found = Evaluator(Network(model), data).confusion(state)
    assert np.array_equal(found, expected)
