"""Methods that train in stages: the order of rounds, their models, clients and notes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from toy_runs import advance, finished, image_federation, linear, same_bits, server, trained

from fedskew.methods.pkd import weak_groups
from fedskew.methods.stages import Survey

PKD = {"groups": [[0, 3], [1, 2]], "warmup_rounds": 1, "expert_rounds": 2}
ENGINES = pytest.mark.parametrize("engine", ["plain", "stacked"])


@ENGINES
def test_pkd_goes_through_its_stages(engine: str) -> None:
    federation = image_federation()
    this = server(federation, "pkd", linear(), PKD, rounds=3, engine=engine)
    state = this.start()
    assert this.rounds_left(state) == 1 + 2 * 2 + 2
    state, rows = finished(this, state)
    stages = ["warm-up", "expert 0", "expert 0", "expert 1", "expert 1", "distil", "distil"]
    assert [row.stage for row in rows] == stages
    assert [row.model for row in rows] == ["global", *["expert.0"] * 2, *["expert.1"] * 2, "global", "global"]
    assert [row.round for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert {tuple(row.clients) for row in rows if row.stage == "expert 0"} == {(0, 2, 4)}
    assert {tuple(row.clients) for row in rows if row.stage == "expert 1"} == {(0, 1, 2, 3)}
    assert sorted(state.models) == ["expert.0", "expert.1", "global"]
    group = federation.restrict((0, 3))
    assert rows[1].visits == 2 * group.sizes.sum()


def test_an_expert_trains_on_its_group_alone() -> None:
    """A federation that never had the other samples gives the same expert."""
    federation = image_federation()
    params = {**PKD, "groups": [[0, 3]], "expert_rounds": 1}
    this = server(federation, "pkd", linear(), params)
    after_warmup, _ = advance(this, this.start())
    with_expert, _ = advance(this, after_warmup)
    alone = server(federation.restrict((0, 3)), "pkd", linear(), params)
    again, _ = advance(alone, after_warmup)
    assert same_bits(replace(with_expert), replace(again))
    bias = with_expert.models["expert.0"].model.params["head.bias"] - after_warmup.model.params["head.bias"]
    assert bias[[0, 3]].abs().min() > 0
    plain = server(federation, "pkd", linear(), params, weight_decay=0.0)
    start, _ = advance(plain, plain.start())
    expert, _ = advance(plain, start)
    change = expert.models["expert.0"].model.params["head.bias"] - start.model.params["head.bias"]
    assert torch.equal(change[[1, 2]], torch.zeros(2, dtype=torch.float64))


def test_the_groups_that_pkd_finds_are_noted() -> None:
    federation = image_federation()
    this = server(federation, "pkd", linear(), {"warmup_rounds": 1, "expert_rounds": 1}, rounds=2)
    state, row = advance(this, this.start())
    data = this._runtimes.train
    rows = np.concatenate(federation.indices)
    model = this.network.module(state.model)
    with torch.no_grad():
        probability = model(data.inputs(torch.from_numpy(rows))).softmax(dim=1).numpy()
    y = federation.dataset.train.y[rows]
    expected = weak_groups(np.stack([probability[y == c].mean(axis=0) for c in range(4)]), 2.0)
    assert row.notes["groups"] == [list(group) for group in expected]
    assert state.notes == row.notes
    recorded = np.array(row.survey["probability"])
    np.testing.assert_allclose(recorded, [probability[y == c].mean(axis=0) for c in range(4)], rtol=1e-5)
    assert row.survey.keys() == {"probability"}, "nobody's label counts"
    assert state.notes.keys() == {"groups"}, "what checkpoints keep and sites are sent"
    _, rows_after = finished(this, state)
    assert [r.stage for r in rows_after] == [*(f"expert {i}" for i in range(len(expected))), "distil"]
    assert not any(r.survey for r in rows_after), "it is recorded once"


def test_a_class_without_samples_has_no_recorded_probabilities() -> None:
    probability = np.array([[0.75, 0.25], [np.nan, np.nan]])
    assert Survey(np.array([[3, 0]]), probability).to_record() == {
        "survey": {"probability": [[0.75, 0.25], [None, None]]}
    }
    assert Survey(np.array([[3, 0]])).to_record() == {}


def test_fedlmd_switches_at_its_round() -> None:
    _, rows = trained(image_federation(), "fedlmd-switch", linear(), {"switch_round": 1}, rounds=3)
    assert [row.stage for row in rows] == ["teacher-free", "teacher", "teacher"]
    _, rows = trained(image_federation(), "fedlmd-switch", linear(), {"switch_round": 0}, rounds=2)
    assert [row.stage for row in rows] == ["teacher", "teacher"]
