"""Evaluation on sets of samples: confusion matrix, log loss, probabilities, features, and mean predictions."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedskew.accurate_sums import ACCURATE
from fedskew.engine.data.device import DeviceSamples, Fetch, stream_for
from fedskew.engine.model.network import ModelState, Network
from fedskew.engine.stacked.execution import Memory, captured, compiled
from fedskew.engine.stacked.layouts import RowLayout
from fedskew.methods.stages import Survey

_BATCH = 1000
"""The maximum number of samples per batch."""


class EvaluationSums(NamedTuple):
    """What an evaluation adds up over its samples."""

    confusion: npt.NDArray[np.int64]
    """Counts by true and predicted class, or by label: see `Task.counts_shape`."""
    log_loss: float
    """The sum of −log p of the true class over the samples, in nats. With several labels per sample, it is the sum of
    the binary log losses over the samples and labels."""


class Evaluator:
    """Evaluates models on one set of samples."""

    def __init__(self, network: Network, data: DeviceSamples, compile_steps: bool = False) -> None:
        self._network, self._data, self._compile = network, data, compile_steps
        self._programs: list[Callable[[], None]] | None = None
        """The CUDA graph of each batch. None before the first attempt to capture them. Empty if that failed."""
        self._memory: Memory = {}
        self._layouts: tuple[RowLayout, RowLayout] | None = None

    def confusion(self, model: ModelState, labels: Sequence[int] | None = None) -> npt.NDArray[np.int64]:
        """Return the counts of an evaluation (`EvaluationSums.confusion`).

        With `labels`, samples of other classes are skipped, and no other class can be predicted.
        """
        return self.begin(model, labels)().confusion

    def begin(self, model: ModelState, labels: Sequence[int] | None = None) -> Callable[[], EvaluationSums]:
        """Start an evaluation and return a function that waits for the result.

        On a CUDA GPU, an evaluation of all classes runs in parallel with other work, if CUDA graphs can capture it.
        """
        device = self._data.y.device
        if labels is None and device.type == "cuda" and self._capture(model):
            stream = stream_for("testing", device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                sums = Fetch(self._replay(model))
        else:
            sums = Fetch(_evaluate(self._network, model, self._data, labels))
        return partial(self._read, sums, model)

    @torch.no_grad()
    def probabilities(self, model: ModelState, samples: npt.NDArray[np.int64] | None = None) -> tuple[Tensor, Tensor]:
        """Return the probability of every class, [samples, classes] in float64 on the host, and the samples' labels.

        The labels are on the device. With `samples`, only the samples with these indices are evaluated.
        """
        chosen = torch.arange(len(self._data)) if samples is None else torch.from_numpy(samples)
        rows, task = chosen.to(self._data.y.device), self._data.task
        accurate, all_logits = ACCURATE[rows.device.type], _logits(self._network, model, self._data, rows)
        parts = [task.probabilities(logits.to(accurate)) for _, logits in all_logits]
        return torch.cat(parts).cpu().double(), self._data.y[rows]

    def loss(self, model: ModelState, samples: Tensor) -> Tensor:
        """Return the mean loss on the samples with these indices. Gradients pass through it."""
        y = self._data.y[samples]
        out = self._network.forward(model.params, model.buffers, self._data.inputs(samples), "eval")
        return self._data.task.loss(out.logits, y)

    def _read(self, sums: Fetch, model: ModelState) -> EvaluationSums:  # noqa: ARG002
        """Wait for the sums. `model` is an argument only to keep its memory alive during the evaluation."""
        found = sums.read()
        cells = np.asarray(found["cells"].view(self._data.task.counts_shape(self._data.classes)).numpy())
        return EvaluationSums(cells, float(found["log_loss"]))

    def _capture(self, model: ModelState) -> bool:
        """Capture a CUDA graph for each size of batch at the first call, and return whether that worked.

        Launching a small network's operations one by one takes longer than running them.
        """
        if self._programs is None:
            layouts = self._layouts = RowLayout(model.params), RowLayout(model.buffers)
            sizes = [len(part) for part in _parts(torch.arange(len(self._data)))]
            self._memory = _memory(layouts, model, self._data)
            try:
                by_size = {size: self._program(layouts, size) for size in dict.fromkeys(sizes)}
            except RuntimeError:  # the model synchronises with the device, or memory is short: use no graphs
                torch.cuda.synchronize()
                by_size = {}
            self._programs = [by_size[size] for size in sizes] if by_size else []
        return bool(self._programs)

    def _program(self, layouts: tuple[RowLayout, RowLayout], size: int) -> Callable[[], None]:
        batch = _Batch(self._network, self._data, layouts, size)
        if self._compile:
            with contextlib.suppress(Exception):  # a compiler may fail in any way, and the program works without it
                return captured(compiled(batch, self._memory), self._memory, None, "testing")
        return captured(batch, self._memory, None, "testing", has_kernels=True)

    def _replay(self, model: ModelState) -> dict[str, Tensor]:
        assert self._layouts is not None
        for kind, flats in _rows(self._layouts, model).items():
            for name, flat in flats.items():
                self._memory[kind][name].copy_(flat)
        for tensor in self._memory["progress"].values():
            tensor.zero_()
        for program in self._programs or ():
            program()
        return {name: self._memory["progress"][name] for name in ("cells", "log_loss")}


def _memory(layouts: tuple[RowLayout, RowLayout], model: ModelState, data: DeviceSamples) -> Memory:
    progress = {
        **_zero_sums(data),
        "first": torch.zeros((), dtype=torch.int64, device=data.y.device),  # the next batch's first sample
    }
    return {**_rows(layouts, model), "data": data.tensors(), "progress": progress}


def _rows(layouts: tuple[RowLayout, RowLayout], model: ModelState) -> Memory:
    """Return the model's tensors as flat rows, in the layout of the programs' memory."""
    parts = {"params": model.params, "buffers": model.buffers}
    return {
        kind: layout.flat({n: t.unsqueeze(0) for n, t in part.items()})
        for (kind, part), layout in zip(parts.items(), layouts, strict=True)
    }


@dataclass(frozen=True)
class _Batch:
    """Evaluates the next `size` samples. All that changes between calls is in `memory`, as a CUDA graph requires."""

    network: Network
    data: DeviceSamples
    layouts: tuple[RowLayout, RowLayout]
    size: int

    @torch.no_grad()
    def __call__(self, memory: Memory) -> None:
        data, progress = self.data.with_tensors(memory["data"]), memory["progress"]
        rows = progress["first"] + torch.arange(self.size, device=data.y.device)
        rows = rows % len(data)  # warm-up runs before a capture may advance `first` beyond the end
        params, buffers = (
            {n: t[0] for n, t in layout.views(memory[kind]).items()}
            for layout, kind in zip(self.layouts, ("params", "buffers"), strict=True)
        )
        logits = self.network.logits(ModelState(params, buffers), data.inputs(rows))
        _add(progress, data, rows, logits)
        progress["first"].add_(self.size)


def _zero_sums(data: DeviceSamples) -> dict[str, Tensor]:
    device = data.y.device
    return {
        "cells": torch.zeros(math.prod(data.task.counts_shape(data.classes)), dtype=torch.int64, device=device),
        "log_loss": torch.zeros((), dtype=ACCURATE[device.type], device=device),
    }


def _add(sums: dict[str, Tensor], data: DeviceSamples, rows: Tensor, logits: Tensor) -> None:
    """Add a batch to the sums, in place."""
    data.task.count(sums["cells"], logits, data.y[rows])
    sums["log_loss"].add_(data.task.log_loss(logits, data.y[rows]))


@torch.no_grad()
def _evaluate(
    network: Network, model: ModelState, data: DeviceSamples, labels: Sequence[int] | None
) -> dict[str, Tensor]:
    """Return the sums of an evaluation that runs without CUDA graphs."""
    outside = torch.zeros(data.classes, dtype=torch.bool, device=data.y.device)
    rows = torch.arange(len(data), device=data.y.device)
    if labels is not None:
        outside[:] = True
        outside[list(labels)] = False
        rows = rows[~outside[data.y]]
    sums = _zero_sums(data)
    for batch, logits in _logits(network, model, data, rows):
        _add(sums, data, batch, logits.masked_fill(outside, -torch.inf))
    return sums


@torch.no_grad()
def survey(network: Network, model: ModelState, data: DeviceSamples, samples: npt.NDArray[np.int64]) -> Survey:
    """Return the label counts of these samples and the mean prediction per true class, NaN for a class without samples.

    A simulation makes one pass over all clients' samples. On Flower, each site makes a pass over its own samples, and
    sends its label counts and its mean predictions.
    """
    classes = data.classes
    rows = torch.from_numpy(samples).to(data.y.device)
    accurate = ACCURATE[data.y.device.type]
    sums = torch.zeros(classes, classes, dtype=accurate, device=data.y.device)
    for batch, logits in _logits(network, model, data, rows):
        sums.index_add_(0, data.y[batch], logits.to(accurate).softmax(dim=-1))
    counts = np.bincount(data.y[rows].cpu().numpy(), minlength=classes)
    totals = counts[:, None].astype(np.float64)
    mean = np.divide(sums.cpu().double().numpy(), totals, out=np.full((classes, classes), np.nan), where=totals > 0)
    return Survey(counts[None], mean)


@torch.no_grad()
def features(network: Network, model: ModelState, data: DeviceSamples) -> Tensor:
    """Return the features of all samples, in eval mode: [samples, d]. The model must be a `Classifier`."""
    rows = torch.arange(len(data), device=data.y.device)
    parts = [network.forward(model.params, model.buffers, data.inputs(batch)).features for batch in _parts(rows)]
    return torch.cat([part for part in parts if part is not None])


def _logits(network: Network, model: ModelState, data: DeviceSamples, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for batch in _parts(rows) if len(rows) else ():
        yield batch, network.logits(model, data.inputs(batch))


def _parts(rows: Tensor) -> Sequence[Tensor]:
    """Split rows into parts of about equal size.

    If only the last part were shorter, it could be a single sample. Models that use the batch's statistics even in eval
    mode would fail on it.
    """
    parts: Sequence[Tensor] = rows.tensor_split(-(-len(rows) // _BATCH))
    return parts
