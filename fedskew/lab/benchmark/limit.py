"""The device's practical limit: one model, trained on one batch as large as all clients' batches together.

This model has one set of weights, and a federation has one set per client. So with the same kernels, no simulation of a
federation can be faster. With its own kernels, fedskew can exceed this limit. The step is compiled by default. Models
with convolutions use the channels-last layout. On a GPU, the step is replayed as one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedskew.engine import DeviceSamples
from fedskew.lab.benchmark.arithmetic import autocast, fastest_arithmetic
from fedskew.lab.benchmark.cases import Case
from fedskew.methods import Tensors

_WARM_UP_STEPS = 3


class Limit:
    """Repeats one step on one large batch."""

    def __init__(self, case: Case, compiled: bool = True) -> None:
        self._case = case
        self._device = torch.device(case.device)
        dataset = case.federation().dataset
        data = DeviceSamples(dataset, dataset.train, self._device)
        rows = torch.arange(case.step_samples, device=self._device) % len(data)
        layout = torch.channels_last if _is_convolutional(model := case.fresh_model()) else torch.contiguous_format
        self._x, self._y = data.inputs(rows).contiguous(memory_format=layout), data.y[rows]
        self._model = model.to(self._device, memory_format=layout).train()  # type: ignore[call-overload]
        config = case.config("plain")
        self._optimizer = torch.optim.SGD(self._model.parameters(), config.lr, config.momentum, fused=True)
        self._loss: Callable[[Tensor, Tensor], Tensor] = self._eager_loss
        if compiled:
            self._loss = torch.compile(self._eager_loss, dynamic=False)
        with fastest_arithmetic(case.precision):
            self._replay = self._capture() if self._device.type == "cuda" else self._step

    @property
    def samples(self) -> int:
        """Samples per call."""
        return self._case.step_samples

    def __call__(self) -> None:
        with fastest_arithmetic(self._case.precision):
            self._replay()

    @torch.no_grad()
    def current_loss(self) -> float:
        return float(self._eager_loss(self._x, self._y))

    def global_model(self) -> Tensors:
        return {name: p.detach().clone() for name, p in self._model.named_parameters()}

    def _eager_loss(self, x: Tensor, y: Tensor) -> Tensor:
        with autocast(self._case.precision, self._device):
            logits = self._model(x)
        return nn.functional.cross_entropy(logits.float(), y)

    def _step(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._loss(self._x, self._y).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def _capture(self) -> Callable[[], None]:
        """Capture the step as a CUDA graph, after compiling and autotuning."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_STEPS):
                self._step()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph.replay


def _is_convolutional(model: nn.Module) -> bool:
    return any(isinstance(layer, nn.Conv2d) for layer in model.modules())
