"""The SGD step of one parameter of all clients, against `torch.optim.SGD`."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, made, needs_triton

from fedskew.engine.kernels import can_step, stacked_sgd_step


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_three_steps_are_those_of_torch_optim(momentum: float, nesterov: bool, dtype: torch.dtype) -> None:
    arena, speeds = made(3, 4000, seed=1), torch.zeros(3, 4000, device=DEVICE)
    arena_before = arena.clone()
    param, velocity = arena[:, 7:2507].view(3, 50, 50), speeds[:, 7:2507].view(3, 50, 50)
    same = param.double().clone().requires_grad_()
    optimiser = torch.optim.SGD([same], lr=0.1, momentum=momentum, weight_decay=0.01, nesterov=nesterov)
    lr = torch.tensor(0.1, device=DEVICE)
    for step in range(3):
        grad = made(3, 50, 50, seed=2 + step).to(dtype)
        assert can_step(param, grad)
        stacked_sgd_step(param, grad, velocity, lr, momentum, 0.01, nesterov)
        same.grad = grad.double()
        optimiser.step()
    assert torch.allclose(param.double(), same.detach(), rtol=0, atol=1e-6)
    untouched = torch.cat([arena[:, :7], arena[:, 2507:]], dim=1)
    assert torch.equal(untouched, torch.cat([arena_before[:, :7], arena_before[:, 2507:]], dim=1))


def test_other_formats_are_left_to_pytorch() -> None:
    param = torch.zeros(2, 3, dtype=torch.float64)
    assert not can_step(param, param)
