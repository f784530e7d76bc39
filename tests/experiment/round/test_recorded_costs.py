"""What a round records of its costs: bytes as the tensors have them, time by part; large matrices once."""

from __future__ import annotations

from typing import Any

import pytest

import fedskew as fs

CLIENTS, DRAWN = 5, 3


def rows(method: str, **params: Any) -> list[dict[str, Any]]:
    fed = fs.federation("digits", fs.Dirichlet(clients=CLIENTS, beta=1.0))
    settings = {"rounds": 2, "clients_per_round": DRAWN, "local_epochs": 1, "eval_local": True}
    return fs.run(fed, method, "dnn", method_params=params, **settings).history[1:]


def model_bytes() -> int:
    model = fs.run(
        fs.federation("digits", fs.Dirichlet(clients=2, beta=9.0)), "fedavg", "dnn", rounds=1, local_epochs=1
    ).model
    return 4 * sum(p.numel() for p in model.parameters())


def test_fedavg_moves_the_model_down_and_up_for_every_participant() -> None:
    assert [row.bytes for row in rows("fedavg")] == 2 * [{"down": DRAWN * model_bytes(), "up": DRAWN * model_bytes()}]


def test_scaffold_moves_twice_as_much() -> None:
    for row in rows("scaffold"):
        assert row.bytes == {"down": 2 * DRAWN * model_bytes(), "up": 2 * DRAWN * model_bytes()}


def test_pkd_s_experts_are_sent_with_every_round_that_asks_them() -> None:
    history = rows("pkd", warmup_rounds=1, expert_rounds=1, groups=[[0, 1], [2, 3]])
    distilled = next(row for row in history if row.stage == "distil")
    assert distilled.bytes["down"] == 3 * DRAWN * model_bytes(), "the model and two experts"
    assert distilled.bytes["up"] == DRAWN * model_bytes()


def test_fedconcat_s_encoders_are_sent_with_every_round_of_the_head_and_the_head_comes_back() -> None:
    history = rows("fedconcat", clusters=2, encoder_rounds=1, head_batches=1)
    encoder, head = history[0], history[-1]
    assert encoder.bytes["down"] == encoder.bytes["up"] == len(encoder.clients) * model_bytes()
    assert head.stage == "head"
    assert head.bytes["up"] == DRAWN * 4 * (2 * 200 * 10 + 10)
    assert head.bytes["down"] == head.bytes["up"] + 2 * DRAWN * model_bytes()


def test_a_pass_over_the_batches_that_a_client_trains_on_costs_no_more_than_those() -> None:
    alone, observed = (rows(method, clusters=1, encoder_rounds=1)[-1] for method in ("fedconcat", "fedconcat+fpl"))
    assert alone.stage == observed.stage == "head"
    fed = fs.federation("digits", fs.Dirichlet(clients=CLIENTS, beta=1.0))
    whole = fed.sizes[alone.clients].sum()
    assert alone.visits < whole
    assert observed.compute - alone.compute == pytest.approx(alone.visits / 3 / whole)


def test_the_parts_of_a_round_s_time_are_within_it() -> None:
    for row in rows("fedavg"):
        assert row.time.keys() == {"train", "server", "evaluate"}
        assert all(seconds >= 0 for seconds in row.time.values())
        assert sum(row.time.values()) <= row.seconds


def test_local_matrices_are_recorded_in_the_last_round_only() -> None:
    first, last = rows("fedavg")
    assert not any("confusion" in one for one in first.local)
    for one in last.local:
        matrix = one["confusion"]
        right = [row[c] / sum(row) for c, row in enumerate(matrix)]
        assert right == pytest.approx(list(one["class_accuracy"]))
