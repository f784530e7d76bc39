"""Arrange images with their channels last in memory. This makes convolutions on a CPU faster by a tenth to a half.

Only the model's inputs are rearranged. Convolutions keep the layout of their inputs, and shapes do not change. The
layout is used only with one thread. With more threads, it may be slower: LeNet's small convolutions run at half their
usual speed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedskew.engine.data.device import DeviceSamples
from fedskew.engine.model.network import Network


class InputLayout:
    """Arranges inputs in the memory layout that suits a network."""

    def __init__(self, network: Network, data: DeviceSamples) -> None:
        self._network, self._data = network, data
        self._suitable: bool | None = None

    def arrange(self, x: Tensor) -> Tensor:
        """Return the same inputs, with channels last in memory if this suits the network and the device."""
        if x.dim() != 4 or x.device.type != "cpu" or x.dtype != torch.float32 or torch.get_num_threads() != 1:
            return x
        if self._suitable is None:
            self._suitable = self._is_suitable()
        return channels_last(x) if self._suitable else x

    @torch.no_grad()
    def _is_suitable(self) -> bool:
        """Return whether the network has convolutions and gives the same outputs with either layout.

        A user's network may call `view`, which needs the usual layout, or draw random numbers in memory order.
        """
        state = self._network.state()
        if not any(isinstance(layer, nn.Conv2d) for layer in self._network.module(state).modules()):
            return False
        samples = self._data.some_inputs()
        try:
            usual, other = (self._outputs(x) for x in (samples, channels_last(samples)))
        except RuntimeError:
            return False
        # In float32, rounding differences are far below this tolerance. In bf16, they may exceed it, and the usual
        # layout is kept. Outputs with other random numbers differ by far more.
        return torch.allclose(usual, other, rtol=0, atol=1e-2 * float(usual.abs().max()))

    def _outputs(self, x: Tensor) -> Tensor:
        state, key = self._network.state(), torch.zeros((), dtype=torch.int64)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            return self._network.forward(state.params, state.buffers, x, "train", key).logits


def channels_last(x: Tensor) -> Tensor:
    """Return the same images with channels last in memory.

    Images with one channel have the same memory order in both layouts, so `contiguous` would not change their strides.
    Convolutions choose their kernels by the strides, so these are set explicitly.
    """
    channels, height, width = x.shape[1:]
    if channels == 1:
        return x.contiguous().as_strided(x.shape, (height * width, 1, width, 1))
    return x.contiguous(memory_format=torch.channels_last)
