"""The engine `auto` on a CPU: whichever is fastest for this model, method and machine, found out at the first round.

What was measured is remembered (`rates_file`), so that the same command takes the same engine again. All engines give
the same numbers up to rounding.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from fedskew.engine.contract import Engine, RoundResult, RoundWork
from fedskew.engine.data.device_samples import DeviceSamples
from fedskew.engine.measurement import measured_rates
from fedskew.engine.model.network import Network
from fedskew.engine.parallel.pool import PoolEngine, usable_cores
from fedskew.engine.plain import PlainEngine
from fedskew.engine.rates_file import RatesFile, rates_key
from fedskew.engine.stacked.engine import StackedEngine

ENGINES = ("plain", "stacked", "pool", "pool-stacked")
"""The simplest first."""

_WORTHWHILE = 1.1
"""How much faster an engine must be than a simpler one to be taken."""


def engine_of_name(name: str, network: Network, data: DeviceSamples, smallest_batch: int) -> Engine:
    if name == "plain":
        return PlainEngine(network, data, smallest_batch)
    if name == "stacked":
        return StackedEngine(network, data, smallest_batch)
    return PoolEngine(engine_of_name("stacked" if name == "pool-stacked" else "plain", network, data, smallest_batch))


def usual_engine(model: nn.Module) -> str:
    """What is mostly fastest on a CPU: stacked for dense networks, one client after another for convolutional ones."""
    convolutional = any(isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) for layer in model.modules())
    return "plain" if convolutional else "stacked"


def candidates(clients: int) -> list[str]:
    """The engines that can be had here for so many clients a round.

    Where torch has a GPU, a process that once took a gradient cannot fork one that takes gradients.
    """
    pools = sys.platform == "linux" and min(usable_cores(), clients) > 1 and not torch.cuda.is_available()
    return [name for name in ENGINES if pools or not name.startswith("pool")]


def fastest(rates: Mapping[str, float]) -> str:
    """The engine of the highest rate, or a simpler one that comes close."""
    best = max(rates.values())
    return next(name for name in ENGINES if rates.get(name, 0.0) * _WORTHWHILE >= best)


class AutoEngine(Engine):
    """The fastest engine, from the first round on."""

    def __init__(self, network: Network, data: DeviceSamples, smallest_batch: int = 1) -> None:
        self._network, self._data, self._smallest = network, data, smallest_batch
        self._engine: Engine | None = None
        self.name = "auto"
        """From the first round on, the name of the engine taken."""
        self.notices: list[str] = []

    def take(self, name: str) -> None:
        """Without measuring: what a run began with is what it continues with."""
        self.close()
        self._engine = self._make(name)
        self._engine.notices = self.notices
        self.name = name

    def train(self, work: RoundWork) -> RoundResult:
        if self._engine is None:
            self.take(self._chosen(work))
        assert self._engine is not None
        return self._engine.train(work)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def _make(self, name: str) -> Engine:
        engine = engine_of_name(name, self._network, self._data, self._smallest)
        return OneThread(engine) if name == "stacked" else engine

    def _chosen(self, work: RoundWork) -> str:
        names = candidates(len(work.assignments))
        remembered = RatesFile()
        key = rates_key(self._network, self._data.x.shape[1:], work, names)
        rates = remembered.get(key)
        known = rates is not None
        if rates is None:
            rates = remembered.put(key, self._measured(names, work))
        name = fastest(rates)
        listed = ", ".join(f"{n} {rates[n]:,.0f}" for n in sorted(rates, key=lambda n: -rates[n]))
        self.notices.append(f"engine {name}: samples a second {'when last ' if known else ''}measured here: {listed}")
        return name

    def _measured(self, names: list[str], work: RoundWork) -> dict[str, float]:
        engines = {name: self._make(name) for name in names}
        try:
            return measured_rates(engines, work, self._smallest)
        finally:
            for engine in engines.values():
                engine.close()


class OneThread(Engine):
    """An engine that computes with one thread, unless OMP_NUM_THREADS says otherwise.

    Stacked small networks gain little from a second thread, and lose much where the other cores are busy.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.name = engine.name

    @property
    def notices(self) -> list[str]:
        return self._engine.notices

    @notices.setter
    def notices(self, lines: list[str]) -> None:
        self._engine.notices = lines

    def train(self, work: RoundWork) -> RoundResult:
        with _one_thread():
            return self._engine.train(work)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
