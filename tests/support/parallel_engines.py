"""Servers whose clients train on two devices or in two worker processes, whatever the machine has."""

from __future__ import annotations

import torch
from toy_runs import use_engine

from fedskew.engine import DeviceSamples, DevicesEngine, Network, PlainEngine, StackedEngine
from fedskew.engine.parallel.pool import PoolEngine
from fedskew.experiment.round.server import Server

CPU = torch.device("cpu")


def spread(this: Server, model: torch.nn.Module, engine: type[PlainEngine] | type[StackedEngine]) -> DevicesEngine:
    """Give a server an engine of two devices, each with a network and data of its own."""
    data = this._federation.dataset
    engines = [
        engine(Network(model, torch.float64), DeviceSamples(data, data.train, CPU, torch.float64), 2) for _ in range(2)
    ]
    return use_engine(this, DevicesEngine(engines, [CPU, CPU]))


def pooled(this: Server, inner: type[PlainEngine] | type[StackedEngine] = PlainEngine, workers: int = 2) -> PoolEngine:
    """Give a server an engine of two workers, however many cores there are."""
    smallest = this.network.smallest_batch(this._runtimes.train_samples.inputs(torch.zeros(1, dtype=torch.int64)))
    return use_engine(this, PoolEngine(inner(this.network, this._runtimes.train_samples, smallest), workers))
