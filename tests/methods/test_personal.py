"""Methods with personal parts against plain PyTorch, in whole runs, and what leaves their clients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from linear_clients import federation, layered_model, played, serve, settings
from torch import Tensor, nn
from toy_runs import plan_round

from fedskew.engine.personal_training import personal_model
from fedskew.errors import UserError
from fedskew.experiment.preparation import check_model
from fedskew.experiment.round.record import traffic
from fedskew.experiment.round.server import Server
from fedskew.experiment.round.state import RunState
from fedskew.methods import Personal, Phase, ServerRule, Solver, Updates, make_method
from fedskew.methods.fedbn import FedBN
from fedskew.methods.fedprox import FedProx
from fedskew.methods.personal import personal_names
from fedskew.models import Classifier

Weights = dict[str, Tensor]
ROUNDS = 4


def norm_model() -> Classifier:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return Classifier(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh()), nn.Linear(5, 4))


def norm_server(method: str, params: dict[str, Any], engine: str) -> Server:
    config = settings(rounds=ROUNDS, clients_per_round=2, engine=engine, local_epochs=2)
    return Server(federation(), make_method(method, params), norm_model(), config)


# -- the same in plain PyTorch ----------------------------------------------------------------------------


class Reference:
    """A whole run with modules, optimisers and state_dicts."""

    def __init__(self, participants: Sequence[Sequence[int]]) -> None:
        fed = federation()
        x, y = torch.from_numpy(fed.dataset.train.x).double(), torch.from_numpy(fed.dataset.train.y)
        self.data = [(x[rows], y[rows]) for rows in map(torch.from_numpy, fed.indices)]
        self.initial: Weights = copy.deepcopy(norm_model().double().state_dict())
        self.participants = participants
        self.config = settings(local_epochs=2)

    def train(
        self, start: Weights, client: int, number: int, trains: str, epochs: int = 2, pull: float = 0.0
    ) -> Weights:
        """SGD on a client's whole data, of the parameters whose names contain `trains`."""
        module = norm_model().double()
        module.load_state_dict(start)
        trained = [p for name, p in module.named_parameters() if trains in name]
        anchors = [p.detach().clone() for p in trained] if not pull else [self.anchor[n] for n in self.names(trains)]
        lr = self.config.lr * self.config.lr_decay**number
        optimiser = torch.optim.SGD(trained, lr, momentum=0.6, weight_decay=0.01)
        x, y = self.data[client]
        for _ in range(epochs):
            module.train()
            optimiser.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            for p, anchor in zip(trained, anchors, strict=True):
                assert p.grad is not None
                p.grad += pull * (p.detach() - anchor)
            optimiser.step()
        return copy.deepcopy(module.state_dict())

    def names(self, part: str) -> list[str]:
        return [name for name, _ in norm_model().named_parameters() if part in name]

    def run(
        self, personal: Callable[[str], bool], local: Callable[[Weights, int, int], Weights]
    ) -> tuple[Weights, dict[int, Weights]]:
        """Return the shared tensors at the end, and the tensors that each client kept."""
        shared, kept = dict(self.initial), {}
        for number, clients in enumerate(self.participants):
            self.anchor = shared
            trained = [local({**shared, **kept.get(client, {})}, client, number) for client in clients]
            sizes = torch.tensor([len(self.data[client][1]) for client in clients]).double()
            weights = sizes / sizes.sum()
            for client, found in zip(clients, trained, strict=True):
                kept[client] = {name: t for name, t in found.items() if personal(name)}
            for name, before in self.initial.items():
                if not personal(name):
                    mean = sum(w * t[name].double() for w, t in zip(weights, trained, strict=True))
                    shared = shared | {name: mean.round().long() if before.dtype == torch.int64 else mean}
        return shared, kept


def is_head(name: str) -> bool:
    return name.startswith("head.")


def is_norm(name: str) -> bool:
    return name.startswith("encoder.1.")


def reference(method: str, clients: Sequence[Sequence[int]]) -> tuple[Weights, dict[int, Weights]]:
    plain = Reference(clients)
    if method == "fedper":
        return plain.run(is_head, lambda start, k, t: plain.train(start, k, t, ""))
    if method == "fedbn":
        return plain.run(is_norm, lambda start, k, t: plain.train(start, k, t, ""))
    if method == "fedrep":
        return plain.run(
            is_head, lambda start, k, t: plain.train(plain.train(start, k, t, "head", epochs=3), k, t, "encoder")
        )
    if method == "fedbabu":
        return plain.run(is_head, lambda start, k, t: plain.train(start, k, t, "encoder"))
    own: dict[int, Weights] = {}

    def ditto(start: Weights, client: int, number: int) -> Weights:
        own[client] = plain.train(own.get(client, plain.initial), client, number, "", pull=0.7)
        return plain.train(start, client, number, "")

    return plain.run(lambda _: False, ditto)[0], own


PARAMS: dict[str, dict[str, Any]] = {"fedrep": {"head_epochs": 3}, "ditto": {"pull": 0.7}}


def assert_close(found: Weights, expected: Weights) -> None:
    for name, t in expected.items():
        torch.testing.assert_close(found[name].to(t.dtype), t, rtol=1e-11, atol=1e-13, msg=name)


@pytest.mark.parametrize("engine", ["plain", "stacked", "pool"])
@pytest.mark.parametrize("method", ["fedper", "fedbn", "fedrep", "fedbabu", "ditto"])
def test_a_run_is_the_papers(method: str, engine: str) -> None:
    server = norm_server(method, PARAMS.get(method, {}), engine)
    states, rows = played(server)
    server.close()
    shared, kept = reference(method, [row.clients for row in rows])
    assert len({tuple(row.clients) for row in rows}) > 1
    end = states[-1]
    assert_close({**end.model.params, **end.model.buffers}, shared)
    for client, expected in kept.items():
        found = personal_model(end.model, end.clients.read("global", [client])[0])
        assert_close({**found.params, **found.buffers}, expected)
        assert any((expected[name] != shared[name]).any() for name in expected) or method == "fedbabu"


def test_a_new_client_starts_from_the_initial_values() -> None:
    server = serve("fedper", clients_per_round=1, rounds=6)
    states, rows = played(server)
    seen: set[int] = set()
    initial = states[0].model.params["head.weight"]
    for state, row in zip(states, rows, strict=False):
        (assignment,) = plan_round(server, state).work.assignments
        assert assignment.client == row.clients[0]
        is_initial = torch.equal(assignment.state["personal/head.weight"], initial)
        assert is_initial == (assignment.client not in seen)
        seen.add(assignment.client)
    assert len(seen) > 1
    assert torch.equal(states[-1].model.params["head.weight"], initial)  # what the server would give a new client


class MovedByOne(ServerRule):
    """A server that adds 1 to every shared parameter, whatever the clients sent."""

    def aggregate(self, sent: Weights, updates: Updates, state: Weights) -> tuple[Weights, Weights]:
        return {name: t + 1 for name, t in sent.items()}, state


class HalfReceived(Personal):
    """A second model that starts between the client's own and the received one."""

    has_global_model = True

    def own_solver(self) -> Solver:
        return FedProx()

    def start(self, own: Weights, received: Weights) -> Weights:
        return {name: (t + received[name]) / 2 for name, t in own.items()}


class OwnHead(Personal):
    def keeps(self) -> tuple[str, ...]:
        return ("head",)


class HeadPlusOne(OwnHead):
    def start(self, own: Weights, received: Weights) -> Weights:
        return {name: t + 1 for name, t in own.items()}


class InitialHead(OwnHead):
    def start(self, own: Weights, received: Weights) -> Weights:
        return {name: received[name] + 1 for name in own}


class WritesIntoOwn(OwnHead):
    def start(self, own: Weights, received: Weights) -> Weights:
        for tensor in own.values():
            tensor.add_(1)
        return own


class WritesIntoReceived(OwnHead):
    def start(self, own: Weights, received: Weights) -> Weights:
        for tensor in received.values():
            tensor.add_(1)
        return {name: received[name] for name in own}


NO_STEP: dict[str, Any] = {"lr": 1e-30, "weight_decay": 0.0, "momentum": 0.0}
"""Steps that are smaller than rounding, so that models change only by what a start or a server rule does."""


@pytest.mark.parametrize("engine", ["plain", "stacked", "pool"])
@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (OwnHead, 0),
        (HeadPlusOne, 3),
        (InitialHead, 1),
        (HalfReceived, 1.25),
        (WritesIntoOwn, 3),
        (WritesIntoReceived, 1),
    ],
)
def test_a_part_chooses_what_local_training_starts_from(part: type[Personal], expected: float, engine: str) -> None:
    """Three rounds with all clients. Received models are 0, 1 and 2 above the initial one."""
    server = serve(
        replace(make_method(part()), server=MovedByOne()), clients_per_round=3, rounds=3, engine=engine, **NO_STEP
    )
    states, _ = played(server)
    server.close()
    initial, end = states[0], states[-1]
    for name in ("encoder.weight", "encoder.bias"):
        torch.testing.assert_close(end.model.params[name], initial.model.params[name] + 3)
    for client in range(3):
        own = end.clients.read("global", [client])[0]
        assert own.keys() >= {"personal/head.weight", "personal/head.bias"}
        for name in ("head.weight", "head.bias"):
            torch.testing.assert_close(own[f"personal/{name}"], initial.model.params[name] + expected)


class HalvedHead(OwnHead):
    def start(self, own: Weights, received: Weights) -> Weights:
        return {name: t / 2 for name, t in own.items()}


class InitialNorm(FedBN):
    """Every round starts with the initial BatchNorm layers, also with their running statistics."""

    def start(self, own: Weights, received: Weights) -> Weights:
        return {name: received[name] for name in own}


@pytest.mark.parametrize("engine", ["plain", "stacked", "pool"])
@pytest.mark.parametrize("part", [HalvedHead, InitialNorm])
def test_a_run_with_a_start_is_that_of_plain_pytorch(part: type[Personal], engine: str) -> None:
    config = settings(rounds=ROUNDS, clients_per_round=2, engine=engine, local_epochs=2)
    server = Server(federation(), make_method(part()), norm_model(), config)
    states, rows = played(server)
    server.close()
    plain = Reference([row.clients for row in rows])

    def chosen(start: Weights) -> Weights:
        if part is HalvedHead:
            return {name: t / 2 if is_head(name) else t for name, t in start.items()}
        return {name: plain.initial[name] if is_norm(name) else t for name, t in start.items()}

    shared, kept = plain.run(
        is_head if part is HalvedHead else is_norm, lambda start, k, t: plain.train(chosen(start), k, t, "")
    )
    end = states[-1]
    assert_close({**end.model.params, **end.model.buffers}, shared)
    for client, expected in kept.items():
        found = personal_model(end.model, end.clients.read("global", [client])[0])
        assert_close({**found.params, **found.buffers}, expected)


class SameHead(OwnHead):
    """It overrides `start`, and changes nothing."""

    def start(self, own: Weights, received: Weights) -> Weights:
        return own


def test_a_start_leaves_the_client_s_other_state_alone() -> None:
    ends = []
    for part in (OwnHead(), SameHead()):
        server = serve(replace(make_method("scaffold"), personal=part), rounds=3, clients_per_round=2)
        ends.append(played(server)[0][-1])
        server.close()
    for client in range(3):
        without, with_start = (end.clients.read("global", [client])[0] for end in ends)
        assert without.keys() == with_start.keys()
        assert any(not name.startswith("personal/") for name in without)
        assert all(torch.equal(with_start[name], tensor) for name, tensor in without.items())


class OnlyFineTuning(Personal):
    """It keeps nothing, so its start has nothing to choose."""

    has_global_model = True

    def fine_tuning(self) -> Phase:
        return Phase("all", 1)

    def start(self, own: Weights, received: Weights) -> Weights:
        return own


class TunedHead(OwnHead):
    """It has no global model, and each client's model is fine-tuned before its test."""

    def fine_tuning(self) -> Phase:
        return Phase("all", 20)


def test_untrained_clients_are_fine_tuned_one_by_one() -> None:
    server = serve(TunedHead(), rounds=1, clients_per_round=1)
    _, rows = played(server)
    server.close()
    assert rows[0].clients == [0]
    first, other = (rows[0].client_accuracy or [])[1:]
    assert first != other


def test_a_start_without_personal_tensors_does_nothing() -> None:
    server = serve(OnlyFineTuning(), rounds=2)
    states, _ = played(server)
    server.close()
    assert [state.round for state in states] == [0, 1, 2]


class HalfAHead(OwnHead):
    def start(self, own: Weights, received: Weights) -> Weights:
        return {"head.bias": own["head.bias"]}


def test_a_start_without_all_personal_tensors_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"start\(\) of HalfAHead returned no 'head.weight'; expected a tensor for each of the personal"
    ):
        played(serve(HalfAHead(), rounds=1))


class WholeModel(OwnHead):
    def start(self, own: Weights, received: Weights) -> Weights:
        return received


def test_a_start_with_shared_tensors_is_refused() -> None:
    with pytest.raises(UserError, match=r"'encoder.*', which is not a personal tensor; .*only the personal tensors$"):
        played(serve(WholeModel(), rounds=1))


class HalfANorm(FedBN):
    """The half of a batch counter is no whole number."""

    def start(self, own: Weights, received: Weights) -> Weights:
        return {name: t / 2 for name, t in own.items()}


def test_a_start_with_tensors_of_another_type_is_refused() -> None:
    server = Server(federation(), make_method(HalfANorm()), norm_model(), settings(rounds=1))
    with pytest.raises(UserError, match=r"num_batches_tracked'; expected a int64 tensor"):
        played(server)


@pytest.mark.parametrize(
    ("method", "left_out"),
    [
        ("fedper", {"head.weight", "head.bias"}),
        ("fedrep+scaffold", {"head.weight", "head.bias"}),
        ("fedper+fedcurv", {"head.weight", "head.bias"}),
        ("fedbabu", {"head.weight", "head.bias"}),
        ("fedbn+fedadam", {"encoder.1.weight", "encoder.1.bias", "encoder.1.running_mean", "encoder.1.running_var"}),
        ("ditto", set()),
    ],
)
def test_personal_tensors_never_leave(method: str, left_out: set[str]) -> None:
    server = norm_server(method, {}, "plain")
    state = server.start()
    plan = plan_round(server, state)
    result = server.train(plan)
    tensors = {**state.model.params, **state.model.buffers}
    sent = {**result.trained.params, **result.trained.buffers}
    assert tensors.keys() - sent.keys() - {"encoder.1.num_batches_tracked"} == left_out
    named = (*result.uplink, *plan.work.downlink, *plan.start.server_state)
    assert not [key for key in named if key.partition("/")[2] in left_out]
    each = sum(t.nbytes for name, t in tensors.items() if name in sent)
    extra = sum(t.nbytes for t in result.uplink.values())
    assert traffic(plan.work, result)["up"] == len(plan.clients) * each + extra
    assert traffic(plan.work, result)["down"] >= len(plan.clients) * each


def test_other_parts_see_only_shared_tensors() -> None:
    """FedProx pulls the shared layers, and the head steps along the plain gradient."""
    fedper, both = norm_server("fedper", {}, "plain"), norm_server("fedper+fedprox", {"mu": 5.0}, "plain")
    first, second = (
        server.train(plan_round(server, server.start())).trained.params["encoder.0.weight"] for server in (fedper, both)
    )
    assert (first - second).abs().max() > 1e-3
    plan = plan_round(both, both.start())
    client = plan.work.client(torch.zeros(4), plan.work.assignments[0].state)
    assert "head.weight" not in client.received
    assert not client.state


@pytest.mark.parametrize("engine", ["plain", "stacked"])
@pytest.mark.parametrize(("tunes", "names"), [("all", ""), ("head", "head"), ("body", "encoder")])
def test_fine_tuned_models_are_the_papers(tunes: str, names: str, engine: str) -> None:
    server = norm_server("fedbabu", {"tuning_epochs": 4, "tunes": tunes}, engine)
    states, rows = played(server)
    assert server.personal is not None
    tests = server.evaluation.personal_tests(server.personal)
    plain = Reference([row.clients for row in rows])
    end = states[-1]
    start = {name: t.clone() for name, t in {**end.model.params, **end.model.buffers}.items()}
    model_for = tests.models(server.runtime(server._stages.known(end)[-1], end), end, end.model)
    for client in range(3):
        found = model_for(client)
        assert_close({**found.params, **found.buffers}, plain.train(start, client, ROUNDS, names, epochs=4))
        assert found.params.keys() == end.model.params.keys()


def test_roles_layers_and_patterns() -> None:
    def names(*keeps: str) -> set[str]:
        return set(personal_names(make_method("fedper", {"layers": list(keeps)}).personal or Personal(), norm_model()))

    assert names("head") == {"head.weight", "head.bias"}
    assert names("encoder.0") == {"encoder.0.weight", "encoder.0.bias"}
    assert names("*.bias") == {"encoder.0.bias", "encoder.1.bias", "head.bias"}
    assert names("batchnorm", "head") == {
        *(f"encoder.1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")),
        "head.weight",
        "head.bias",
    }


def frozen_encoder() -> nn.Module:
    model = layered_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("head."))
    return model


class TwoSharedPhases(Personal):
    def keeps(self) -> tuple[str, ...]:
        return ("head",)

    def phases(self) -> tuple[Phase, ...]:
        return Phase(), Phase("shared")


class SecondModelAndHead(Personal):
    def keeps(self) -> tuple[str, ...]:
        return ("head",)

    def own_solver(self) -> Solver:
        return FedProx()


@dataclass(frozen=True)
class SharedFirst(Personal):
    personal_phases: int = 1

    def keeps(self) -> tuple[str, ...]:
        return ("head",)

    def phases(self) -> tuple[Phase, ...]:
        return Phase("shared"), *[Phase("personal", epochs=1)] * self.personal_phases


@pytest.mark.parametrize("engine", ["plain", "stacked"])
def test_shared_layers_stay_trained_through_several_personal_phases(engine: str) -> None:
    one, two = (played(serve(SharedFirst(phases), rounds=1, engine=engine))[0][-1].model.params for phases in (1, 2))
    torch.testing.assert_close(two, one, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("method", "params", "model", "message"),
    [
        ("fedbn", {}, layered_model(), "FedBN keeps BatchNorm layers on the clients, but the model has none; expected"),
        (
            "fedper",
            {"layers": ["tail"]},
            layered_model(),
            "keeps 'tail' on the clients.*expected one within encoder, head",
        ),
        (
            "fedper",
            {"layers": ["encoder"]},
            frozen_encoder(),
            "keeps 'encoder' on the clients, but the model does not train it; expected a layer whose",
        ),
        ("fedper", {"layers": ["head"]}, frozen_encoder(), "keeps every trained parameter of the model on the clients"),
        ("fedper", {"layers": ["*"]}, layered_model(), "nothing to share"),
        (SecondModelAndHead(), None, layered_model(), "a second model and also keeps tensors.*only one of these"),
        (TwoSharedPhases(), None, layered_model(), "has 2 phases that train shared parameters; expected one"),
    ],
)
def test_what_is_refused(method: Any, params: dict[str, Any] | None, model: nn.Module, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_model(make_method(method, params), model, 4)


@pytest.mark.parametrize(
    ("method", "compute"),
    [
        ("fedper+fedsam", 2.0),
        ("fedrep", 6.0),
        ("fedrep+fedsam", (10 + 2 * 2) / 2),
        ("ditto+fedsam", 3.0),
        ("fedbabu", 1.0),
    ],
)
def test_compute_counts_the_gradients_of_each_phase(method: str, compute: float) -> None:
    _, rows = played(norm_server(method, {}, "plain"))
    assert [row.compute for row in rows] == pytest.approx([compute] * ROUNDS)


def kept(state: RunState, client: int) -> Weights:
    return state.clients.read("global", [client])[0]


def test_a_method_without_a_global_model_tests_every_clients_model() -> None:
    states, rows = played(serve("fedper", clients_per_round=2, rounds=1))
    row, server = rows[-1], serve("fedper")
    assert row.evaluation is not None
    assert row.client_accuracy is not None
    assert len(row.client_accuracy) == 3
    assert row.accuracy == pytest.approx(sum(row.client_accuracy) / 3)
    test_set = server._base_runtime.test_set
    for client in range(3):
        model = personal_model(states[-1].model, kept(states[-1], client))
        assert test_set.evaluate(model).accuracy == pytest.approx(row.client_accuracy[client])
