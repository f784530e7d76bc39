"""The programs that run over the slots' static memory: one prepares batches, one takes a local step of all slots."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedskew.engine.contract import RoundWork
from fedskew.engine.data.device import DeviceSamples, stream_for
from fedskew.engine.model.network import Network
from fedskew.engine.optimisers import STEPS
from fedskew.engine.stacked.execution import Memory, StaticStep, captured, compiled
from fedskew.engine.stacked.layouts import Layouts
from fedskew.engine.stacked.local_step import Batches, compute_step
from fedskew.losses import IGNORE
from fedskew.methods.parts import Tensors
from fedskew.randomness import fold

_LONGEST_EXPRESSION = 15
"""In operations. A keyed draw has more of them, so a compiler does not repeat a sample's draw for each pixel."""


@dataclass(frozen=True)
class SlotStep:
    """One local step of all slots, from static memory to static memory."""

    network: Network
    work: RoundWork
    layouts: Layouts
    samples: Tensor
    full: bool
    """Whether no batch is padded."""
    channels_last: bool
    fused: bool
    """Whether the optimiser may use PyTorch's fused kernels; without them a compiler can fuse more operations."""

    def __call__(self, memory: Memory) -> None:
        """Take the step whose number is in memory. Everything happens on the device."""
        inputs = memory["inputs"]
        at = inputs["at"]
        now = {name: t.index_select(0, at).squeeze(0) for name, t in inputs.items() if name != "at"}
        self.descend(memory, now, memory["rates"]["lr"])
        at.copy_((at + 1) % len(inputs["y"]))

    @torch.no_grad()
    def descend(self, memory: Memory, now: Tensors, lr: Tensor | float) -> None:
        work = self.layouts.work_from_memory(self.work, memory)
        valid = None if self.full else now["y"] != IGNORE
        x = now["x"].movedim(-1, 2) if self.channels_last else now["x"]
        state = self.layouts.state.views(memory["state"])
        batches = Batches(x, now["y"], valid, now["keys"], memory["label_counts"][""], state)
        params = self.layouts.params.views(memory["params"])
        buffers = self.layouts.buffers.views(memory["buffers"])
        found = compute_step(self.network, work, batches, params, buffers, self.samples)
        self._step(memory, found.direction, lr)
        for name, tensor in found.buffers.items():
            if tensor is not buffers[name]:
                buffers[name].copy_(tensor)
        memory["sums"]["loss"] += found.loss.double() * now["lengths"]
        for name, value in found.tally.items():
            memory["sums"][f"tally {name}"] += value

    def _step(self, memory: Memory, direction: Tensors, lr: Tensor | float) -> None:
        """A GPU steps whole rows of memory at once, a CPU tensor by tensor."""
        layout, optimiser = self.layouts.params, self.work.local.optimiser
        by_tensor = isinstance(lr, float)
        flat_direction = direction if by_tensor else layout.flat(direction)
        names = list(flat_direction)

        def tensors(kind: str) -> list[Tensor]:
            named = layout.views(memory[kind]) if by_tensor else memory[kind]
            return [named[name] for name in names]

        state = {kind: tensors(kind) for kind in optimiser.shaped_state}
        if optimiser.counts_steps:
            state[STEPS] = [memory[STEPS][""]]
        optimiser.step(tensors("params"), [flat_direction[name] for name in names], state, lr, self.fused)


@dataclass(frozen=True)
class Staging:
    """Gathers, augments and normalises the batches of the next steps at once."""

    data: DeviceSamples
    channels_last: bool

    @torch.no_grad()
    def __call__(self, memory: Memory) -> None:
        plan, inputs, data = memory["plan"], memory["inputs"], self.data.with_tensors(memory["data"])
        valid = plan["indices"] >= 0
        indices = torch.where(valid, plan["indices"], 0)
        x = data.training_inputs(indices, plan["epoch keys"].unsqueeze(-1))
        inputs["x"].copy_(x.movedim(3, -1) if self.channels_last else x)
        inputs["y"].copy_(torch.where(valid, data.y[indices], IGNORE))
        inputs["keys"].copy_(fold(plan["client keys"], plan["steps"]))
        inputs["lengths"].copy_(valid.sum(dim=-1))


@dataclass(frozen=True)
class Pools:
    """Temporary memory of CUDA graphs. Graphs of one pool never run at the same time."""

    steps: object
    staging: object

    @classmethod
    def on(cls, device: torch.device) -> Pools:
        return cls(*(torch.cuda.graph_pool_handle() if device.type == "cuda" else None for _ in range(2)))


class Program:
    """Staging and step for one number of slots and one batch width. The step has a form with and without padding."""

    def __init__(
        self,
        step: SlotStep,
        staging: Staging,
        memory: Memory,
        pools: Pools,
        compile_steps: bool,
        notices: list[str],
    ) -> None:
        self.memory = memory
        self._step, self._staging = step, staging
        self._pools, self._compile, self._notices = pools, compile_steps, notices
        self._stages: list[Callable[[int], None]] = []
        self._launched: torch.cuda.Event | None = None
        """Fires when the device has done all work from before the last window was staged."""
        self._runs: dict[bool, Callable[[int], None]] = {}
        self._lr = 0.0

    @property
    def window(self) -> int:
        """Number of steps whose batches are staged at a time."""
        return len(self.memory["plan"]["steps"])

    @property
    def windows(self) -> int:
        """Number of windows in memory: two if one is staged while the steps of the other run."""
        return len(self.memory["inputs"]["y"]) // self.window

    def start_round(self, work: RoundWork) -> Program:
        self._lr = work.local.lr
        return self

    def prepare(self, kinds: set[bool]) -> None:
        """Prepare the steps of a round. Do this before clients enter, because it writes into memory."""
        if self._on_gpu:
            kinds = {False}  # GPU kernels mask padding at no cost, and each form would be compiled and captured
        for full in kinds - self._runs.keys():
            self._runs[full] = self._prepare_step(replace(self._step, full=full))
        if not self._stages:
            self._stages = self._prepare_staging()

    def rewind(self) -> None:
        """Go to the first step of a round."""
        self.memory["inputs"]["at"].zero_()

    def stage(self, window: int, plan: Mapping[str, npt.NDArray[np.int64]]) -> None:
        """Prepare the batches of a window of steps, counted from 0. Earlier windows must have been launched."""
        with self._beside_steps(first=window == 0):
            for name, array in plan.items():
                self.memory["plan"][name][: len(array)].copy_(_sendable(array, self._on_gpu), non_blocking=True)
            self._stages[window % self.windows](len(plan["steps"]))

    @contextlib.contextmanager
    def _beside_steps(self, first: bool) -> Iterator[None]:
        """On a GPU, stage during the previous window's steps, but after the steps of the window whose memory is reused.

        Steps that are launched later wait for the staging.
        """
        if not self._on_gpu:
            yield
            return
        steps, staging = torch.cuda.current_stream(self._device), stream_for("staging", self._device)
        launched = steps.record_event()
        staging.wait_event(launched if first or self._launched is None else self._launched)
        self._launched = launched
        try:
            with torch.cuda.stream(staging):
                yield
        finally:  # also if memory runs out: the next attempt reuses it
            steps.wait_stream(staging)

    def run(self, position: int, full: bool) -> None:
        self._runs.get(full, self._runs.get(False))(position)  # type: ignore[misc]

    @property
    def _device(self) -> torch.device:
        return self.memory["inputs"]["at"].device

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def _prepare_step(self, step: SlotStep) -> Callable[[int], None]:
        if not self._on_gpu:
            return lambda position: self._launch(step, position)
        replay = self._replay(step)
        return _ignoring(replay) if replay else (lambda _: step(self.memory))

    def _launch(self, step: SlotStep, position: int) -> None:
        now = {name: t[position] for name, t in self.memory["inputs"].items() if name != "at"}
        step.descend(self.memory, now, self._lr)

    def _replay(self, step: SlotStep) -> Callable[[], None] | None:
        if self._compile:
            try:
                return captured(compiled(step, self.memory), self.memory, self._pools.steps)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a compiler may fail in any way
                self._notice("cannot be compiled, so it runs uncompiled", error)
        try:
            return captured(replace(step, fused=True), self.memory, self._pools.steps)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._notice("cannot be captured as a CUDA graph, so operations are launched one by one", error)
            return None

    def _prepare_staging(self) -> list[Callable[[int], None]]:
        """One function per window in memory."""
        windows = [self._window_memory(number) for number in range(self.windows)]
        if self._on_gpu:
            if self._compile and self._staging.data.compilable:
                with contextlib.suppress(
                    Exception
                ):  # a compiler may fail in any way; without it the program works as well
                    program = compiled(self._staging, windows[0], _LONGEST_EXPRESSION)
                    return [self._captured_staging(program, window) for window in windows]
            try:
                return [self._captured_staging(self._staging, window) for window in windows]
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # an augmentation may wait for the device
                torch.cuda.synchronize()
        return [partial(self._stage_now, window) for window in windows]

    def _window_memory(self, number: int) -> Memory:
        """The memory, with the inputs of one window only."""
        rows = slice(number * self.window, (number + 1) * self.window)
        return self.memory | {"inputs": {n: t[rows] for n, t in self.memory["inputs"].items() if n != "at"}}

    def _captured_staging(self, staging: StaticStep, window: Memory) -> Callable[[int], None]:
        return _ignoring(captured(staging, window, self._pools.staging, "staging"))

    def _stage_now(self, window: Memory, steps: int) -> None:
        ahead = {kind: {name: t[:steps] for name, t in window[kind].items()} for kind in ("plan", "inputs")}
        self._staging(window | ahead)

    def _notice(self, what: str, error: Exception) -> None:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        self._notices.append(f"a step of this model or method {what}: {reason}")


def _ignoring(replay: Callable[[], None]) -> Callable[[int], None]:
    return lambda _: replay()


def _sendable(array: npt.NDArray[np.int64], to_gpu: bool) -> Tensor:
    """In pinned memory for a GPU, so that the host need not wait for the copy."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if to_gpu else tensor
