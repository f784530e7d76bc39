"""The two engines give the same run: every method, every model, every kind of client."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from method_cases import JOINED, KEEP_MOVES, PARAMS, TOLERANCE, by_kind, only, slow
from torch import nn
from toy_runs import distance, finished, image_federation, linear, norm_and_dropout, server, text_federation

from fedskew.data.federation import Federation
from fedskew.experiment.round.state import RunState
from fedskew.methods import METHODS
from fedskew.models import MODELS, DataShape, make_model


def disagreement(
    federation: Federation, method: str, model: nn.Module, params: dict[str, Any] | None = None, **settings: Any
) -> float:
    """Between the engines, after a whole run; neither may have had to do other than it was asked."""
    states, losses = [], []
    for engine in ("plain", "stacked"):
        this = server(federation, method, model, params, engine=engine, **settings)
        state, rows = finished(this)
        assert this.engine.name == engine
        assert this.engine.notices == []
        assert all(row.diverged == [] for row in rows)
        states.append(state)
        losses.append([row.loss or 0.0 for row in rows])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3, abs=1e-5)
    assert difference_of_moves(this.start(), *states) < 0.05  # small steps would hide in large weights
    return distance(*states)


def difference_of_moves(start: RunState, one: RunState, other: RunState) -> float:
    """How far the runs' ways from their common start differ, relative to their length."""
    difference = length = 0.0
    trained = "encoder.0" if "encoder.0" in one.models else "global"  # FedConcat's global model is another
    for name, w in start.model.params.items():
        move, other_move = (state.models[trained].model.params[name].double() - w.double() for state in (one, other))
        difference += float((move - other_move).square().sum())
        length += float(move.square().sum())
    return (difference / length) ** 0.5 if length else difference**0.5


IN_FLOAT32 = ("fedavg", "fedvls", "scaffold", "fpl", "pkd", JOINED[0])
"""What `make test` also runs in float32. In float64 it runs one method of each kind."""


@pytest.mark.parametrize(
    ("method", "precision"),
    [
        *(pytest.param(*case.values, "float64", marks=case.marks) for case in by_kind()),
        *only(((method, "float32") for method in IN_FLOAT32), ((m, "float32") for m in (*METHODS, *JOINED))),
    ],
)
def test_every_method(method: str, precision: str) -> None:
    params = PARAMS.get(method)
    lr = 0.07 if any(name in method for name in KEEP_MOVES) else 0.01
    settings: dict[str, Any] = {"clients_per_round": 3, "local_epochs": 2 if precision == "float64" else 1, "lr": lr}
    difference = disagreement(image_federation(), method, norm_and_dropout(), params, precision=precision, **settings)
    assert difference < TOLERANCE[precision]


@pytest.mark.parametrize("method", by_kind(METHODS))
def test_every_method_on_text(method: str) -> None:
    federation = text_federation()
    model = make_model("fasttext", DataShape(federation.dataset.input_shape, 4, federation.dataset.vocabulary))
    lr = 0.07 if any(name in method for name in KEEP_MOVES) else 0.01
    settings: dict[str, Any] = {"clients_per_round": 3, "local_epochs": 1, "lr": lr}
    difference = disagreement(federation, method, model, PARAMS.get(method), **settings)
    assert difference < TOLERANCE["float64"]


LARGE = {"vgg11": 32, "mobilenetv2": 16, "resnet18": 8, "resnet18-imagenet": 32, "resnet10": 8}
"""Models that are slow in a test, with images as small as their BatchNorm stays well-conditioned on.

Their kinds of layers are also in smaller models and in `layers_of_large_models`."""

NAMES = {entry.factory: name for name, entry in MODELS.items()}.values()  # one name for each network
SMALL = [name for name in NAMES if name not in LARGE]

CASES = [
    *((name, "fedvls", "float64") for name in SMALL),
    *slow(*((name, "fedvls", "float64") for name in LARGE)),
    *only(
        [("vgg9", "fedvls", "float32"), ("resnet8-b", "fedvls", "float32"), ("fasttext", "fedvls", "float32")],
        ((name, "fedvls", "float32") for name in SMALL),
    ),
    *only(
        [("resnet8", "scaffold", "float64"), ("fasttext", "scaffold", "float64"), ("resnet8-b", "fedlmd", "float64")],
        ((name, method, "float64") for name in SMALL for method in ("scaffold", "fedlmd")),
    ),
    *((name, "balancefl+fedcurv", "float64") for name in ("cnn", "fasttext", "resnet8")),
    *((name, "fpl+fedvls", "float64") for name in ("cnn", "fasttext", "resnet8")),
]


def model_case(name: str) -> tuple[Federation, nn.Module]:
    counts = ((3, 3, 2), (4, 0, 2), (0, 4, 0))
    if name == "fasttext":
        federation = text_federation(counts)
    else:
        side = LARGE.get(name, max(8, MODELS[name].smallest_side))
        federation = image_federation(counts, (1, side, side), tests=3)
    inputs = DataShape(federation.dataset.input_shape, 3, federation.dataset.vocabulary)
    return federation, make_model(name, inputs)


@pytest.mark.parametrize(("model", "method", "precision"), CASES)
def test_every_model(model: str, method: str, precision: str) -> None:
    federation, module = model_case(model)
    settings: dict[str, Any] = {"clients_per_round": 2, "local_epochs": 1, "batch_size": 8, "lr": 1e-3}
    rounds = 1 if model in LARGE else 2
    found = disagreement(federation, method, module, precision=precision, rounds=rounds, eval_every=rounds, **settings)
    assert found < TOLERANCE[precision]


def layers_of_large_models() -> nn.Module:
    """A wide convolution with a stride, pooling that overlaps, and a convolution of each channel by itself."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 7, 2, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(4, 8, 1, bias=False), nn.Conv2d(8, 8, 3, 2, 1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, 1, 1, groups=8, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def test_layers_of_large_models() -> None:
    federation = image_federation(shape=(1, 16, 16))
    assert disagreement(federation, "fedvls", layers_of_large_models(), lr=0.01, local_epochs=1) < 1e-9


EDGES: dict[str, tuple[tuple[int, ...], ...]] = {
    "a short last batch": ((4, 3, 2, 3), (2, 2, 2, 5)),
    "one sample": ((0, 1, 0, 0), (4, 4, 4, 4)),
    "one sample each": ((0, 1, 0, 0), (1, 0, 0, 0)),
    "one class": ((0, 7, 0, 0), (4, 4, 4, 4)),
    "no vacant class": ((3, 2, 4, 3), (1, 1, 1, 5)),
    "one vacant class": ((3, 0, 4, 3), (1, 1, 0, 5)),
    "equal clients": ((3, 3, 3, 3), (3, 3, 3, 3)),
    "one client": ((5, 2, 0, 1),),
    "many batches beside one": ((20, 9, 0, 0), (1, 0, 0, 1)),
}


EDGE_METHODS = ("fedvls", "fpl", "fedlmd", "fedgr", "scaffold", "fedcurv", "balancefl")


@pytest.mark.parametrize(
    ("edge", "method"),
    only(
        [*((edge, "fedvls") for edge in EDGES), ("one sample each", "fpl"), ("one vacant class", "fpl")],
        itertools.product(EDGES, EDGE_METHODS),
    ),
)
def test_edge_clients(edge: str, method: str) -> None:
    federation = image_federation(EDGES[edge])
    for model in (norm_and_dropout(), linear()):
        assert disagreement(federation, method, model, lr=0.01, local_epochs=1) < 1e-9


@pytest.mark.parametrize("batch_size", [2, 3, 1000])
def test_batch_sizes(batch_size: int) -> None:
    settings = {"batch_size": batch_size, "lr": 0.01, "local_epochs": 1}
    assert disagreement(image_federation(), "fedvls", norm_and_dropout(), **settings) < 1e-9


@pytest.mark.parametrize("augment", [("crop", "flip", "cutout"), ("crop-reflect", "autoaugment")])
def test_augmentation(augment: tuple[str, ...]) -> None:
    federation = image_federation(shape=(3, 20, 20))
    assert disagreement(federation, "fedlmd", linear(features=1200), augment=augment, clients_per_round=3) < 1e-9


def test_settings_of_the_run() -> None:
    settings = {"clip_norm": 0.3, "lr_decay": 0.5, "average": "uniform", "momentum": 0.0}
    assert disagreement(image_federation(), "scaffold", norm_and_dropout(), **settings) < 1e-9


def test_batch_norm_with_a_cumulative_average() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3, momentum=None), nn.Flatten(), nn.Linear(108, 4))
    assert disagreement(image_federation(), "fedavg", model) < 1e-9


def test_batch_norm_without_parameters() -> None:
    norm = nn.BatchNorm2d(3, affine=False)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), norm, nn.Flatten(), nn.Linear(108, 4))
    assert disagreement(image_federation(), "fedvls", model) < 1e-9


def test_a_teacher_that_always_takes_its_batch_s_statistics() -> None:
    norm = nn.BatchNorm2d(3, track_running_stats=False)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), norm, nn.Flatten(), nn.Linear(108, 4))
    assert disagreement(image_federation(), "fedlmd", model) < 1e-9


def test_bfloat16_agrees_to_its_own_precision() -> None:
    federation = image_federation(((4, 3, 2, 3), (2, 2, 2, 5)))
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(108, 4))
    assert disagreement(federation, "fedvls", model, precision="bf16", lr=0.01, local_epochs=1) < 1e-2


def test_one_percent_of_pfedme_s_pull_is_noticed() -> None:
    """The setting that keeps rounding small keeps a wrong rule large."""
    settings: dict[str, Any] = {"precision": "float32", "clients_per_round": 3, "lr": 0.02}
    right, wrong = (
        finished(
            server(image_federation(), "pfedme", norm_and_dropout(), PARAMS["pfedme"] | {"pull": pull}, **settings)
        )
        for pull in (15.0, 15.15)
    )
    assert distance(right[0], wrong[0]) > 3e-3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("method", METHODS)
def test_every_method_on_a_gpu(method: str) -> None:
    """The stacked engine on the GPU against the plain one on the CPU and on the GPU."""
    states = []
    for engine, device in (("plain", "cpu"), ("plain", "cuda"), ("stacked", "cuda")):
        this = server(
            image_federation(), method, norm_and_dropout(), PARAMS.get(method), engine=engine, device=device,
            precision="float32", clients_per_round=3, lr=0.02,
        )  # fmt: skip
        states.append(finished(this)[0])
    assert distance(states[0], states[1]) < 1e-3
    assert distance(states[1], states[2]) < 1e-3
