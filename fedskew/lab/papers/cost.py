"""How long cells would take here: the local steps they make, and how fast such steps are on this machine.

A rough figure. On a CPU one step of one client is timed; on a GPU, where a round's clients train as one program, one
step of one model on all their batches together (docs/speed.md: the two take about equally long).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from fedskew.data import DATASETS
from fedskew.engine import choose_device
from fedskew.experiment.config import Config
from fedskew.lab.sweep.identity import identity
from fedskew.lab.sweep.job import Job
from fedskew.methods import Objective, make_method
from fedskew.models import Inputs, make_model

_SHAPES = {
    "mnist": (1, 28, 28),
    "fashion-mnist": (1, 28, 28),
    "cifar10": (3, 32, 32),
    "cifar100": (3, 32, 32),
    "cinic10": (3, 32, 32),
    "tiny-imagenet": (3, 64, 64),
    "digits-domains": (3, 32, 32),
    "digits": (1, 8, 8),
    "ag_news": (200,),
    "20newsgroups": (200,),
}
_VOCABULARY = 98_635
_TIMED = 0.1
"""Seconds of timing for each kind of model."""
_STEPS = 3
"""At least so many are timed: the first of a model takes many times as long as the others."""
_BATCH = 16
"""Samples of a timed step on a CPU: a sample takes about as long in a larger one."""


@dataclass(frozen=True)
class Work:
    """What a run computes."""

    visits: float
    """Samples trained on, over all rounds, epochs and clients; passes beyond FedAvg's are counted in."""
    steps: float
    """Local steps, one after another."""


def trained(jobs: Iterable[Job]) -> list[Config]:
    """The runs of some jobs; a model that several of them begin with is trained once."""
    wanted = list(jobs)
    starts = {identity(job.start): job.start for job in wanted if job.start is not None}
    return [*(job.config for job in wanted), *starts.values()]


def work(config: Config) -> Work:
    clients = config.partition.clients or 10
    participants = min(config.clients_per_round or clients, clients)
    a_client = DATASETS[config.data].train / clients
    passes = config.rounds * config.local_epochs
    method = make_method(config.method, config.method_params)
    factor = float(method.solver.gradients())
    if isinstance(method.objective, Objective):
        factor += method.objective.extra_forwards(1.0, {}) / 3
    return Work(passes * participants * a_client * factor, passes * max(1.0, a_client / config.batch_size))


def seconds(config: Config, device: str) -> float:
    """On the machine at hand."""
    clients = config.partition.clients or 10
    participants = min(config.clients_per_round or clients, clients)
    return work(config).visits / _rate(config.data, config.model, config.batch_size, participants, device)


@cache
def _rate(data: str, model: str, batch_size: int, participants: int, device: str) -> float:
    """Samples a second."""
    place = choose_device(device)
    shape = _SHAPES[data]
    text = DATASETS[data].kind == "text"
    network = make_model(model, Inputs(shape, DATASETS[data].classes, _VOCABULARY if text else 0), 0).to(place)
    batch = min(batch_size, _BATCH) if place.type == "cpu" else batch_size * participants
    x = torch.randint(1, 1000, (batch, *shape), device=place) if text else torch.rand(batch, *shape, device=place)
    y = torch.randint(0, DATASETS[data].classes, (batch,), device=place)
    return batch / _step_seconds(network, x, y)


def _step_seconds(network: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """The fastest of a few steps."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    fastest, steps, began = float("inf"), 0, time.perf_counter()
    while steps < _STEPS or time.perf_counter() - began < _TIMED:
        at = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(nn.functional.cross_entropy(network(x), y))
        optimizer.step()
        if x.is_cuda:
            torch.cuda.synchronize()
        fastest, steps = min(fastest, time.perf_counter() - at), steps + 1
    return fastest
