"""The loop and the limit train what the engines train: the comparison is one of like with like."""

from __future__ import annotations

import pytest
import torch

from fedskew.lab.benchmark.cases import METHODS, SETTINGS, Case, Workload
from fedskew.lab.benchmark.engines import FedskewEngine
from fedskew.lab.benchmark.limit import Limit
from fedskew.lab.benchmark.loop import STEPS, LoopRounds, LoopSteps
from fedskew.methods import Tensors

ONE_BATCH = Workload(batches=1, epochs=1, tests=50)


def _distance(a: Tensors, b: Tensors) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize("tuned", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_two_rounds_of_the_loop_are_two_rounds_of_the_server(method: str, tuned: bool) -> None:
    case = Case("dnn", 3, ONE_BATCH, "cpu", method)  # one batch a client: its order does not matter
    loop, own = LoopRounds(case, tuned), FedskewEngine(case, "plain")
    for _ in range(2):
        loop()
        own.round()
    assert loop.samples == own.visits == 3 * 64
    assert _distance(loop.global_model(), own.global_model()) < 1e-5


@pytest.mark.parametrize("model", ["dnn", "cnn"])
def test_a_step_of_the_limit_is_that_of_one_client_with_all_samples(model: str) -> None:
    case = Case(model, 1, ONE_BATCH, "cpu", augmented=False)
    limit, own = Limit(case, compiled=False), FedskewEngine(case, "plain")
    limit()
    own.round()
    assert limit.samples == own.visits == SETTINGS[model].batch_size
    assert _distance(limit.global_model(), own.global_model()) < 1e-5


def test_the_limit_learns_from_the_batches_of_all_clients() -> None:
    limit = Limit(Case("dnn", 4, ONE_BATCH, "cpu"), compiled=False)
    before = limit.current_loss()
    for _ in range(5):
        limit()
    assert limit.samples == 4 * 64
    assert limit.current_loss() < before


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_steps_of_the_loop_learn(method: str, precision: str) -> None:
    several_classes = Workload(batches=4, epochs=1, tests=50)
    steps = LoopSteps(Case("dnn", 10, several_classes, "cpu", method, precision))
    before = steps.current_loss()
    steps()
    assert steps.samples == STEPS * 64
    assert steps.current_loss() < before


@pytest.mark.parametrize("engine", ["plain", "stacked"])
def test_bare_steps_can_be_called_again_and_again(engine: str) -> None:
    own = FedskewEngine(Case("dnn", 3, ONE_BATCH, "cpu"), engine)
    call, samples = own.bare_steps()
    call()
    call()
    assert own.name == engine
    assert samples == 3 * 64
    own.close()


def test_bare_steps_count_the_clients_that_are_stacked_at_a_time() -> None:
    own = FedskewEngine(Case("cnn", 10, ONE_BATCH, "cpu"), "stacked")  # too many for a processor's cache
    call, samples = own.bare_steps()
    seen: list[int] = []
    forward = own._server.network.forward_stacked
    own._server.network.forward_stacked = lambda *args: (seen.append(len(args[2])), forward(*args))[1]  # type: ignore[assignment, method-assign, func-returns-value]
    call()
    assert samples == seen[0] * 50 < 10 * 50


def test_contenders_leave_the_number_format_as_it_was() -> None:
    before = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.backends.cuda.matmul.allow_tf32
    LoopSteps(Case("dnn", 2, ONE_BATCH, "cpu", precision="tf32"))()
    after = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.backends.cuda.matmul.allow_tf32
    assert after == before


def test_clients_have_full_batches_unless_sizes_are_unequal() -> None:
    equal, unequal = (
        Case("cnn", 20, Workload(4, 1, 50), "cpu", sizes=sizes).federation() for sizes in ("equal", "unequal")
    )
    assert set(equal.sizes.tolist()) == {200}
    assert unequal.sizes.sum() == equal.sizes.sum()
    assert unequal.sizes.min() >= 1
    assert len(set(unequal.sizes.tolist())) > 10


def test_clients_lack_classes() -> None:
    federation = Case("dnn", 10, Workload(4, 1, 50), "cpu").federation()
    assert all(federation.vacant(client) for client in range(10))


def test_a_large_federation_deals_the_same_rows_again() -> None:
    federation = Case("dnn", 10, Workload(2, 1, 50), "cpu", federation_clients=100_000).federation()
    assert federation.clients == 100_000
    assert len(federation.dataset.train) == 50_000
    assert set(federation.sizes.tolist()) == {128}


def test_federations_of_any_size_have_the_same_data() -> None:
    small, large = (Case("dnn", 10, Workload(2, 1, 50), "cpu", federation_clients=n).federation() for n in (100, 1_000))
    assert small.dataset is large.dataset
    assert len(Case("dnn", 10, Workload(2, 1, 50), "cpu").federation().dataset.train) == 10 * 128


def test_the_case_is_a_users_configuration() -> None:
    case = Case("cnn", 10, Workload(2, 5, 50), "cpu", "fedvls", "bf16", federation_clients=40)
    config = case.config("stacked")
    assert (config.clients_per_round, config.partition.clients, config.batch_size) == (10, 40, 50)
    assert config.augment == ("crop", "flip")
    assert config.eval_every == 1
    assert case.config("plain").momentum == 0.9
