"""PyTorch operations of the kernels."""

from __future__ import annotations

import subprocess
import sys

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
torch.library.opcheck(twice.overload, (x, 3))
"""


def test_an_operation_has_gradients_and_its_call_imports_no_compiler() -> None:
    """PyTorch's compiler takes seconds to import, and few runs need it."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
