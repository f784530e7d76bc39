"""Max-pooling of images in channels-last memory, together with a ReLU before it, if there is one.

Memory bandwidth limits the speed. PyTorch's kernels read and write more: the ReLU is a separate pass, and the positions
of the largest values are stored as 64-bit integers. Here, the backward pass finds the positions again.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fedskew.engine.kernels.geometry import blocks, channels_first, channels_last, power_of_two
from fedskew.engine.kernels.launches import launch
from fedskew.engine.kernels.operations import operation

_VALUES = 2048
"""The number of values in a program's block: two 16-byte loads of 16-bit numbers for each of 128 threads."""


def pools_disjoint_windows(layer: nn.Module) -> bool:
    """Return whether the layer is max-pooling over adjacent square windows, without padding or other options."""
    return (
        isinstance(layer, nn.MaxPool2d)
        and _both(layer.kernel_size) == _both(layer.stride)
        and len(set(_both(layer.kernel_size))) == 1
        and (_both(layer.padding), _both(layer.dilation)) == ((0, 0), (1, 1))
        and not (layer.ceil_mode or layer.return_indices)
    )


def _both(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def stacked_max_pool(x: Tensor, layer: nn.MaxPool2d, relu: bool) -> Tensor:
    """Pool images [K, B, C, H, W] of all clients, after a ReLU if `relu`."""
    return channels_first(_forward(channels_last(x), _both(layer.kernel_size)[0], relu))


def _grid(windows: int, channels: int) -> tuple[tuple[int, int], dict[str, int]]:
    block_channels = power_of_two(16, 128, channels)
    block_windows = _VALUES // block_channels
    grid = blocks(windows, block_windows), blocks(channels, block_channels)
    return grid, {"WINDOWS": block_windows, "CHANNELS": block_channels, "num_warps": 4}


@operation("stacked_max_pool")
def _forward(x: Tensor, side: int, relu: bool) -> Tensor:
    from fedskew.engine.kernels.max_pool_programs import forward_program

    clients, samples, h, w, channels = x.shape
    ho, wo, images = h // side, w // side, clients * samples
    y = x.new_empty(clients, samples, ho, wo, channels)
    grid, constants = _grid(images * ho * wo, channels)
    launch(forward_program, grid)(
        x.contiguous(), y, images, h, w, ho, wo, C=channels, SIDE=side, RELU=relu, **constants
    )
    return y


@operation("stacked_max_pool_gradient")
def _gradient(grad: Tensor, x: Tensor, side: int, relu: bool) -> Tensor:
    from fedskew.engine.kernels.max_pool_programs import gradient_program

    clients, samples, h, w, channels = x.shape
    images, grad_x = clients * samples, x.new_empty(x.shape)
    grid, constants = _grid(images * blocks(h, side) * blocks(w, side), channels)
    launch(gradient_program, grid)(
        x.contiguous(), grad.contiguous(), grad_x, images, h, w, h // side, w // side, C=channels, SIDE=side, RELU=relu,
        **constants,
    )  # fmt: skip
    return grad_x


@_forward.register_fake
def _(x: Tensor, side: int, relu: bool) -> Tensor:  # noqa: ARG001
    clients, samples, h, w, channels = x.shape
    return x.new_empty(clients, samples, h // side, w // side, channels)


@_gradient.register_fake
def _(grad: Tensor, x: Tensor, side: int, relu: bool) -> Tensor:  # noqa: ARG001
    return x.new_empty(x.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    x, ctx.side, ctx.relu = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (x,) = ctx.saved_tensors
    return _gradient(grad.contiguous(), x, ctx.side, ctx.relu), None, None


_forward.register_autograd(_backward, setup_context=_save_for_backward)
