"""PyTorch operations of the kernels."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import Tensor

from fedskew.engine.kernels.operations import operation

PROGRAM = """
import sys
import torch
from torch import Tensor
from fedskew.engine.kernels.operations import operation

@operation("twice")
def twice(x: Tensor, times: int) -> Tensor:
    return 2 * times * x

@twice.register_fake
def _(x, times):
    return torch.empty_like(x)

def keep(ctx, inputs, output):
    ctx.times = inputs[1]

twice.register_autograd(lambda ctx, grad: (2 * ctx.times * grad, None), setup_context=keep)
x = torch.ones(3, requires_grad=True)
twice(x, 3).sum().backward()
assert torch.equal(x.grad, torch.full((3,), 6.0)), x.grad
assert "torch._dynamo" not in sys.modules
"""


def test_an_operation_has_gradients_and_its_call_imports_no_compiler() -> None:
    """PyTorch's compiler takes seconds to import, and few runs need it."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_operation_passes_the_checks_of_pytorch() -> None:
    """In this process, where other tests need the compiler too."""

    @operation("thrice")
    def thrice(x: Tensor, times: int) -> Tensor:
        return 3 * times * x

    @thrice.register_fake
    def _(x: Tensor, times: int) -> Tensor:
        return torch.empty_like(x)

    def keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, int], output: Tensor) -> None:
        ctx.times = inputs[1]  # type: ignore[attr-defined]

    thrice.register_autograd(lambda ctx, grad: (3 * ctx.times * grad, None), setup_context=keep)
    torch.library.opcheck(thrice.overload, (torch.ones(3, requires_grad=True), 3))
