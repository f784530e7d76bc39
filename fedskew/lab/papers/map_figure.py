"""The map as a picture: for each method a small table of skew × participation, coloured by its gain over FedAvg."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedskew.errors import UserError
from fedskew.lab.papers.map_data import Spot, seeds_of, spots
from fedskew.lab.papers.rerun import BASELINE
from fedskew.lab.sweep.records_file import read_folder

_ACROSS = 5
_DARK = 0.6
"""The part of the colour scale beyond which black text is hard to read."""


def draw_maps(folder: str | Path) -> list[Path]:
    """A picture for each dataset that the records have; none without any."""
    records = read_folder(folder)
    found = spots(records, seeds_of(records))
    pictures = []
    for dataset in dict.fromkeys(spot.dataset for spot in found):
        path = Path(folder) / f"map-{dataset}.png"
        _draw([spot for spot in found if spot.dataset == dataset], path)
        pictures.append(path)
    return pictures


def _draw(found: Sequence[Spot], path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("a picture needs matplotlib: pip install 'fedskew[report]'") from error
    methods = [m for m in dict.fromkeys(m for spot in found for m in spot.accuracy) if m != BASELINE]
    betas = sorted({spot.beta for spot in found})
    shares = sorted({spot.share for spot in found})
    gains = [gain for spot in found for m in methods if (gain := spot.gain(m)) is not None]
    limit = max(1.0, max(map(abs, gains), default=1.0))
    down = -(-len(methods) // _ACROSS)
    figure = Figure(figsize=(2.3 * _ACROSS, 2.2 * down + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(down, _ACROSS, squeeze=False, sharex=True, sharey=True)
    for axis, method in zip(axes.flat, methods, strict=False):
        picture = _panel(axis, method, found, betas, shares, limit)
    for axis in axes.flat[len(methods) :]:
        axis.set_axis_off()
    figure.colorbar(picture, ax=axes, label=f"points over {BASELINE}", shrink=0.8)
    figure.supxlabel("clients that take part in a round", fontsize=9)
    figure.suptitle(f"{found[0].dataset}: gain over {BASELINE}, by skew and participation")
    figure.savefig(path, dpi=110)


def _panel(
    axis: Any, method: str, found: Sequence[Spot], betas: Sequence[float], shares: Sequence[float], limit: float
) -> Any:
    gains = {(spot.beta, spot.share): spot.gain(method) for spot in found}
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
