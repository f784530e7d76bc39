"""Kernels that are compiled in parallel before their first launch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

import pytest
import torch
from torch import Tensor

from fedskew.engine.kernels import launches
from fedskew.engine.kernels.launches import compile_ahead, launch

CPU = torch.device("cpu")


class Kernel:
    """Stands in for a compiled kernel. Reading `run` loads it."""

    def __init__(self) -> None:
        self.is_loaded = False

    @property
    def run(self) -> None:
        self.is_loaded = True


class Program:
    """Stands in for a Triton program, which needs a GPU to be compiled."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.compiled: list[tuple[Any, ...]] = []
        self.kernel = Kernel()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **constants: self.launched.append((grid, arguments, constants))

    def run(self, *arguments: Any, grid: tuple[int, ...], warmup: bool, **constants: Any) -> Kernel:
        assert warmup
        self.compiled.append((grid, arguments, constants))
        return self.kernel


class Mode:
    """Stands in for `triton.AsyncCompileMode`."""

    def __init__(self, pool: Executor, *, ignore_errors: bool) -> None:
        assert isinstance(pool, Executor)
        assert ignore_errors

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def _with_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "_async_compile_mode", lambda: Mode)
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())


@pytest.mark.usefixtures("_with_mode")
def test_kernels_of_the_forward_and_the_backward_pass_are_compiled_and_loaded_but_not_launched() -> None:
    forward, backward = Program(), Program()

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            launch(forward, (1, 2))(x, SIZE=3)
            return 2 * x

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            launch(backward, (4,))(SIZE=5)
            return 2 * grads[0]

    def step() -> None:
        x = torch.ones(3, requires_grad=True)
        Twice.apply(x).sum().backward()  # type: ignore[no-untyped-call]

    compile_ahead(step, CPU)
    assert [grid for grid, *_ in forward.compiled + backward.compiled] == [(1, 2), (4,)]
    assert not forward.launched + backward.launched
    assert forward.kernel.is_loaded
    assert backward.kernel.is_loaded

    step()
    assert [constants for *_, constants in forward.launched + backward.launched] == [{"SIZE": 3}, {"SIZE": 5}]


@pytest.mark.usefixtures("_with_mode")
def test_after_an_error_kernels_are_launched_again() -> None:
    program = Program()
    with pytest.raises(ZeroDivisionError):
        compile_ahead(lambda: print(1 / 0), CPU)
    launch(program, (1,))()
    assert program.launched


def test_without_the_mode_of_triton_the_step_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "_async_compile_mode", lambda: None)
    compile_ahead(lambda: pytest.fail("the step was called"), CPU)
