# mypy: ignore-errors
"""The Triton program of an SGD step of one parameter for all clients. Each client's values are contiguous."""

import triton
import triton.language as tl


@triton.jit
def sgd_program(
    param, grad, velocity, lr, size, param_client, velocity_client, momentum, weight_decay, HAS_MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Update SIZE values of one client, which has `size` values in all.

    `param_client` and `velocity_client` are the strides between clients.
    """
    client = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = at < size
    param += client * param_client + at
    p = tl.load(param, mask=inside)
    g = tl.load(grad + client * size + at, mask=inside).to(tl.float32) + weight_decay * p
    if HAS_MOMENTUM:
        velocity += client * velocity_client + at
        v = momentum * tl.load(velocity, mask=inside) + g
        tl.store(velocity, v, mask=inside)
        g = g + momentum * v if NESTEROV else v
    tl.store(param, p - tl.load(lr) * g, mask=inside)
