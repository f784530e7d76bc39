"""Small federations with exactly known label counts, and whole runs over them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from fedskew.data.dataset import Dataset, Samples
from fedskew.data.federation import Federation
from fedskew.engine import Engine, Fetch, arithmetic
from fedskew.experiment.config import Config
from fedskew.experiment.loop import run_round, run_rounds
from fedskew.experiment.preparation import Prepared
from fedskew.experiment.recorder import Recorder
from fedskew.experiment.round.plan import RoundPlan
from fedskew.experiment.round.record import RoundRow
from fedskew.experiment.round.server import Server
from fedskew.experiment.round.state import RunState
from fedskew.methods import Method, Part, make_method
from fedskew.methods.parts import Tensors, pack
from fedskew.models import Classifier
from fedskew.models.heads import HEADS, replace_head

SKEWED = (
    (9, 4, 0, 6),  # one vacant class
    (0, 0, 1, 0),  # one sample
    (3, 2, 2, 4),  # no vacant class, a short last batch
    (0, 11, 0, 0),  # one class
    (5, 0, 0, 2),
)
"""Label counts of five clients."""


def image_federation(
    counts: Sequence[Sequence[int]] = SKEWED, shape: tuple[int, int, int] = (1, 8, 8), seed: int = 0, tests: int = 40
) -> Federation:
    """Random images; client k has counts[k][c] samples of class c."""
    rng = np.random.default_rng(seed)
    labels, indices = _dealt(counts)
    classes = len(counts[0])

    def samples(y: np.ndarray) -> Samples:
        x = rng.integers(0, 256, (len(y), *shape))
        x[:, :, : shape[1] // 2] = (x[:, :, : shape[1] // 2] + 40 * y[:, None, None, None]) // 2
        return Samples(np.clip(x, 0, 255).astype(np.uint8), y)

    dataset = Dataset(
        "toy", "image", tuple(f"c{c}" for c in range(classes)), samples(labels), samples(np.arange(tests) % classes)
    )
    return Federation(dataset, indices, {"rule": "by hand"}, seed)


def text_federation(counts: Sequence[Sequence[int]] = SKEWED, length: int = 6, vocabulary: int = 30) -> Federation:
    """Random texts, padded with 0."""
    rng = np.random.default_rng(0)
    labels, indices = _dealt(counts)
    classes = len(counts[0])

    def samples(y: np.ndarray) -> Samples:
        x = rng.integers(1, vocabulary, (len(y), length))
        x[np.arange(length) >= rng.integers(0, length + 1, (len(y), 1))] = 0
        return Samples(x.astype(np.int64), y)

    names = tuple(f"c{c}" for c in range(classes))
    dataset = Dataset("toy", "text", names, samples(labels), samples(np.arange(20) % classes), vocabulary=vocabulary)
    return Federation(dataset, indices, {"rule": "by hand"}, 0)


def _dealt(counts: Sequence[Sequence[int]]) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    table = np.asarray(counts, dtype=np.int64)
    labels = np.concatenate([np.repeat(np.arange(table.shape[1]), row) for row in table])
    order = np.random.default_rng(1).permutation(len(labels))
    place = np.argsort(order)
    ends = np.cumsum(table.sum(axis=1))
    return labels[order], tuple(np.sort(place[end - n : end]) for end, n in zip(ends, table.sum(axis=1), strict=True))


def norm_and_dropout(classes: int = 4, channels: int = 1) -> Classifier:
    """Every layer that could tie a result to the engine: BatchNorm and dropout of both kinds, for 8×8 images."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        encoder = nn.Sequential(
            nn.Conv2d(channels, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 6, 3),
            nn.Dropout2d(0.1),
            nn.Flatten(),
            nn.Linear(6, 8),
            nn.BatchNorm1d(8),
        )
        return Classifier(encoder, nn.Linear(8, classes))


def linear(classes: int = 4, features: int = 64) -> Classifier:
    """The smallest model there is."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Classifier(nn.Flatten(), nn.Linear(features, classes))


def linear_layers(classes: int = 4, features: int = 64) -> Classifier:
    """A linear body and a linear head, for methods that keep one of them on the clients."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Classifier(nn.Sequential(nn.Flatten(), nn.Linear(features, 6)), nn.Linear(6, classes))


def config(**settings: Any) -> Config:
    """Momentum, weight decay and float64, unless said otherwise."""
    usual: dict[str, Any] = {
        "rounds": 2, "local_epochs": 2, "batch_size": 5, "lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3,
        "precision": "float64", "engine": "plain", "device": "cpu",
    }  # fmt: skip
    return Config(**{**usual, **settings})


def server(
    federation: Federation,
    method: str | Method | Part,
    model: nn.Module,
    params: dict[str, Any] | None = None,
    **settings: Any,
) -> Server:
    chosen = make_method(method, params)
    federation = with_server_data(federation, chosen)
    return Server(federation, chosen, with_fitting_head(model, chosen), config(**settings))


def with_server_data(federation: Federation, method: Method) -> Federation:
    """The federation, with samples at the server if the method needs them."""
    return federation.give_server(0.3) if method.server.needs_server_data else federation


def with_fitting_head(model: nn.Module, method: Method) -> nn.Module:
    """The model, with the head that the method chooses."""
    kind = method.head
    if kind not in HEADS or isinstance(getattr(model, "head", None), HEADS[kind]):
        return model
    assert isinstance(model, Classifier)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return replace_head(copy.deepcopy(model), kind)


def plan_round(server: Server, state: RunState) -> RoundPlan:
    """The plan of the next round."""
    stage = server.next_stage(state)
    assert stage is not None
    return server.plan(stage, state)


def advance(server: Server, state: RunState) -> tuple[RunState, RoundRow]:
    """The next round, as the loop runs it."""
    stage = server.next_stage(state)
    assert stage is not None
    with arithmetic(server._config.precision):
        return run_round(server, stage, state)


EngineKind = TypeVar("EngineKind", bound=Engine)


def use_engine(server: Server, engine: EngineKind) -> EngineKind:
    """Have the server's clients trained by this engine."""
    object.__setattr__(server._base_runtime, "engine", engine)
    return engine


class ListRecorder(Recorder):
    """Keeps rows and states in memory."""

    def __init__(self, server: Server) -> None:
        ready = Prepared(server._config, server._federation, server._planner._method, nn.Identity())
        super().__init__(ready, server)
        self.states: list[RunState] = []

    def add(self, row: RoundRow, state: RunState, snapshot: Fetch | None = None) -> None:
        super().add(row, state, snapshot)
        self.states.append(state)

    def notify(self, lines: list[str]) -> None:
        """Leave the engine's notices to the tests."""


def finished(server: Server, state: RunState | None = None) -> tuple[RunState, list[RoundRow]]:
    """All rounds from `state` on, by the loop of a run; the rows without their times."""
    recorder = ListRecorder(server)
    with arithmetic(server._config.precision):
        state = run_rounds(server, state or server.start(), recorder)
    return state, [timeless(row) for row in recorder.rows]


def timeless(row: RoundRow) -> RoundRow:
    """A row without its times, which differ from run to run."""
    return replace(row, time={}, seconds=0.0)


def trained(
    federation: Federation,
    method: str | Method | Part,
    model: nn.Module,
    params: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[RunState, list[RoundRow]]:
    return finished(server(federation, method, model, params, **settings))


def everything(state: RunState) -> Tensors:
    """All tensors of a run, on the host, its clients' included."""
    tensors = {name: t.cpu() for name, t in state.tensors().items()}
    for model, clients in state.clients.versions.items():
        for client, kept in zip(clients, state.clients.read(model, list(clients)), strict=True):
            tensors |= pack(f"{model}:client:{client}", kept)
    return tensors


def same_bits(a: RunState, b: RunState) -> bool:
    first, second = everything(a), everything(b)
    return (
        a.meta() == b.meta()
        and a.clients.versions == b.clients.versions
        and first.keys() == second.keys()
        and all(first[name].dtype == t.dtype and torch.equal(first[name], t) for name, t in second.items())
    )


def distance(a: RunState, b: RunState) -> float:
    """The largest difference between two runs' tensors, relative to the tensor.

    A shift that the next BatchNorm cancels has a gradient of zero but for rounding, so no tensor is measured by less
    than a hundredth of the largest of its kind.
    """
    assert a.meta() == b.meta()
    first, second = everything(a), everything(b)
    assert first.keys() == second.keys()
    largest: dict[str, float] = {}
    for name, tensor in first.items():
        largest[_kind(name)] = max(largest.get(_kind(name), 0.0), _size(tensor))
    worst = 0.0
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        scale = max(_size(tensor), largest[_kind(name)] / 100, 1e-12)
        worst = max(worst, _size(tensor.double() - second[name].double()) / scale)
    return worst


def _kind(name: str) -> str:
    return name.split("/")[0]


def _size(tensor: torch.Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0


def moved(before: Tensors, after: Tensors) -> float:
    return max(float((after[name] - before[name]).abs().max()) for name in before)
