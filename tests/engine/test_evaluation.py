"""The evaluation as a program over static memory counts what the plain one counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import nn
from toy_runs import image_federation, norm_and_dropout

from fedskew.engine import DeviceSamples, Evaluator, ModelState, Network, evaluation
from fedskew.engine.evaluation import _Batch, _memory, _rows, macro_auroc
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


@pytest.mark.parametrize("classes", [3, 10])
@pytest.mark.parametrize("digits", [1, 2, 12])
def test_auroc_is_that_of_scikit_learn_also_with_ties(classes: int, digits: int) -> None:
    rng = np.random.default_rng(classes)
    labels = rng.integers(0, classes, 400)
    scores = (rng.normal(size=(400, classes)) + np.eye(classes)[labels]).round(digits)  # one digit: many ties
    found = macro_auroc(torch.from_numpy(scores), torch.from_numpy(labels))
    areas = [roc_auc_score(labels == c, scores[:, c]) for c in range(classes)]
    assert found == pytest.approx(np.mean(areas), abs=1e-12)


def test_auroc_of_probabilities_is_one_against_the_rest() -> None:
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 5, 300)
    probabilities = torch.from_numpy(rng.normal(size=(300, 5)) + np.eye(5)[labels]).softmax(dim=-1)
    reference = roc_auc_score(labels, probabilities.numpy(), multi_class="ovr", average="macro")
    assert macro_auroc(probabilities, torch.from_numpy(labels)) == pytest.approx(reference, abs=1e-12)


def test_classes_without_test_samples_do_not_count() -> None:
    scores = torch.tensor([[0.9, 0.1, 0.0], [0.8, 0.2, 0.0], [0.9, 0.1, 0.0]], dtype=torch.float64)
    assert macro_auroc(scores, torch.tensor([0, 1, 0])) == 1.0
    assert macro_auroc(scores, torch.tensor([0, 0, 0])) is None, "nothing to compare class 0 with"
    assert macro_auroc(scores / 0, torch.tensor([0, 1, 0])) is None


def test_probabilities_are_those_of_the_whole_test_set() -> None:
    dataset = image_federation(tests=100).dataset
    data = DeviceSamples(dataset, dataset.test, torch.device("cpu"))
    network = Network(norm_and_dropout())
    evaluator, state = Evaluator(network, data), network.state()
    probabilities, true = evaluator.probabilities(state)
    assert torch.allclose(probabilities.sum(dim=1), torch.ones(100, dtype=torch.float64), atol=1e-12)
    predicted = torch.bincount(true * 4 + probabilities.argmax(dim=1), minlength=16).view(4, 4)
    assert np.array_equal(predicted.numpy(), evaluator.confusion(state))
