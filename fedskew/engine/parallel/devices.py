"""Several devices of one machine: each trains a share of the round's clients with an engine of its own.

Every client's numbers are those of one device, up to rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from fedskew.engine.contract import Engine, RoundResult, RoundWork
from fedskew.engine.model.network import ModelState
from fedskew.engine.parallel.shares import Share, balanced_shares, joined, local_steps, share_of
from fedskew.methods.parts import Tensors


class DevicesEngine(Engine):
    """Trains on several devices at a time, from one thread for each."""

    def __init__(self, engines: Sequence[Engine], devices: Sequence[torch.device]) -> None:
        """Each engine has its network and data on its device; results are gathered on the first."""
        self._engines, self._devices = engines, devices
        self._threads = ThreadPoolExecutor(len(devices), thread_name_prefix="fedskew-device")
        self.name = engines[0].name
        self.notices: list[str] = []
        self._said: set[str] = set()
        self._met: set[tuple[int, str]] = set()

    def train(self, work: RoundWork) -> RoundResult:
        shares = balanced_shares(local_steps(work), len(self._devices))
        with torch.random.fork_rng(devices=[]):  # threads that set and restore torch's own stream would mix it up
            results = self._results(work, shares)
        for engine in self._engines:
            fresh = [line for line in engine.notices if line not in self._said]
            self.notices += fresh
            self._said.update(fresh)
            engine.notices.clear()
        return joined(results, shares)

    def _results(self, work: RoundWork, shares: Sequence[Share]) -> list[RoundResult]:
        """The first round of a kind of work goes device by device: engines take the model apart then, for which torch
        changes its own modules for a while, under the feet of other threads."""
        kinds = {(place, repr(work.parts)) for place in range(len(shares))}
        if not kinds <= self._met:
            results = [self._trained(place, work, share) for place, share in enumerate(shares)]
            self._met |= kinds
            return results
        started = [self._threads.submit(self._trained, place, work, share) for place, share in enumerate(shares)]
        return [one.result() for one in started]

    def close(self) -> None:
        self._threads.shutdown()

    def _trained(self, place: int, work: RoundWork, share: Share) -> RoundResult:
        device = self._devices[place]
        current = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
        with current:
            result = self._engines[place].train(_on(device, share_of(work, share)))
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # the first device reads it from a stream of its own
            return result


def _on(device: torch.device, work: RoundWork) -> RoundWork:
    """The same work with its models there; clients' states are on the host, and every engine fetches them."""
    return replace(
        work,
        sent=_moved_model(work.sent, device),
        downlink=_moved(work.downlink, device),
        companions={
            name: _moved_model(model, device)
            for name, model in work.companions.items()
            if name in work.objective.companions()
        },
    )


def _moved_model(model: ModelState, device: torch.device) -> ModelState:
    return ModelState(_moved(model.params, device), _moved(model.buffers, device))


def _moved(tensors: Mapping[str, torch.Tensor], device: torch.device) -> Tensors:
    return {name: t.to(device) for name, t in tensors.items()}
