"""Example-level privacy in local training: every sample's gradient is clipped, and their sum has noise."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from parallel_engines import pooled
from torch import Tensor, nn
from torch.nn import functional
from toy_runs import (
    config,
    finished,
    image_federation,
    linear,
    linear_layers,
    plan_round,
    same_bits,
    server,
    text_federation,
    trained,
    use_engine,
)

import fedskew as fs
from fedskew.data.federation import Federation
from fedskew.engine.contract import RoundWork
from fedskew.engine.data.batches import RoundKey, plan_batches
from fedskew.engine.noise import keyed_noise
from fedskew.engine.private_gradient import clipped_sums, require_sample_gradients
from fedskew.errors import UserError
from fedskew.experiment.preparation import require_example_privacy
from fedskew.experiment.round.record import RoundRow
from fedskew.methods import make_method
from fedskew.methods.fedavg import CrossEntropy
from fedskew.methods.parts import Client, Gradient, Objective, Outputs, Solver, Tensors
from fedskew.models import Classifier, DataShape, make_model
from fedskew.randomness import fold

CLIP, NOISE = 0.3, 0.8
PRIVATE: dict[str, Any] = {"example_clip": CLIP, "example_noise": NOISE}


def two_layers() -> Classifier:
    with torch.random.fork_rng():
        torch.manual_seed(11)
        encoder = nn.Sequential(nn.Conv2d(1, 3, 3), nn.GroupNorm(3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(108, 7))
        return Classifier(encoder, nn.Linear(7, 4))


def by_hand(federation: Federation, model: nn.Module, rounds: int, **changed: Any) -> nn.Module:
    """DP-SGD with one backward pass per sample, and torch's own SGD, on the batches that the plan names."""
    c = config(**PRIVATE, **changed)
    data, global_model = federation.dataset, copy.deepcopy(model).double()
    shares = federation.sizes / federation.sizes.sum()
    x = (torch.from_numpy(data.train.x).double() / 255 - 0.5) / 0.5
    y = torch.from_numpy(data.train.y)
    names = sorted(dict(global_model.named_parameters()))
    for round in range(rounds):
        total = {name: torch.zeros_like(t) for name, t in global_model.state_dict().items()}
        for client, rows in enumerate(federation.indices):
            local = copy.deepcopy(global_model)
            params = dict(local.named_parameters())
            optimiser = torch.optim.SGD(params.values(), c.lr, momentum=c.momentum, weight_decay=c.weight_decay)
            plan = plan_batches(rows, client, c.local_epochs, c.batch_size, 1, RoundKey(c.seed, 0, round))
            for step, batch in enumerate(plan.indices):
                sums = {name: torch.zeros_like(p) for name, p in params.items()}
                for sample in batch[batch >= 0]:
                    loss = functional.cross_entropy(local(x[sample : sample + 1]), y[sample : sample + 1])
                    grads = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
                    norm = torch.cat([g.flatten() for g in grads.values()]).norm()
                    for name, g in grads.items():
                        sums[name] += g * min(1.0, CLIP / float(norm))
                step_key = fold(torch.tensor(plan.client_key), torch.tensor(step))
                count = sum(p.numel() for p in params.values())
                noise = list(keyed_noise(torch.Size([count]), int(fold(step_key, 1))))
                for name in names:
                    drawn = torch.stack([noise.pop(0) for _ in range(params[name].numel())]).view(params[name].shape)
                    params[name].grad = (sums[name] + NOISE * CLIP * drawn) / min(c.batch_size, len(rows))
                optimiser.step()
            for name, tensor in local.state_dict().items():
                total[name] += shares[client] * tensor
        global_model.load_state_dict(total)
    return global_model


@pytest.mark.parametrize("samples", [8, 2])
def test_private_training_is_dp_sgd_by_hand(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, also if the gradients of a few samples are computed at a time."""
    monkeypatch.setattr("fedskew.engine.private_gradient._NUMBERS_AT_ONCE", {"cpu": 0})
    monkeypatch.setattr("fedskew.engine.private_gradient._SAMPLES_AT_ONCE", samples)
    federation = image_federation()
    this = server(federation, "fedavg", two_layers(), **PRIVATE)
    state, _ = finished(this)
    got = this.network.module(state.model).state_dict()
    for name, tensor in by_hand(federation, two_layers(), 2).state_dict().items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-9, atol=1e-11)


def test_without_clipping_and_noise_it_is_the_usual_training() -> None:
    """With full batches only: a short batch is divided by the size of a full one."""
    federation = image_federation(((5, 5, 0, 0), (0, 5, 10, 0)))
    loose = {"example_clip": 1e9, "example_noise": 1e-30}
    for method in ("fedavg", "moon", "fedsam", "fedntd+fedprox", "scaffold", "fedsol", "perfedavg", "fedrep", "ditto"):
        usual, private = (finished(server(federation, method, linear_layers(), **kw)) for kw in ({}, loose))
        for name, tensor in usual[0].model.params.items():
            torch.testing.assert_close(private[0].model.params[name], tensor, rtol=1e-8, atol=1e-10, msg=method)
        assert private[1][-1].loss == pytest.approx(usual[1][-1].loss, rel=1e-8), method


finite = st.floats(-1e6, 1e6, width=32)


@settings(max_examples=60, deadline=None)
@given(
    rows=arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 5)), elements=finite),
    other=arrays(np.float32, (5,), elements=st.floats(width=32)),
    clip=st.floats(1e-3, 1e3),
    data=st.data(),
)
def test_no_sample_moves_the_sum_by_more_than_twice_the_clip(
    rows: np.ndarray, other: np.ndarray, clip: float, data: st.DataObject
) -> None:
    """The other gradient may be anything, even NaN or infinite."""
    place = data.draw(st.integers(0, len(rows) - 1))
    cut = data.draw(st.integers(0, rows.shape[1]))
    replaced = rows.copy()
    replaced[place] = other[: rows.shape[1]]

    def total(gradients: np.ndarray) -> Tensor:
        tensors = {"a": torch.from_numpy(gradients[:, :cut]), "b": torch.from_numpy(gradients[:, cut:, None])}
        sums = clipped_sums(tensors, clip, torch.ones(len(gradients), dtype=torch.bool))
        return torch.cat([t.flatten() for t in sums.values()])

    assert total(rows).isfinite().all()
    assert float((total(rows) - total(replaced)).norm()) <= 2 * clip * (1 + 1e-9)
    alone = rows[place : place + 1]
    assert float(total(alone).norm()) <= clip * (1 + 1e-9)
    norm = float(np.linalg.norm(alone.astype(np.float64)))
    if norm <= clip:
        torch.testing.assert_close(total(alone), torch.from_numpy(alone[0]).double())


def silent(shape: torch.Size, key: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


@dataclass(frozen=True)
class Watched(Solver):
    """Keeps the gradients of all steps."""

    seen: list[Tensor]

    def direction(self, gradient: Gradient, params: Tensors, client: Client) -> Tensors:
        found = gradient(params)
        self.seen.append(torch.cat([g.flatten() for g in found.values()]))
        return {name: torch.zeros_like(g) for name, g in found.items()}  # the parameters stay as they are


def work_on(federation: Federation, method: Any, model: nn.Module, **changed: Any) -> tuple[Any, RoundWork]:
    this = server(federation, method, model, **{**PRIVATE, **changed})
    return this, plan_round(this, this.start()).work


def test_a_replaced_sample_changes_one_batch_of_each_epoch_by_at_most_twice_the_clip() -> None:
    """Without noise, at fixed parameters: the neighbouring data have another image and another label."""
    federation = image_federation(((9, 4, 0, 6),))
    neighbour = copy.deepcopy(federation)
    neighbour.dataset.train.x[7] = 255 - neighbour.dataset.train.x[7]
    neighbour.dataset.train.y[7] = 2
    gradients = []
    for data in (federation, neighbour):
        solver = Watched([])
        this, work = work_on(data, solver, two_layers(), local_epochs=3)
        this.engine.train(replace(work, noise=silent))
        gradients.append(solver.seen)
    steps = -(-19 // 5)
    moved = [float((a - b).norm()) * 5 for a, b in zip(*gradients, strict=True)]  # sums, of batches of 5
    assert len(moved) == 3 * steps
    for epoch in range(3):
        changed = [m for m in moved[epoch * steps : (epoch + 1) * steps] if m > 0]
        assert len(changed) == 1
        assert 0 < changed[0] <= 2 * CLIP * (1 + 1e-9)


def test_the_noise_has_the_deviation_that_is_accounted_for() -> None:
    """z·C/B in every number, and other noise in every step and client."""
    federation = image_federation(((9, 4, 0, 6), (4, 4, 4, 4)))
    noises = []
    for noise in (keyed_noise, silent):
        solver = Watched([])
        this, work = work_on(federation, solver, make_model("dnn", DataShape((1, 8, 8), 4)))
        this.engine.train(replace(work, noise=noise))
        noises.append(solver.seen)
    drawn = torch.stack([noisy - exact for noisy, exact in zip(*noises, strict=True)])
    assert float(drawn.std()) == pytest.approx(NOISE * CLIP / 5, rel=0.01)
    assert abs(float(drawn.mean())) < 1e-3
    correlations = torch.corrcoef(drawn) - torch.eye(len(drawn))
    assert float(correlations.abs().max()) < 0.05


@dataclass(frozen=True)
class CuriousLoss(Objective):
    """Declares that it uses single samples, and looks at everything it gets."""

    seen: list[tuple[int, list[int]]]
    sample_by_sample = True

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        self.seen.append((len(out.logits), client.label_counts.tolist()))
        return functional.cross_entropy(out.logits, y)


def test_a_loss_sees_one_sample_and_no_label_counts_whatever_it_declares() -> None:
    objective = CuriousLoss([])
    this, work = work_on(image_federation(((9, 4, 0, 6),)), objective, linear())
    this.engine.train(work)
    assert set(map(str, objective.seen)) == {"(1, [1, 1, 1, 1])"}


class Insatiable(Solver):
    """Computes two gradients, and declares one."""

    def direction(self, gradient: Gradient, params: Tensors, client: Client) -> Tensors:
        gradient(params)
        return gradient(params)


def test_a_gradient_that_is_not_accounted_for_is_not_computed() -> None:
    this, work = work_on(image_federation(), Insatiable(), linear())
    with pytest.raises(UserError, match="a step of Insatiable computes more gradients than its gradients"):
        this.engine.train(work)


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_all_engines_agree(method: str) -> None:
    results = []
    for engine in ("plain", "stacked", "pool"):
        this = server(image_federation(), method, linear_layers(), **PRIVATE)
        if engine == "stacked":
            this = server(image_federation(), method, linear_layers(), engine="stacked", **PRIVATE)
        elif engine == "pool":
            use_engine(this, pooled(this))
        results.append(finished(this))
        expected = ["example-level privacy computes gradients sample by sample, so clients run one after another"]
        assert this.engine.notices == (expected if engine == "stacked" else [])
        this.engine.close()
    for state, rows in results[1:]:
        assert same_bits(state, results[0][0])
        assert [row.loss for row in rows] == [row.loss for row in results[0][1]]


class Interrupted(Exception):
    pass


class Interrupt(fs.Callback):
    def on_round(self, row: RoundRow, rounds_ahead: int) -> None:
        if row.round == 2:
            raise Interrupted


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    federation, model = fs.federation("digits", fs.Dirichlet(clients=3, beta=0.5)), linear(classes=10)
    settings = {"rounds": 4, "local_epochs": 1, "device": "cpu", "batch_size": 200, **PRIVATE}
    whole = fs.run(federation, "scaffold", model=model, **settings)
    with pytest.raises(Interrupted):
        fs.run(federation, "scaffold", model=model, out=tmp_path / "run", callbacks=[Interrupt()], **settings)
    resumed = fs.run(federation, "scaffold", model=model, out=tmp_path / "run", **settings)
    assert [row.privacy for row in resumed.history] == [row.privacy for row in whole.history]
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name])


def test_text_models_and_dropout_have_gradients_of_single_samples() -> None:
    federation = text_federation()
    model = make_model("fasttext", DataShape((6,), 4, 30))
    state, rows = finished(server(federation, "fedavg", model, **PRIVATE))
    assert all(t.isfinite().all() for t in state.model.params.values())
    assert rows[-1].privacy is not None
    dropped = nn.Sequential(nn.Flatten(), nn.Linear(64, 30), nn.Dropout(0.5), nn.Linear(30, 4))
    images = image_federation()
    one, other = (finished(server(images, "fedavg", dropped, **PRIVATE))[0] for _ in range(2))
    assert same_bits(one, other)


class Tempered(nn.Module):
    """Has a parameter without axes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.temperature = nn.Linear(64, 4), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.flatten(1)) / self.temperature
        return out


def test_a_parameter_without_axes_is_trained() -> None:
    state, rows = trained(image_federation(), "fedavg", Tempered(), **PRIVATE)
    assert float(state.model.params["temperature"]) != 2.0
    assert rows[-1].diverged == []


class Assigning(nn.Module):
    """Assigns what it saw of a sample to a buffer, which would be sent without noise."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 4)
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + x.flatten(1).mean(dim=0)
        out: Tensor = self.layer(x.flatten(1))
        return out


class Tracking(nn.Module):
    """A model that counts its batches, as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        out: Tensor = self.layer(x.flatten(1))
        return out


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 4)),
            "BatchNorm2d, which mix",
        ),
        (nn.Sequential(nn.InstanceNorm2d(1, track_running_stats=True), nn.Flatten()), "cannot compute the gradients"),
        (Tracking(), "would mutate a captured Tensor"),
        (Assigning(), "writes into its buffers"),
    ],
)
def test_models_without_gradients_of_single_samples_are_refused(model: nn.Module, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        require_sample_gradients(model, torch.rand(1, 1, 8, 8))


def test_a_head_on_features_of_a_model_with_batch_norm_is_covered() -> None:
    federation = fs.federation("digits", fs.Dirichlet(clients=3, beta=0.5))
    fs.run(federation, "fedavg", model="resnet8", train="head", rounds=1, local_epochs=1, device="cpu", **PRIVATE)
    with pytest.raises(UserError, match="BatchNorm2d"):
        fs.run(federation, "fedavg", model="resnet8", rounds=1, device="cpu", **PRIVATE)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"method": "fedvls"}, "method 'fedvls' makes the loss depend on label counts"),
        ({"method": "fedavg+feddecorr"}, "on several samples at once"),
        ({"method": "feddisco"}, "reveals label skew"),
        ({"method": "fedcurv"}, "computes sums over the client's samples"),
        ({"method": "pkd"}, "runs in stages"),
        ({"method": "fedavg+ccvr"}, "runs in stages"),
        ({"method": "fedavg", "class_weights": "balanced"}, "the setting class_weights makes the loss depend on"),
        ({"method": "fedavg", "class_weights": "counts"}, "the setting class_weights reveals label counts"),
        ({"method": "fedavg", "batches": "balanced"}, "expected shuffled, because example-level privacy forbids"),
        ({"method": "fedavg", "example_clip": None}, "example_noise is set without example_clip"),
        ({"method": "fedavg", "example_noise": None}, "example_clip is set without example_noise"),
        ({"method": "fedavg", "example_noise": 0}, "example_noise is 0; expected a finite number above 0"),
    ],
)
def test_what_noise_would_not_cover_is_refused(settings: dict[str, Any], reason: str) -> None:
    federation = fs.federation("digits", fs.Dirichlet(clients=3, beta=0.5))
    with pytest.raises(UserError, match=reason):
        fs.run(federation, rounds=1, local_epochs=1, device="cpu", model="dnn", **{**PRIVATE, **settings})


def test_given_class_weights_are_covered() -> None:
    weighted = {"class_weights": {str(digit): 1.0 + digit for digit in range(10)}}
    federation = fs.federation("digits", fs.Dirichlet(clients=3, beta=0.5))
    result = fs.run(federation, "fedavg", rounds=1, local_epochs=1, device="cpu", model="dnn", **weighted, **PRIVATE)
    assert result.privacy is not None


def test_a_loss_of_a_user_must_declare_that_it_is_a_mean_over_samples() -> None:
    class Mine(CrossEntropy):
        def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
            return 2 * super().loss(out, y, client)

    class Declared(Mine):
        sample_by_sample = True

    with pytest.raises(UserError, match=r"does not cover \(Mine\)"):
        require_example_privacy(make_method(Mine()), linear(), torch.rand(1, 1, 8, 8))
    require_example_privacy(make_method(Declared()), linear(), torch.rand(1, 1, 8, 8))


@pytest.mark.parametrize("solver", ["fedacg", "fedlesam", "fedsol", "perfedavg"])
def test_a_personal_head_that_needs_one_more_gradient_is_refused(solver: str) -> None:
    """The head steps along the plain gradient, which these solvers do not compute."""
    held = fs.federation("digits", fs.Dirichlet(clients=2))
    values = {"rounds": 1, "local_epochs": 1, "batch_size": 800, "engine": "plain", "device": "cpu"}
    with pytest.raises(UserError, match=r"one more gradient per step .* expected another solver, such as fedprox"):
        fs.run(held, f"{solver}+fedper", **values, example_clip=1.0, example_noise=4.0, callbacks=[NoRound()])


class NoRound(fs.Callback):
    """Fails if a run begins."""

    def on_start(self, prepared: object, state: object, rounds_ahead: int) -> None:
        raise AssertionError
