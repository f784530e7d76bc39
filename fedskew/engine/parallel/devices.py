"""Train on several devices of one machine. Each trains a share of the round's clients with its own engine.

Every client's result is the same as on one device, up to rounding. The exception is a model or method that draws from a
global generator of Python, numpy or torch on the CPU, because the devices' threads share these generators.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from fedskew.engine.contract import Engine, RoundResult, RoundWork
from fedskew.engine.model.network import ModelState
from fedskew.engine.parallel.shares import (
    Share,
    balanced_shares,
    client_costs,
    join_results,
    require_same_form,
    take_share,
)
from fedskew.engine.plain import restored_generators
from fedskew.methods.parts import Tensors


class DevicesEngine(Engine):
    """Trains on several devices at a time, with one thread per device."""

    def __init__(self, engines: Sequence[Engine], devices: Sequence[torch.device]) -> None:
        """Each engine has its network and data on its device. Results are gathered on the first device."""
        self._engines, self._devices = engines, devices
        self._threads = ThreadPoolExecutor(len(devices), thread_name_prefix="fedskew-device")
        self.name = engines[0].name
        self.notices: list[str] = []
        self._noticed: set[str] = set()
        self._trained_kinds: set[tuple[int, str]] = set()
        """Pairs of a device's number and the parts of a method (`repr`) with which this device has trained."""

    def train(self, work: RoundWork) -> RoundResult:
        shares = balanced_shares(client_costs(work), len(self._devices))
        # The threads set and restore the global generators at the same time, so a thread may restore a state that
        # another thread set. Therefore the original states are restored here.
        with restored_generators():
            results = self._results(work, shares)
        for engine in self._engines:
            fresh = [line for line in engine.notices if line not in self._noticed]
            self.notices += fresh
            self._noticed.update(fresh)
            engine.notices.clear()
        require_same_form(work, results, shares)
        return join_results(results, shares)

    def _results(self, work: RoundWork, shares: Sequence[Share]) -> list[RoundResult]:
        """Train the shares in parallel, or one after another if a device has not trained with this method before.

        The first time, the device's engine traces the model. Meanwhile, torch patches its own modules, which would
        disturb other threads.
        """
        kinds = {(place, repr(work.parts)) for place in range(len(shares))}
        if not kinds <= self._trained_kinds:
            results = [self._train_share(place, work, share) for place, share in enumerate(shares)]
            self._trained_kinds |= kinds
            return results
        started = [self._threads.submit(self._train_share, place, work, share) for place, share in enumerate(shares)]
        return [one.result() for one in started]

    def close(self) -> None:
        self._threads.shutdown()

    def _train_share(self, place: int, work: RoundWork, share: Share) -> RoundResult:
        device = self._devices[place]
        current = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
        with current:
            result = self._engines[place].train(_move_work(device, take_share(work, share)))
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # the first device reads the result from another stream
            return result


def _move_work(device: torch.device, work: RoundWork) -> RoundWork:
    """Copy the model, the downlink and the companions that the objective uses to the device.

    The engines copy the clients' states and start models from the host.
    """
    return replace(
        work,
        sent=_move_model(work.sent, device),
        downlink=_move(work.downlink, device),
        companions={
            name: _move_model(model, device)
            for name, model in work.companions.items()
            if name in work.objective.companions()
        },
    )


def _move_model(model: ModelState, device: torch.device) -> ModelState:
    return ModelState(_move(model.params, device), _move(model.buffers, device))


def _move(tensors: Mapping[str, torch.Tensor], device: torch.device) -> Tensors:
    return {name: t.to(device) for name, t in tensors.items()}
