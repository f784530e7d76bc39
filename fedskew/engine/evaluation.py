"""Forward passes over whole sets of samples: test confusion, and what PKD's clients report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedskew.engine.device_data import DeviceSamples
from fedskew.engine.network import ModelState, Network
from fedskew.methods.parts import Survey

_BATCH = 1000


@torch.no_grad()
def confusion(
    network: Network, model: ModelState, data: DeviceSamples, labels: Sequence[int] | None = None
) -> npt.NDArray[np.int64]:
    """True class × predicted class; with `labels`, only samples and predictions among those classes."""
    classes = data.classes
    outside = torch.zeros(classes, dtype=torch.bool, device=data.y.device)
    rows = torch.arange(len(data), device=data.y.device)
    if labels is not None:
        outside[:] = True
        outside[list(labels)] = False
        rows = rows[~outside[data.y]]
    cells = torch.zeros(classes * classes, dtype=torch.int64, device=data.y.device)
    for batch, logits in _logits(network, model, data, rows):
        predicted = logits.masked_fill(outside, -torch.inf).argmax(dim=-1)
        cells += torch.bincount(data.y[batch] * classes + predicted, minlength=classes * classes)
    return np.asarray(cells.view(classes, classes).cpu().numpy())


@torch.no_grad()
def survey(network: Network, model: ModelState, data: DeviceSamples, samples: npt.NDArray[np.int64]) -> Survey:
    """How the samples of each true class are predicted on average.

    Each client would send its sums and counts; their total is what one pass over all samples gives.
    """
    classes = data.classes
    rows = torch.from_numpy(samples).to(data.y.device)
    sums = torch.zeros(classes, classes, dtype=torch.float64, device=data.y.device)
    for batch, logits in _logits(network, model, data, rows):
        sums.index_add_(0, data.y[batch], logits.double().softmax(dim=-1))
    counts = np.bincount(data.y[rows].cpu().numpy(), minlength=classes)
    totals = counts[:, None].astype(np.float64)
    mean = np.divide(sums.cpu().numpy(), totals, out=np.full((classes, classes), np.nan), where=totals > 0)
    return Survey(mean, counts)


def _logits(network: Network, model: ModelState, data: DeviceSamples, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    if not len(rows):
        return
    # Of equal sizes: a model may take its batch's statistics in tests, too, and a rest of one sample has none.
    for batch in rows.tensor_split(-(-len(rows) // _BATCH)):
        yield batch, network.logits(model, data.inputs(batch))
