"""The server before, between and after its rounds."""

from __future__ import annotations

import json

import pytest
from torch import nn
from toy_runs import config, finished, image_federation, linear, plan_round, server, trained

from fedskew.errors import UserError
from fedskew.experiment.preparation import prepare
from fedskew.experiment.round.record import RoundRow

PKD = {"groups": [[0, 3], [1, 2]], "warmup_rounds": 1, "expert_rounds": 2}


def test_rows_are_json() -> None:
    _, rows = trained(image_federation(), "pkd", linear(), PKD, eval_local=True)
    for row in rows:
        assert RoundRow.from_json(json.loads(json.dumps(row.to_json(), allow_nan=False))) == row


def test_a_model_that_the_method_cannot_use_is_refused_before_training() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    with pytest.raises(UserError, match="head"):
        prepare(config(), image_federation(), "fedgr", model)


def test_the_end_is_the_end() -> None:
    this = server(image_federation(), "fedavg", linear())
    state, _ = finished(this)
    assert this.rounds_left(state) == 0
    assert this.next_stage(state) is None


@pytest.mark.parametrize(("every", "states", "more"), [(1, 5 + 4, 4), (2, 5 + 8, 8), (100, 40, 40)])
def test_the_space_for_clients_states_includes_those_kept_for_checkpoints(every: int, states: int, more: int) -> None:
    this = server(image_federation(), "scaffold", linear(), rounds=20, clients_per_round=2, checkpoint_every=every)
    one = sum(t.nbytes for t in plan_round(this, this.start()).work.assignments[0].state.values())
    assert this.client_bytes(this.start(), 0) == states * one
    assert this.client_bytes(this.start(), 5) == more * one
