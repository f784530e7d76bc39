"""Whether images lie in memory with their channels last: on a CPU, convolutions are faster so, by a tenth to a half.

Only inputs are laid out so, and convolutions keep the layout of what they are given: methods never see it. With more
than one thread it may cost instead (LeNet's small convolutions half their speed), so it is for one thread alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedskew.engine.data.device_samples import DeviceSamples
from fedskew.engine.model.network import Network


class Layout:
    """The layout of a network's inputs."""

    def __init__(self, network: Network, data: DeviceSamples) -> None:
        self._network, self._data = network, data
        self._suits: bool | None = None

    def of_inputs(self, x: Tensor) -> Tensor:
        """The same inputs in the layout that suits the network."""
        if x.dim() != 4 or x.device.type != "cpu" or x.dtype != torch.float32 or torch.get_num_threads() != 1:
            return x
        if self._suits is None:
            self._suits = self._found_to_suit()
        return channels_last(x) if self._suits else x

    @torch.no_grad()
    def _found_to_suit(self) -> bool:
        """Whether the network has convolutions and gives the same outputs with either layout.

        A user's network may take `view`s that need the usual one, or draw random numbers in the order of memory.
        """
        state = self._network.state()
        if not any(isinstance(layer, nn.Conv2d) for layer in self._network.module(state).modules()):
            return False
        samples = self._data.inputs(torch.linspace(0, len(self._data) - 1, 8).long())
        try:
            usual, other = (self._outputs(x) for x in (samples, channels_last(samples)))
        except RuntimeError:
            return False
        return torch.allclose(usual, other, rtol=0, atol=1e-2 * float(usual.abs().max()))

    def _outputs(self, x: Tensor) -> Tensor:
        state, key = self._network.state(), torch.zeros((), dtype=torch.int64)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            return self._network.forward(state.params, state.buffers, x, "train", key).logits


def channels_last(x: Tensor) -> Tensor:
    """The same images; one channel is last and first at once, and has to be said to be last."""
    channels, height, width = x.shape[1:]
    if channels == 1:
        return x.contiguous().as_strided(x.shape, (height * width, 1, width, 1))
    return x.contiguous(memory_format=torch.channels_last)
