"""A `Program` whose staging and steps are CUDA graphs, which may be compiled. Staging and steps run in parallel.

Staging prepares the batches of a *window* of several steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedskew.engine.data.device import stream_for
from fedskew.engine.stacked.execution import Memory, StaticStep, captured, compiled
from fedskew.engine.stacked.local_step import Program, SlotStep, Staging

_LONGEST_EXPRESSION = 15
"""If a value takes more operations than this, compiled code stores it and does not compute it again for each use.

A keyed random draw takes more operations than this, so it is computed once per sample, not once per pixel.
"""


@dataclass(frozen=True)
class Pools:
    """Temporary memory of CUDA graphs. Graphs that share a pool never run at the same time."""

    steps: object
    staging: object

    @classmethod
    def new(cls) -> Pools:
        return cls(torch.cuda.graph_pool_handle(), torch.cuda.graph_pool_handle())


class GraphProgram(Program):
    """Staging and step as CUDA graphs. If one cannot be captured, its operations are launched one by one."""

    def __init__(
        self,
        step: SlotStep,
        staging: Staging,
        memory: Memory,
        pools: Pools,
        compile_steps: bool,
        notices: list[str],
    ) -> None:
        super().__init__(step, staging, memory)
        self._pools, self._compile, self._notices = pools, compile_steps, notices
        self._device = memory["inputs"]["at"].device
        self._launched: torch.cuda.Event | None = None
        """Fires when the device has finished all work that was launched before the most recent call of `stage`."""

    def prepare(self, forms: set[bool]) -> None:  # noqa: ARG002
        """Prepare only the form with padding. GPU kernels mask padding at no cost, so a second graph is not needed."""
        super().prepare({False})

    def stage(self, window: int, plan: npt.NDArray[np.int64]) -> None:
        with self._beside_steps(first=window == 0):
            super().stage(window, plan)

    @contextlib.contextmanager
    def _beside_steps(self, first: bool) -> Iterator[None]:
        """Stage a window while the steps of the previous one run.

        Staging waits for the steps of the window whose memory it reuses. Steps that are launched later wait for the
        staging.
        """
        steps, staging = torch.cuda.current_stream(self._device), stream_for("staging", self._device)
        launched = steps.record_event()
        staging.wait_event(launched if first or self._launched is None else self._launched)
        self._launched = launched
        try:
            with torch.cuda.stream(staging):
                yield
        finally:  # also if the device runs out of memory, because the next attempt reuses the same memory
            steps.wait_stream(staging)

    def run(self, position: int, full: bool) -> None:  # noqa: ARG002
        super().run(position, False)

    def _sendable(self, array: npt.NDArray[np.int64]) -> Tensor:
        """Return the array in pinned memory, so that the host does not wait for the copy."""
        return torch.from_numpy(array).pin_memory()

    def _prepare_step(self, step: SlotStep) -> Callable[[int], None]:
        replay = self._replay(step)
        return _ignoring_position(replay) if replay else (lambda _: step(self.memory))

    def _replay(self, step: SlotStep) -> Callable[[], None] | None:
        if self._compile:
            try:
                return captured(compiled(step, self.memory), self.memory, self._pools.steps)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a compiler may fail in any way
                self._notice("cannot be compiled, so it runs uncompiled", error)
        try:
            uncompiled = replace(step, use_kernel=True)
            return captured(uncompiled, self.memory, self._pools.steps, has_kernels=True)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._notice("cannot be captured as a CUDA graph, so operations are launched one by one", error)
            return None

    def _prepare_staging(self) -> list[Callable[[int], None]]:
        memories = [self._window_memory(number) for number in range(self.windows)]
        if self._compile and self._staging.data.compilable:
            with contextlib.suppress(Exception):  # a compiler may fail in any way, and the program works without it
                program = compiled(self._staging, memories[0], _LONGEST_EXPRESSION)
                return [self._captured_staging(program, memory) for memory in memories]
        try:
            return [self._captured_staging(self._staging, memory) for memory in memories]
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # an augmentation that synchronises with the device cannot be captured
            torch.cuda.synchronize()
        return super()._prepare_staging()

    def _captured_staging(self, staging: StaticStep, memory: Memory) -> Callable[[int], None]:
        return _ignoring_position(captured(staging, memory, self._pools.staging, "staging"))

    def _notice(self, what: str, error: Exception) -> None:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        self._notices.append(f"a step of this model or method {what}: {reason}")


def _ignoring_position(replay: Callable[[], None]) -> Callable[[int], None]:
    return lambda _: replay()
