"""Three skewed clients and a linear model, once as fedskew runs them and once in plain numpy.

A head's weight and bias are one matrix θ[C, d+1] here, and inputs end with a 1; every batch is the client's whole data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from toy_runs import advance, with_fitting_head, with_server_data

from fedskew.data import Dataset, Federation, Samples
from fedskew.engine import Engine, RoundResult, RoundWork
from fedskew.experiment.config import Config
from fedskew.experiment.round.record import RoundRow
from fedskew.experiment.round.server import Server
from fedskew.experiment.round.state import RunState
from fedskew.methods import Method, Part, make_method
from fedskew.models import Classifier

Array = npt.NDArray[np.float64]

COUNTS = np.array([[5, 2, 0, 0], [0, 1, 4, 1], [3, 0, 0, 0]])
"""Two vacant classes, one vacant class, a single class."""


def federation(counts: npt.NDArray[np.int64] = COUNTS, features: int = 3) -> Federation:
    rng = np.random.default_rng(5)
    labels = np.concatenate([np.repeat(np.arange(counts.shape[1]), row) for row in counts])
    ends = np.cumsum(counts.sum(axis=1))
    indices = tuple(np.arange(end - n, end) for end, n in zip(ends, counts.sum(axis=1), strict=True))

    def samples(y: npt.NDArray[np.int64]) -> Samples:
        centres = rng.normal(size=(counts.shape[1], features))
        return Samples((centres[y] + rng.normal(size=(len(y), features))).astype(np.float32), y.astype(np.int64))

    names = tuple("abcdefghij"[: counts.shape[1]])
    dataset = Dataset("points", "table", names, samples(labels), samples(np.arange(3 * len(names)) % len(names)))
    return Federation(dataset, indices, {"name": "by hand"}, 0)


def linear_model(classes: int = 4, features: int = 3) -> Classifier:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return Classifier(nn.Identity(), nn.Linear(features, classes))


def layered_model(classes: int = 4, features: int = 3) -> Classifier:
    """A linear encoder and a linear head, for methods that keep one of them on the clients."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return Classifier(nn.Linear(features, features + 2), nn.Linear(features + 2, classes))


def settings(**changed: Any) -> Config:
    usual: dict[str, Any] = {
        "rounds": 2,
        "local_epochs": 3,
        "batch_size": 100,
        "lr": 0.2,
        "lr_decay": 0.9,
        "momentum": 0.6,
        "weight_decay": 0.01,
        "precision": "float64",
        "engine": "plain",
        "device": "cpu",
    }
    return Config(**{**usual, **changed})


def serve(method: str | Method | Part, params: dict[str, Any] | None = None, **changed: Any) -> Server:
    fed = changed.pop("federation", None) or federation()
    chosen = make_method(method, params)
    model = linear_model(fed.classes) if chosen.personal is None else layered_model(fed.classes)
    fed = with_server_data(fed, chosen)
    return Server(fed, chosen, with_fitting_head(model, chosen), settings(**changed))


def played(server: Server) -> tuple[list[RunState], list[RoundRow]]:
    """The state before every round and at the end, and what was recorded of each."""
    states, rows = [server.start()], []
    while server.next_stage(states[-1]) is not None:
        state, row = advance(server, states[-1])
        states.append(state)
        rows.append(row)
    return states, rows


class Recording(Engine):
    """The engine it is given, with every result kept."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.name, self.notices = engine.name, engine.notices
        self.results: list[tuple[RoundWork, RoundResult]] = []

    def train(self, work: RoundWork) -> RoundResult:
        result = self._engine.train(work)
        self.results.append((work, result))
        return result


def theta(state: RunState) -> Array:
    params = state.model.params
    return np.concatenate([params["head.weight"].numpy(), params["head.bias"].numpy()[:, None]], axis=1)


def final(method: str | Method | Part, params: dict[str, Any] | None = None, **changed: Any) -> Array:
    return theta(played(serve(method, params, **changed))[0][-1])


# -- the same in numpy ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """One client's data."""

    x: Array
    y: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]

    @property
    def one_hot(self) -> Array:
        return np.eye(len(self.counts))[self.y]


def sites(fed: Federation) -> list[Site]:
    x, y = fed.dataset.train.x.astype(np.float64), fed.dataset.train.y
    whole = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    return [Site(whole[part], y[part], np.bincount(y[part], minlength=fed.classes)) for part in fed.indices]


def softmax(z: Array) -> Array:
    weights = np.exp(z)
    return weights / weights.sum(axis=1, keepdims=True)


def cross_entropy_slope(z: Array, site: Site) -> Array:
    """∂CE/∂z."""
    return (softmax(z) - site.one_hot) / len(z)


def descend(
    start: Array, direction: Callable[[Array], Array], config: Config, round_number: int, steps: int | None = None
) -> Array:
    """SGD with momentum and weight decay."""
    lr = config.lr * config.lr_decay**round_number
    at, velocity = start.copy(), np.zeros_like(start)
    for _ in range(config.local_epochs if steps is None else steps):
        velocity = config.momentum * velocity + direction(at) + config.weight_decay * at
        at = at - lr * velocity
    return at


def averaged(models: list[Array], at: list[Site]) -> Array:
    sizes = np.array([len(site.y) for site in at], dtype=np.float64)
    return np.tensordot(sizes / sizes.sum(), np.stack(models), axes=1)
