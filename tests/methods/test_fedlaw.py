"""FedLAW against a loop with PyTorch's own layers and Adam, as in the authors' program, and the server's samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from toy_runs import advance, distance, finished, image_federation, linear_layers, norm_and_dropout, server, trained

import fedskew as fs
from fedskew.errors import UserError
from fedskew.experiment.preparation import check_model, prepare
from fedskew.experiment.round.aggregate import server_key
from fedskew.flower.federation_server import refuse_unfit
from fedskew.methods import METHODS, make_method
from fedskew.methods.method_list import needs
from fedskew.randomness import permutation

PARAMS = {"server_epochs": 21, "server_batch": 9, "weights_lr": 0.05}
WHOLE: dict[str, Any] = {"batch_size": 50, "momentum": 0.0, "weight_decay": 0.0, "lr": 0.1}
"""One step per epoch, of plain SGD."""


@pytest.mark.parametrize("engine", ["plain", "stacked"])
def test_two_rounds_are_those_of_the_authors_program(engine: str) -> None:
    this = server(image_federation(), "fedlaw", linear_layers(), PARAMS, clients_per_round=3, engine=engine, **WHOLE)
    federation, state = this._federation, this.start()
    inputs, y = this._runtimes.train_samples.inputs, torch.from_numpy(federation.dataset.train.y)
    proxy = torch.from_numpy(federation.server_samples)
    reference = this.network.module(state.model).double()
    for _ in range(2):
        stage = this.next_stage(state)
        assert stage is not None
        plan = this.plan(stage, state)
        key, clients = server_key(plan.work.key), plan.clients.tolist()
        state, _row = advance(this, state)
        models = []
        for client in clients:
            copy = this.network.module(this.start().model).double()
            copy.load_state_dict(reference.state_dict())
            rows = torch.from_numpy(federation.indices[client])
            optimiser = torch.optim.SGD(copy.parameters(), lr=0.1)
            for _ in range(2):
                optimiser.zero_grad()
                torch.nn.functional.cross_entropy(copy(inputs(rows)), y[rows]).backward()
                optimiser.step()
            models.append(dict(copy.named_parameters()))
        sizes = torch.from_numpy(federation.sizes[clients].astype(np.float64))
        optimisees = torch.cat([(sizes / sizes.sum()).log(), torch.zeros(1)]).requires_grad_()
        adam = torch.optim.Adam([optimisees], lr=0.05, betas=(0.5, 0.999))
        for epoch in range(21):
            adam.param_groups[0]["lr"] = 0.05 if epoch < 20 else 0.025
            for batch in torch.from_numpy(permutation(len(proxy), key, "learned weights", epoch)).split(9):
                merged = shrunk(models, optimisees)
                out = torch.func.functional_call(reference, merged, (inputs(proxy[batch]),))
                adam.zero_grad()
                torch.nn.functional.cross_entropy(out, y[proxy[batch]]).backward()
                adam.step()
        reference.load_state_dict({name: w.detach() for name, w in shrunk(models, optimisees).items()})
        for name, expected in reference.named_parameters():
            torch.testing.assert_close(state.model.params[name], expected.detach(), rtol=0, atol=1e-12)


def shrunk(models: list[dict[str, Any]], optimisees: torch.Tensor) -> dict[str, torch.Tensor]:
    share = optimisees[-1].exp() * optimisees[:-1].softmax(dim=0)
    return {name: sum(a * m[name].detach() for a, m in zip(share, models, strict=True)) for name in models[0]}  # type: ignore[misc]


def test_engines_agree_with_batchnorm_and_other_parts() -> None:
    params = {"server_epochs": 2}
    plain, rows = trained(image_federation(), "fedvls+fedsam+feddisco+fedlaw", norm_and_dropout(), params)
    this = server(image_federation(), "fedvls+fedsam+feddisco+fedlaw", norm_and_dropout(), params, engine="stacked")
    assert distance(finished(this)[0], plain) < 1e-9
    assert not any(row.diverged for row in rows)


def test_without_steps_it_is_fedavg() -> None:
    federation = image_federation().give_server(0.3)
    learned, _ = trained(image_federation(), "fedlaw", linear_layers(), {"server_epochs": 0})
    average, _ = trained(federation, "fedavg", linear_layers())
    assert distance(learned, average) < 1e-12


def test_the_servers_samples_are_no_clients_and_equally_many_of_each_class() -> None:
    whole = fs.federation("digits", fs.Dirichlet(clients=5, beta=0.3), seed=2)
    fed = whole.give_server(0.1)
    assert np.bincount(fed.dataset.train.y[fed.server_samples]).tolist() == [len(whole.samples) // 100] * 10
    assert not set(fed.server_samples) & set(fed.samples)
    assert set(fed.server_samples) | set(fed.samples) == set(whole.samples)
    assert [set(part) <= set(before) for part, before in zip(fed.indices, whole.indices, strict=True)] == [True] * 5
    assert np.array_equal(fed.server_samples, whole.give_server(0.1).server_samples)
    assert fed.unused == whole.unused
    with pytest.raises(UserError, match=r"server_data is 0\.001, which is less than one sample per class"):
        whole.give_server(0.001)


def test_the_smallest_server_data_that_a_message_names_is_enough() -> None:
    classes = np.arange(700) % 10
    fed = fs.federation((np.ones((700, 1)), classes), fs.IID(clients=2), test=(np.ones((700, 1)), classes))
    with pytest.raises(UserError, match=r"expected at least 0\.015$"):  # 10/700 is 0.0143
        fed.give_server(0.014)
    assert len(fed.give_server(0.015).server_samples) == 10


def test_a_run_learns_from_the_servers_samples() -> None:
    fed = fs.federation("digits", fs.Shards(clients=5, shards=2), seed=0)
    settings: dict[str, Any] = {"rounds": 4, "local_epochs": 1, "lr": 0.1, "server_data": 0.1, "progress": False}
    runs = {name: fs.run(fed, name, device="cpu", **settings) for name in ("fedavg", "fedlaw")}
    assert runs["fedlaw"].accuracy > runs["fedavg"].accuracy + 0.05
    assert runs["fedlaw"].config.server_data == 0.1


def test_it_says_what_it_needs_and_where_it_does_not_fit() -> None:
    assert needs(METHODS["fedlaw"]) == "server data"
    assert METHODS["fedlaw"].sends == "model, sample count"
    assert METHODS["fedlaw"].individual_updates_reason == "uses individual updates on the server"
    with pytest.raises(UserError, match="method 'fedlaw' needs samples at the server; expected server_data"):
        prepare(fs.Config(method="fedlaw", data="digits"))
    with pytest.raises(UserError, match=r"tests the global model on the server's samples, but has no global model"):
        check_model(make_method("fedper+fedlaw"), linear_layers(), 4)
    with pytest.raises(UserError, match="server_epochs is -1; expected a whole number ≥ 0"):
        make_method("fedlaw", {"server_epochs": -1})
    with pytest.raises(UserError, match="needs samples at the server, which only a simulation has"):
        refuse_unfit(make_method("fedlaw"), fs.Config())
    with pytest.raises(UserError, match="server_data is for simulations"):
        refuse_unfit(make_method("fedavg"), fs.Config(server_data=0.1))
