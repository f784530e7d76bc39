"""When models are evaluated, and that the numbers are those of the model itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix
from torch import Tensor, nn
from toy_runs import SKEWED, advance, image_federation, linear, norm_and_dropout, plan_round, server, trained

from fedskew.engine.model.network import ModelState
from fedskew.experiment.round.server import Server
from fedskew.metrics.confusion import Evaluation
from fedskew.metrics.drift import drift_diversity

PKD = {"groups": [[0, 3], [1, 2]], "warmup_rounds": 1, "expert_rounds": 2}
ENGINES = pytest.mark.parametrize("engine", ["plain", "stacked"])


def inputs(server: Server) -> Tensor:
    data = server._base_runtime.test_set._evaluators[""]._data
    return data.inputs(torch.arange(len(data)))


def direct_confusion(server: Server, model: ModelState, labels: tuple[int, ...] | None = None) -> np.ndarray:
    with torch.no_grad():
        logits = server.network.module(model)(inputs(server))
    y = server._base_runtime.test_set._evaluators[""]._data.y
    if labels is not None:
        outside = [c for c in range(4) if c not in labels]
        logits[:, outside] = -torch.inf
        keep = torch.isin(y, torch.tensor(labels))
        logits, y = logits[keep], y[keep]
    return confusion_matrix(y.numpy(), logits.argmax(dim=1).numpy(), labels=range(4))


def test_the_evaluation_is_that_of_the_module_on_the_test_set() -> None:
    this = server(image_federation(tests=1201), "pkd", norm_and_dropout(), PKD, rounds=2)
    state = this.start()
    while (stage := this.next_stage(state)) is not None:
        state, row = advance(this, state)
        expected = direct_confusion(this, state.models[stage.model].model, stage.labels)
        assert row.required_evaluation.confusion.tolist() == expected.tolist()
        assert row.accuracy == pytest.approx(np.trace(expected) / expected.sum())


def test_a_model_that_takes_its_batch_s_statistics_can_be_tested_on_any_number_of_samples() -> None:
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64, track_running_stats=False), nn.Linear(64, 4))
    _, rows = trained(image_federation(tests=1001), "fedavg", model, rounds=1)
    assert np.sum(rows[0].required_evaluation.confusion) == 1001


@pytest.mark.parametrize(("every", "expected"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (3, [3, 5]), (9, [5])])
def test_evaluation_every_few_rounds_and_at_the_end(every: int, expected: list[int]) -> None:
    _, rows = trained(image_federation(), "fedavg", linear(), rounds=5, eval_every=every)
    assert [row.round for row in rows if row.evaluation is not None] == expected


def test_every_stage_ends_with_an_evaluation() -> None:
    _, rows = trained(image_federation(), "pkd", linear(), PKD, rounds=3, eval_every=100)
    assert [row.round for row in rows if row.evaluation is not None] == [1, 3, 5, 7]


@ENGINES
def test_local_models_before_and_after_their_update(engine: str) -> None:
    federation = image_federation()
    this = server(federation, "fedvls", norm_and_dropout(), engine=engine, eval_local=True, clients_per_round=3)
    state = this.start()
    result = this.engine.train(plan_round(this, state).work)
    _, row = advance(this, state)
    before = Evaluation(direct_confusion(this, state.model))
    assert row.local_before == list(before.class_accuracy)
    assert [entry["client"] for entry in row.local] == row.clients
    moves = []
    for i, entry in enumerate(row.local):
        own = ModelState(*({n: t[i] for n, t in g.items()} for g in (result.trained.params, result.trained.buffers)))
        after = Evaluation(direct_confusion(this, own))
        moves.append(torch.cat([(own.params[n] - w).flatten() for n, w in state.model.params.items()]).numpy())
        assert entry["class_accuracy"] == list(after.class_accuracy)
        counts = np.array(SKEWED[entry["client"]])
        groups = {
            "vacant": counts == 0,
            "minority": (counts > 0) & (counts <= counts.sum() / 4),
            "majority": counts > counts.sum() / 4,
        }
        for moment, evaluation in (("before", before), ("after", after)):
            assert entry[moment]["accuracy"] == evaluation.accuracy
            for group, members in groups.items():
                mean = np.array(evaluation.class_accuracy, dtype=float)[members].mean() if members.any() else None
                assert entry[moment][group] == pytest.approx(mean)
    assert row.drift_diversity == pytest.approx(drift_diversity(moves))
    norms = sum(float(m @ m) for m in moves)
    assert row.drift_diversity == pytest.approx(norms / float(sum(moves) @ sum(moves)))
