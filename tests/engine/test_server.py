"""The server: who takes part, how updates are merged, stages, divergence, and what is recorded."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from toy_runs import SKEWED, config, finished, image_federation, linear, norm_and_dropout, same_bits, server, trained

from fedskew.engine.model.network import ModelState
from fedskew.errors import UserError
from fedskew.experiment.preparation import prepare
from fedskew.experiment.round.server import Server
from fedskew.losses import cross_entropy
from fedskew.methods import METHODS, Client, Objective, Outputs, ServerRule, Tensors, Updates, make_method
from fedskew.methods.pkd import weak_groups
from fedskew.methods.stages import Survey
from fedskew.metrics.confusion import Evaluation, confusion_matrix
from fedskew.metrics.drift import drift_diversity

PKD = {"groups": [[0, 3], [1, 2]], "warmup_rounds": 1, "expert_rounds": 2}
ENGINES = pytest.mark.parametrize("engine", ["plain", "stacked"])


def inputs(server: Server) -> Tensor:
    data = server._tests._evaluators[""]._data
    return data.inputs(torch.arange(len(data)))


# -- sampling -------------------------------------------------------------------------------------------------


def test_clients_are_drawn_without_replacement_in_order_and_anew_each_round() -> None:
    federation = image_federation(((2, 1, 1, 1),) * 12)
    _, rows = trained(federation, "fedavg", linear(), rounds=40, clients_per_round=5, local_epochs=1)
    drawn = [tuple(row["clients"]) for row in rows]
    assert all(len(set(clients)) == 5 and clients == tuple(sorted(clients)) for clients in drawn)
    assert len(set(drawn)) > 30
    assert {client for clients in drawn for client in clients} == set(range(12))


def test_every_method_meets_the_same_clients() -> None:
    federation = image_federation()
    met = {}
    for method in METHODS.keys() - {"centralised"}:  # which has no clients
        params = {"pkd": PKD}.get(method)
        _, rows = trained(federation, method, linear(), params, rounds=4, clients_per_round=2, local_epochs=1)
        met[method] = [row["clients"] for row in rows if row["model"] == "global"]
    assert all(clients == met["fedavg"] for clients in met.values())
    other = trained(federation, "fedavg", linear(), rounds=4, clients_per_round=2, local_epochs=1, seed=1)[1]
    assert [row["clients"] for row in other] != met["fedavg"]


def test_all_clients_take_part_unless_told_otherwise_but_not_those_without_samples() -> None:
    federation = image_federation(((1, 1, 1, 1), (0, 0, 0, 0), (2, 0, 0, 1)))
    _, rows = trained(federation, "fedavg", linear())
    assert [row["clients"] for row in rows] == [[0, 2], [0, 2]]
    _, rows = trained(federation, "fedavg", linear(), clients_per_round=3)
    assert [row["clients"] for row in rows] == [[0, 2], [0, 2]]


# -- merging --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("average", ["samples", "uniform"])
def test_the_global_model_is_the_weighted_mean_of_the_clients_own(average: str) -> None:
    federation = image_federation()
    this = server(federation, "fedavg", norm_and_dropout(), average=average, rounds=1)
    state = this.start()
    result = this.engine.train(this.begin(state).work)
    after, _ = this.advance(state)
    weights = federation.sizes / federation.sizes.sum() if average == "samples" else np.full(5, 0.2)
    for kind in ("params", "buffers"):
        for name, tensor in getattr(after.model, kind).items():
            stacked = getattr(result.trained, kind)[name]
            mean = np.tensordot(weights, stacked.double().numpy(), axes=1)
            if tensor.is_floating_point():
                np.testing.assert_allclose(tensor.numpy(), mean, rtol=1e-12, atol=1e-14)
            else:
                assert abs(int(tensor) - mean) <= 1


# -- divergence -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explosive(Objective):
    """Cross entropy, but not finite for clients without a sample of class 0."""

    value: float = float("nan")

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        return cross_entropy(out.logits, y) * torch.where(client.label_counts[0] == 0, self.value, 1.0)


@ENGINES
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_diverged_client_is_left_out_and_named(engine: str, value: float) -> None:
    federation = image_federation()
    state, rows = trained(federation, Explosive(value), linear(), engine=engine)
    assert [row["diverged"] for row in rows] == [[1, 3], [1, 3]]
    assert all(torch.isfinite(t).all() for t in state.tensors().values())
    json.dumps(rows, allow_nan=False)
    others = tuple(part if k in (0, 2, 4) else part[:0] for k, part in enumerate(federation.indices))
    expected, without = trained(replace(federation, indices=others), "fedavg", linear(), engine=engine)
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in without])
    torch.testing.assert_close(state.model.params, expected.model.params, rtol=1e-9, atol=1e-12)


def test_too_large_a_learning_rate_leaves_the_model_finite() -> None:
    state, rows = trained(image_federation(), "fedavg", linear(), lr=1e30, precision="float32", rounds=4)
    assert any(row["diverged"] for row in rows)
    assert all(torch.isfinite(t).all() for t in state.tensors().values())
    json.dumps(rows, allow_nan=False)


def test_numbers_too_large_to_add_up_are_finite_all_the_same() -> None:
    model = linear()
    model.register_buffer("scale", torch.full((4,), 3e38))
    state, rows = trained(image_federation(), "fedavg", model, precision="float32")
    assert [row["diverged"] for row in rows] == [[], []]
    assert torch.equal(state.model.buffers["scale"], torch.full((4,), 3e38))


@dataclass(frozen=True)
class Everyone(Objective):
    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        return cross_entropy(out.logits, y) * torch.nan


@ENGINES
def test_a_round_in_which_all_diverge_leaves_every_bit(engine: str) -> None:
    this = server(image_federation(), Everyone(), linear(), engine=engine)
    start = this.start()
    state, row = this.advance(start)
    assert row["diverged"] == [0, 1, 2, 3, 4]
    assert row["loss"] is None
    for name, tensor in start.tensors().items():
        assert torch.equal(state.tensors()[name], tensor)
    assert state.trainees["global"].rounds == 1


@dataclass(frozen=True)
class Overflowing(ServerRule):
    """A server step that is not finite though the updates are."""

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
        return {name: w * float("inf") for name, w in updates.mean().items()}, {}


def test_a_server_step_that_overflows_is_not_taken() -> None:
    this = server(image_federation(), Overflowing(), norm_and_dropout())
    start = this.start()
    state, rows = finished(this, start)
    assert [row["diverged"] for row in rows] == [[0, 1, 2, 3, 4]] * 2
    assert all(torch.equal(tensor, state.tensors()[name]) for name, tensor in start.tensors().items())


def test_a_server_step_that_leaves_the_state_not_finite_is_not_taken() -> None:
    """The squares of updates overflow, and FedAdagrad stays where it is; so it would for ever."""
    this = server(
        image_federation(), "fedadagrad", linear(), precision="float32", lr=1e25, local_epochs=1, batch_size=99
    )
    start = this.start()
    state, row = this.advance(start)
    assert row["loss"] is None
    assert row["diverged"] == [0, 1, 2, 3, 4]
    assert all(torch.equal(tensor, state.tensors()[name]) for name, tensor in start.tensors().items())


def test_a_diverged_client_keeps_the_state_it_had() -> None:
    method = replace(make_method("scaffold"), objective=Explosive())
    state, rows = trained(image_federation(), method, linear())
    assert rows[0]["diverged"] == [1, 3]
    assert state.clients.versions == {"global": {0: 2, 2: 2, 4: 2}}


# -- stages ---------------------------------------------------------------------------------------------------


@ENGINES
def test_pkd_goes_through_its_stages(engine: str) -> None:
    federation = image_federation()
    this = server(federation, "pkd", linear(), PKD, rounds=3, engine=engine)
    state = this.start()
    assert this.rounds_ahead(state) == 1 + 2 * 2 + 2
    state, rows = finished(this, state)
    stages = ["warm-up", "expert 0", "expert 0", "expert 1", "expert 1", "distil", "distil"]
    assert [row["stage"] for row in rows] == stages
    assert [row["model"] for row in rows] == ["global", *["expert.0"] * 2, *["expert.1"] * 2, "global", "global"]
    assert [row["round"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert {tuple(row["clients"]) for row in rows if row["stage"] == "expert 0"} == {(0, 2, 4)}
    assert {tuple(row["clients"]) for row in rows if row["stage"] == "expert 1"} == {(0, 1, 2, 3)}
    assert sorted(state.trainees) == ["expert.0", "expert.1", "global"]
    group = federation.restrict((0, 3))
    assert rows[1]["visits"] == 2 * group.sizes.sum()


def test_an_expert_trains_on_its_group_alone() -> None:
    """A federation that never had the other samples gives the same expert."""
    federation = image_federation()
    params = {**PKD, "groups": [[0, 3]], "expert_rounds": 1}
    this = server(federation, "pkd", linear(), params)
    after_warmup, _ = this.advance(this.start())
    with_expert, _ = this.advance(after_warmup)
    alone = server(federation.restrict((0, 3)), "pkd", linear(), params)
    again, _ = alone.advance(after_warmup)
    assert same_bits(replace(with_expert), replace(again))
    bias = with_expert.trainees["expert.0"].model.params["head.bias"] - after_warmup.model.params["head.bias"]
    assert bias[[0, 3]].abs().min() > 0
    plain = server(federation, "pkd", linear(), params, weight_decay=0.0)
    start, _ = plain.advance(plain.start())
    expert, _ = plain.advance(start)
    change = expert.trainees["expert.0"].model.params["head.bias"] - start.model.params["head.bias"]
    assert torch.equal(change[[1, 2]], torch.zeros(2, dtype=torch.float64))


def test_the_groups_that_pkd_finds_are_noted() -> None:
    federation = image_federation()
    this = server(federation, "pkd", linear(), {"warmup_rounds": 1, "expert_rounds": 1}, rounds=2)
    state, row = this.advance(this.start())
    data = this._workshop.train
    rows = np.concatenate(federation.indices)
    model = this.network.module(state.model)
    with torch.no_grad():
        probability = model(data.inputs(torch.from_numpy(rows))).softmax(dim=1).numpy()
    y = federation.dataset.train.y[rows]
    expected = weak_groups(np.stack([probability[y == c].mean(axis=0) for c in range(4)]), 2.0)
    assert row["notes"]["groups"] == [list(group) for group in expected]
    assert state.notes == row["notes"]
    recorded = np.array(row["survey"]["probability"])
    np.testing.assert_allclose(recorded, [probability[y == c].mean(axis=0) for c in range(4)], rtol=1e-5)
    assert row["survey"].keys() == {"probability"}, "nobody's label counts"
    assert state.notes.keys() == {"groups"}, "what checkpoints keep and sites are sent"
    _, rows_after = finished(this, state)
    assert [r["stage"] for r in rows_after] == [*(f"expert {i}" for i in range(len(expected))), "distil"]
    assert not any("survey" in r for r in rows_after), "it is recorded once"


def test_a_class_without_samples_has_no_recorded_probabilities() -> None:
    probability = np.array([[0.75, 0.25], [np.nan, np.nan]])
    assert Survey(np.array([[3, 0]]), probability).recorded() == {
        "survey": {"probability": [[0.75, 0.25], [None, None]]}
    }
    assert Survey(np.array([[3, 0]])).recorded() == {}


def test_fedlmd_switches_at_its_round() -> None:
    _, rows = trained(image_federation(), "fedlmd-switch", linear(), {"switch_round": 1}, rounds=3)
    assert [row["stage"] for row in rows] == ["teacher-free", "teacher", "teacher"]
    _, rows = trained(image_federation(), "fedlmd-switch", linear(), {"switch_round": 0}, rounds=2)
    assert [row["stage"] for row in rows] == ["teacher", "teacher"]


# -- the account of computation -------------------------------------------------------------------------------


@ENGINES
@pytest.mark.parametrize(
    ("method", "units"), [("fedavg", 1), ("fedvls", 4 / 3), ("fedlmd", 4 / 3), ("fedlmd-tf", 1), ("scaffold", 1)]
)
def test_compute_in_rounds_of_fedavg(method: str, units: float, engine: str) -> None:
    _, rows = trained(image_federation(), method, linear(), engine=engine, clients_per_round=3)
    assert [row["compute"] for row in rows] == pytest.approx([units, units])


def test_compute_of_pkd_as_the_paper_counts_it() -> None:
    federation = image_federation()
    total = int(federation.sizes.sum())
    epochs, expert_epochs = 2, 3
    params = {**PKD, "expert_epochs": expert_epochs}
    _, rows = trained(federation, "pkd", linear(), params, rounds=3, local_epochs=epochs)
    of_stage = {row["stage"]: row for row in rows}
    assert of_stage["warm-up"]["compute"] == pytest.approx(1)
    for stage, group in (("expert 0", (0, 3)), ("expert 1", (1, 2))):
        owned = int(federation.restrict(group).sizes.sum())
        assert of_stage[stage]["compute"] == pytest.approx(expert_epochs / epochs * owned / total)
    for row in rows[-2:]:
        assert 0 < row["tally"]["distilled"] < row["visits"]
        assert row["compute"] == pytest.approx(1 + row["tally"]["distilled"] / (3 * epochs * total))
        assert row["tally"]["distilled"] == row["tally"]["expert 0"] + row["tally"]["expert 1"]


def test_compute_of_experts_with_one_class_a_client() -> None:
    """Two of four clients train the expert: half a round's work, not a whole one."""
    federation = image_federation(((6, 0, 0, 0), (0, 6, 0, 0), (0, 0, 6, 0), (0, 0, 0, 6)))
    _, rows = trained(federation, "pkd", linear(), {**PKD, "groups": [[0, 3]]})
    assert [row["compute"] for row in rows if row["stage"] == "expert 0"] == pytest.approx([0.5, 0.5])


@ENGINES
def test_a_round_without_any_step(engine: str) -> None:
    """BatchNorm cannot train on the one sample that each client has: nothing happens, and nothing breaks."""
    federation = image_federation(((1, 0, 0, 0), (0, 0, 0, 1), (0, 1, 0, 0)))
    for method in ("fedavg", "fedvls", "scaffold", "fedgr"):
        _, rows = trained(federation, method, norm_and_dropout(), engine=engine)
        assert [(row["visits"], row["compute"], row["diverged"]) for row in rows] == [(0, 0.0, [])] * 2
    params = {"groups": [[0, 1]], "warmup_rounds": 1, "expert_rounds": 1}
    _, rows = trained(federation, "pkd", norm_and_dropout(), params, engine=engine)
    assert [row["visits"] for row in rows] == [0, 0, 0]


# -- evaluation -----------------------------------------------------------------------------------------------


def direct_confusion(server: Server, model: ModelState, labels: tuple[int, ...] | None = None) -> np.ndarray:
    with torch.no_grad():
        logits = server.network.module(model)(inputs(server))
    y = server._tests._evaluators[""]._data.y
    if labels is not None:
        outside = [c for c in range(4) if c not in labels]
        logits[:, outside] = -torch.inf
        keep = torch.isin(y, torch.tensor(labels))
        logits, y = logits[keep], y[keep]
    return confusion_matrix(y.numpy(), logits.argmax(dim=1).numpy(), 4)


def test_the_evaluation_is_that_of_the_module_on_the_test_set() -> None:
    this = server(image_federation(tests=1201), "pkd", norm_and_dropout(), PKD, rounds=2)
    state = this.start()
    while (stage := this.stage(state)) is not None:
        state, row = this.advance(state)
        expected = direct_confusion(this, state.trainees[stage.model].model, stage.labels)
        assert row["evaluation"]["confusion"] == expected.tolist()
        assert row["evaluation"]["accuracy"] == pytest.approx(np.trace(expected) / expected.sum())


def test_a_model_that_takes_its_batch_s_statistics_can_be_tested_on_any_number_of_samples() -> None:
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64, track_running_stats=False), nn.Linear(64, 4))
    _, rows = trained(image_federation(tests=1001), "fedavg", model, rounds=1)
    assert np.sum(rows[0]["evaluation"]["confusion"]) == 1001


@pytest.mark.parametrize(("every", "expected"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (3, [3, 5]), (9, [5])])
def test_evaluation_every_few_rounds_and_at_the_end(every: int, expected: list[int]) -> None:
    _, rows = trained(image_federation(), "fedavg", linear(), rounds=5, eval_every=every)
    assert [row["round"] for row in rows if "evaluation" in row] == expected


def test_every_stage_ends_with_an_evaluation() -> None:
    _, rows = trained(image_federation(), "pkd", linear(), PKD, rounds=3, eval_every=100)
    assert [row["round"] for row in rows if "evaluation" in row] == [1, 3, 5, 7]


@ENGINES
def test_local_models_before_and_after_their_update(engine: str) -> None:
    federation = image_federation()
    this = server(federation, "fedvls", norm_and_dropout(), engine=engine, eval_local=True, clients_per_round=3)
    state = this.start()
    result = this.engine.train(this.begin(state).work)
    _, row = this.advance(state)
    before = Evaluation(direct_confusion(this, state.model))
    assert row["local_before"] == before.class_accuracy
    assert [entry["client"] for entry in row["local"]] == row["clients"]
    moves = []
    for i, entry in enumerate(row["local"]):
        own = ModelState(*({n: t[i] for n, t in g.items()} for g in (result.trained.params, result.trained.buffers)))
        after = Evaluation(direct_confusion(this, own))
        moves.append(torch.cat([(own.params[n] - w).flatten() for n, w in state.model.params.items()]).numpy())
        assert entry["class_accuracy"] == after.class_accuracy
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
    assert row["drift_diversity"] == pytest.approx(drift_diversity(moves))
    norms = sum(float(m @ m) for m in moves)
    assert row["drift_diversity"] == pytest.approx(norms / float(sum(moves) @ sum(moves)))


def test_rows_are_json() -> None:
    _, rows = trained(image_federation(), "pkd", linear(), PKD, eval_local=True)
    assert json.loads(json.dumps(rows, allow_nan=False))[0]["round"] == 1


def test_a_model_that_the_method_cannot_use_is_refused_before_training() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    with pytest.raises(UserError, match="head"):
        prepare(config(), image_federation(), "fedgr", model)


def test_the_end_is_the_end() -> None:
    this = server(image_federation(), "fedavg", linear())
    state, _ = finished(this)
    assert this.rounds_ahead(state) == 0
    with pytest.raises(ValueError, match="end"):
        this.advance(state)


@pytest.mark.parametrize(("every", "states"), [(1, 5 + 4), (2, 5 + 8), (100, 40)])
def test_the_space_for_clients_states_includes_those_kept_for_checkpoints(every: int, states: int) -> None:
    this = server(image_federation(), "scaffold", linear(), rounds=20, clients_per_round=2, checkpoint_every=every)
    one = sum(t.nbytes for t in this.begin(this.start()).work.assignments[0].state.values())
    assert this.client_bytes(this.start(), 0) == states * one
    assert this.client_bytes(this.start(), 5) == (states - 5) * one
