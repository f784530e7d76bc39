"""Draw docs/images/participation.png, the README's picture, from the records in results/.

python tools/draw_participation.py

Left: accuracy by the share of clients per round. Right: accuracy by class with 10 % of the clients per round. Both are
means over the splits that all methods have. The runs are those of `fedskew reproduce fedskew/map` on Fashion-MNIST.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedskew.data.published.idx import FASHION
from fedskew.lab.papers.cells import Cell, CellChoice, make_job, table_cells
from fedskew.lab.papers.map import PAPER, TABLE, FederationResult, federation_results
from fedskew.lab.sweep.records import Records, read_folder
from fedskew.report.charts.palette import AMOUNT, colour

ROOT = Path(__file__).parent.parent
DATASET, BETA, SEEDS = "fashion-mnist", 0.05, (0, 1)
LINES = ("FedVLS", "FedLMD", "FedRS", "FedAvgM", "FedAvg")
ROWS = ("FedAvg", "FedRS", "FedLMD", "FedVLS")
MARKERS = ("o", "s", "^", "D", "X")


def main(path: Path = ROOT / "docs" / "images" / "participation.png") -> None:
    records = read_folder(ROOT / "results")
    found = [one for one in federation_results(records, SEEDS) if (one.dataset, one.beta) == (DATASET, BETA)]
    figure = Figure(figsize=(11.5, 4.1), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    draw_shares(left, sorted(found, key=lambda one: one.share))
    draw_classes(right, class_accuracy(records))
    figure.savefig(path, dpi=150, metadata={"Software": None})
    print(path)


def draw_shares(axes: Any, found: list[FederationResult]) -> None:
    places = range(len(found))
    for style, method in enumerate(LINES):
        values = [one.accuracy[method] for one in found]
        axes.plot(places, values, color="black" if method == "FedAvg" else colour(style), marker=MARKERS[style],
                  linestyle="--" if method == "FedAvg" else "-", linewidth=2, label=method)  # fmt: skip
    axes.set_xticks(list(places), [f"{one.share:.0%}" for one in found])
    axes.set_xlabel("clients per round")
    axes.set_ylabel("test accuracy, %")
    axes.set_ylim(0, 100)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=9)
    axes.set_title("The best method depends on the federation", fontsize=11)


def class_accuracy(records: Records) -> np.ndarray:
    """Percent by method and class after the last round with 10 % of the clients, mean over the splits."""
    places = {cell.method: cell for cell in table_cells(PAPER, TABLE) if is_shown(cell)}
    runs = [[records.longest(make_job(places[method], seed, CellChoice())) for seed in SEEDS] for method in ROWS]
    numbers = [[run.content["class_accuracy"] for run in by_seed if run is not None] for by_seed in runs]
    return 100 * np.array(numbers, np.float64).mean(axis=1)


def is_shown(cell: Cell) -> bool:
    return (cell.dataset, cell.split, cell.condition) == (DATASET, f"dirichlet:{BETA}", "participants=2")


def draw_classes(axes: Any, values: np.ndarray) -> None:
    axes.imshow(values, cmap=AMOUNT, vmin=0, vmax=100, aspect="auto")
    for row, column in np.ndindex(*values.shape):
        shade = "black" if values[row, column] > 50 else "white"
        axes.text(column, row, f"{values[row, column]:.0f}", ha="center", va="center", color=shade, fontsize=10)
    axes.set_xticks(range(values.shape[1]), FASHION.classes, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(ROWS)), ROWS)
    axes.set_title("10 % of the clients per round: accuracy by class, %", fontsize=11)


if __name__ == "__main__":
    main()
