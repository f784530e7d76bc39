"""The section of RESULTS.md on pretrained starts: whether label skew still hurts them, and which method helps.

A start, such as `fine-tuned`, says with which weights training starts, and which part of the model is trained.

The section is made from the grids `pretrained-*.yaml`. Those with the axes `federation`, `partition.beta`, `start` and
`method` have one network each. The grid with the axis `network` has heads that are computed in closed form, without
training. These heads are the same for every split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedskew.errors import UserError
from fedskew.lab.papers.sweep_section import Sweep, read_sweeps, sweep_section

PICTURE = "pretrained.png"
_AXES = ["federation", "partition.beta", "start", "method"]
_BASELINE = "fedavg"
_NAMES = {"cnn": "CNN", "resnet18": "ResNet-18"}


@dataclass(frozen=True)
class StartResult:
    """The accuracy of one start on one network and federation, by skew and method."""

    network: str
    federation: str
    """The participation, such as `10 of 100 clients`."""
    start: str
    accuracy: dict[float, dict[str, float]]
    """In percent, by β and method."""
    methods: int
    """The number of methods in the grid. The best method at a β is known only if all of them were run there."""

    def baseline(self, beta: float) -> float | None:
        """The accuracy of FedAvg, or None if it was not run."""
        return self.accuracy.get(beta, {}).get(_BASELINE)

    def best(self, beta: float) -> str | None:
        """The best method, or None if some method was not run."""
        found = self.accuracy.get(beta, {})
        return max(found, key=found.__getitem__) if len(found) == self.methods else None

    def points_lost(self, mild: float, severe: float) -> float | None:
        """How many points FedAvg loses from a mild to a severe skew."""
        before, after = self.baseline(mild), self.baseline(severe)
        return None if before is None or after is None else before - after


def is_pretrained(sweep: Sweep) -> bool:
    """Whether the sweep belongs to this section."""
    return sweep.path.stem.startswith("pretrained-")


def start_results(sweeps: Sequence[Sweep]) -> list[StartResult]:
    """Collect the results of all starts, in the order of the grids."""
    return [result for sweep in sweeps if sweep.keys == _AXES for result in _sweep_results(sweep)]


def _sweep_results(sweep: Sweep) -> list[StartResult]:
    model = sweep.points[0].config.model
    network = _NAMES.get(model, model)
    found: dict[tuple[str, str], dict[float, dict[str, float]]] = {}
    for (federation, beta, start, method), row in sweep.rows().items():
        by_beta = found.setdefault((federation, start), {})
        by_beta.setdefault(float(beta), {})[method] = 100 * row.mean_last.mean
    methods = len(sweep.methods)
    return [StartResult(network, federation, start, found[federation, start], methods) for federation, start in found]


def closed_forms(sweeps: Sequence[Sweep]) -> dict[str, dict[str, float]]:
    """Return the accuracy of heads in closed form in percent, by network and method."""
    found: dict[str, dict[str, float]] = {}
    for sweep in sweeps:
        if sweep.keys == ["network", "method"]:
            for (network, method), row in sweep.rows().items():
                found.setdefault(network, {})[method] = 100 * row.mean_last.mean
    return found


def pretrained_section(sweeps: Sequence[Sweep], finding: Sequence[str]) -> list[str]:
    """Write the section, with the comment `finding`. Return nothing if there are no sweeps."""
    if not sweeps:
        return []
    introduction = (
        "CIFAR-10, from random weights and from weights that were trained on CIFAR-100, which has other classes. "
        "[docs/pretrained.md](docs/pretrained.md) explains the starts. The first table shows how much FedAvg loses "
        "from the mildest to the most severe skew, and the best method at the most severe skew. Cells that were not "
        "run are empty.\n"
    )
    results = start_results(sweeps)
    sections = ["## Pretrained starts\n", *finding, introduction]
    if results:
        sections += [_summary(results), f"![Accuracy over the skew, by start](results/{PICTURE})\n"]
    for sweep in sweeps:
        sections += sweep_section(sweep, f"### {sweep.path.stem}")
    return sections


def _summary(results: Sequence[StartResult]) -> str:
    betas = sorted({beta for result in results for beta in result.accuracy}, reverse=True)
    headings = ["network", "clients", "start", *(f"FedAvg, β {beta:g}" for beta in betas), "lost", "best", "gain"]
    lines = [headings, ["---"] * len(headings)]
    mild, severe = betas[0], betas[-1]
    for result in results:
        best, baseline = result.best(severe), result.baseline(severe)
        gain = None if best is None or baseline is None else result.accuracy[severe][best] - baseline
        shown = [*map(result.baseline, betas), result.points_lost(mild, severe)]
        numbers = [*map(_number, shown), best or "", _number(gain, "+.1f")]
        lines.append([result.network, result.federation, result.start, *numbers])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _number(value: float | None, form: str = ".1f") -> str:
    return "" if value is None else format(value, form)


def draw_pretrained(folder: str | Path) -> list[Path]:
    """Draw the picture of the section: accuracy over β, by network, federation and start.

    Starts with a single β are left out, because a line needs two points.
    """
    sweeps = [sweep for sweep in read_sweeps(folder) if is_pretrained(sweep)]
    results = [result for result in start_results(sweeps) if len(result.accuracy) > 1]
    path = Path(folder) / PICTURE
    if not results:
        return []
    _draw(results, closed_forms(sweeps), path)
    return [path]


def _draw(results: Sequence[StartResult], heads: Mapping[str, Mapping[str, float]], path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("the picture needs matplotlib: pip install 'fedskew[report]'") from error
    networks, federations = (list(dict.fromkeys(getattr(r, key) for r in results)) for key in ("network", "federation"))
    figure = Figure(figsize=(4.2 * len(federations), 3.1 * len(networks) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(networks), len(federations), squeeze=False, sharex=True, sharey="row")
    betas = sorted({beta for result in results for beta in result.accuracy})
    colours = {start: f"C{number}" for number, start in enumerate(dict.fromkeys(r.start for r in results))}
    for row, network in zip(axes, networks, strict=True):
        for axis, federation in zip(row, federations, strict=True):
            shown = [r for r in results if (r.network, r.federation) == (network, federation)]
            axis.set_visible(bool(shown))
            _panel(axis, shown, colours, heads.get(network, {}))
            axis.set_xticks(betas, [f"β {beta:g}" for beta in betas])
            axis.set_title(f"{network}, {federation}", fontsize=9)
        row[0].set_ylabel("accuracy %", fontsize=9)
    figure.suptitle("CIFAR-10: FedAvg (solid) and the best method (dotted)", fontsize=10)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=110)


def _panel(axis: Any, results: Sequence[StartResult], colours: Mapping[str, str], heads: Mapping[str, float]) -> None:
    """Draw FedAvg as a solid line, and the best method at each β as a dotted one, where it is known."""
    for result in results:
        betas, colour = sorted(result.accuracy), colours[result.start]
        with_baseline = [beta for beta in betas if result.baseline(beta) is not None]
        baseline = [result.baseline(beta) for beta in with_baseline]
        axis.plot(with_baseline, baseline, "o-", color=colour, label=result.start)
        best = {beta: result.accuracy[beta][name] for beta in betas if (name := result.best(beta)) is not None}
        axis.plot(list(best), list(best.values()), ":", color=colour)
    if heads:
        name = max(heads, key=heads.__getitem__)
        axis.axhline(heads[name], color="grey", linewidth=0.8)
        axis.annotate(
            f"{name}, one round", (0.45, heads[name]), xycoords=("axes fraction", "data"), fontsize=7, va="bottom"
        )
    axis.set_xscale("log")
    axis.minorticks_off()
    axis.grid(alpha=0.3)
