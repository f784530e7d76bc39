"""Maps that show where a method helps: the gain over FedAvg by participation and skew, under one protocol."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from fedskew.errors import UserError
from fedskew.lab.papers.cells import CellChoice, table_cells
from fedskew.lab.papers.protocol import conditions, read_protocol
from fedskew.lab.papers.rerun import BASELINE, CellRerun, collect_rerun, columns
from fedskew.lab.sweep.records import Records, read_folder

PAPER, TABLE = "fedskew", "map"
CLOSE = 1.0
"""Methods within this many points of accuracy count as equally good."""


@dataclass(frozen=True)
class FederationResult:
    """The methods' accuracy on one federation: a dataset, a skew and a share of clients per round."""

    dataset: str
    beta: float
    share: float
    """The share of clients per round."""
    accuracy: dict[str, float]
    """Accuracy in percent, by method."""

    def gain(self, method: str) -> float | None:
        """The gain over FedAvg in percentage points."""
        if method not in self.accuracy or BASELINE not in self.accuracy:
            return None
        return self.accuracy[method] - self.accuracy[BASELINE]

    @property
    def ranking(self) -> list[str]:
        return sorted(self.accuracy, key=lambda method: -self.accuracy[method])

    @property
    def best(self) -> list[str]:
        """The best method, and those close to it."""
        top = self.accuracy[self.ranking[0]]
        return [method for method in self.ranking if top - self.accuracy[method] <= CLOSE]


def known_seeds(records: Records) -> list[int]:
    return sorted({record.config.seed for record in records})


def federation_results(records: Records, seeds: Sequence[int]) -> list[FederationResult]:
    """Collect the federations on which every method was run. On others, the best method is not known."""
    clients = int(read_protocol(PAPER).settings["partition.clients"])
    cells = table_cells(PAPER, TABLE)
    by_seed = [columns([collect_rerun(cell, [seed], records, CellChoice()) for cell in cells]) for seed in seeds]
    found = []
    for column in dict.fromkeys(column for reruns in by_seed for column in reruns):
        dataset, split, condition, _ = column
        share = int(conditions(condition)["participants"]) / clients
        accuracy = _accuracy([_complete_runs(reruns[column]) for reruns in by_seed])
        found.append(FederationResult(dataset, float(split.partition(":")[2]), share, accuracy))
    methods = {method for federation in found for method in federation.accuracy}
    return [federation for federation in found if federation.accuracy.keys() == methods and len(methods) > 1]


def _complete_runs(column: Sequence[CellRerun]) -> dict[str, float]:
    """The accuracy of each method with a complete run, for one seed."""
    return {one.cell.method: one.mean.mean for one in column if one.mean is not None and one.shortened is None}


def _accuracy(by_seed: Sequence[dict[str, float]]) -> dict[str, float]:
    """Average each method over the seeds that all methods have.

    Each seed has another split, so means over different seeds would compare splits instead of methods.
    """
    methods = dict.fromkeys(method for accuracies in by_seed for method in accuracies)
    shared = [accuracies for accuracies in by_seed if accuracies.keys() == methods.keys()]
    return {method: fmean(accuracies[method] for accuracies in shared) for method in methods} if shared else {}


def guide(found: Sequence[FederationResult]) -> str:
    """Write a Markdown table of the best methods per federation."""
    lines = ["| dataset | Dirichlet β | clients per round | FedAvg | best, and methods within a point | gain |",
             "| --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for federation in found:
        baseline = federation.accuracy.get(BASELINE)
        gain = federation.gain(federation.ranking[0])
        lines.append(
            f"| {federation.dataset} | {federation.beta:g} | {federation.share:.0%} "
            f"| {'' if baseline is None else f'{baseline:.1f}'} "
            f"| {', '.join(federation.best)} | {'' if gain is None else f'{gain:+.1f}'} |"
        )
    return "\n".join(lines) + "\n"


_ACROSS = 5
"""The number of panels side by side."""
_DARK = 0.6
"""Beyond this fraction of the colour scale, black text is hard to read."""


def draw_maps(folder: str | Path) -> list[Path]:
    """Draw one map per dataset of `federation_results`."""
    records = read_folder(folder)
    found = federation_results(records, known_seeds(records))
    pictures = []
    for dataset in dict.fromkeys(federation.dataset for federation in found):
        path = Path(folder) / f"map-{dataset}.png"
        _draw([federation for federation in found if federation.dataset == dataset], path)
        pictures.append(path)
    return pictures


def _draw(found: Sequence[FederationResult], path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("maps need matplotlib: pip install 'fedskew[report]'") from error
    methods = [m for m in dict.fromkeys(m for federation in found for m in federation.accuracy) if m != BASELINE]
    betas = sorted({federation.beta for federation in found})
    shares = sorted({federation.share for federation in found})
    gains = [gain for federation in found for m in methods if (gain := federation.gain(m)) is not None]
    limit = max(1.0, max(map(abs, gains), default=1.0))
    panel_rows = -(-len(methods) // _ACROSS)
    figure = Figure(figsize=(2.3 * _ACROSS, 2.2 * panel_rows + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(panel_rows, _ACROSS, squeeze=False, sharex=True, sharey=True)
    for axis, method in zip(axes.flat, methods, strict=False):
        picture = _panel(axis, method, found, betas, shares, limit)
    for axis in axes.flat[len(methods) :]:
        axis.set_axis_off()
    figure.colorbar(picture, ax=axes, label=f"points over {BASELINE}", shrink=0.8)
    figure.supxlabel("clients per round", fontsize=9)
    figure.suptitle(f"{found[0].dataset}: gain over {BASELINE}, by skew and participation")
    figure.savefig(path, dpi=110)


def _panel(
    axis: Any,
    method: str,
    found: Sequence[FederationResult],
    betas: Sequence[float],
    shares: Sequence[float],
    limit: float,
) -> Any:
    gains = {(federation.beta, federation.share): federation.gain(method) for federation in found}
    rows = [[_or_nan(gains.get((beta, share))) for share in shares] for beta in betas]
    picture = axis.imshow(rows, cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto")
    for i, row in enumerate(rows):
        for j, gain in enumerate(row):
            if not math.isnan(gain):
                colour = "white" if abs(gain) > _DARK * limit else "black"
                axis.text(j, i, f"{gain:+.1f}", ha="center", va="center", fontsize=8, color=colour)
    axis.set_title(method, fontsize=9)
    axis.set_xticks(range(len(shares)), [f"{share:.0%}" for share in shares])
    axis.set_yticks(range(len(betas)), [f"β {beta:g}" for beta in betas])
    return picture


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
