"""Write the table and the figure of `fedskew results` about vacant classes, from what measure.py has recorded.

python tools/vacant_logits/page.py
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from contact import NAMES, NEVER, OFTEN
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from measure import CLIENTS, RECORDS, STAGES, all_runs, read_records

from fedskew.metrics.summary import MeanStd, population_mean_std
from fedskew.report.charts.palette import colour

LAST = 3
"""All numbers are means over so many last measurements."""
SPLIT_NAMES = {
    "shards": "two shards", "ring": "40 clients, 10 pairs", "all-pairs": "40 clients, 40 pairs", "0.05": "β 0.05",
    "0.1": "β 0.1",
}  # fmt: skip

Seeds = Sequence[Mapping[str, Any]]
"""The records of one method on one federation, one per seed."""
Setting = tuple[str, str, int, str]
"""Dataset, split, clients per round and method."""


def records_by_setting() -> dict[Setting, Seeds]:
    known, found = read_records(), dict[Setting, list[Mapping[str, Any]]]()
    for run in all_runs():
        if run in known:
            found.setdefault((run.dataset, run.split, run.per_round, run.method), []).append(known[run])
    return dict(found)


# -- means ------------------------------------------------------------------------------------------------------------


def accuracy(records: Seeds) -> MeanStd | None:
    return over_seeds(mean_of_last(m["accuracy"] for m in r["measured"]) for r in records)


def errors(records: Seeds, group: int) -> MeanStd | None:
    """The percentage of test samples taken for another class of this group. None if no split has such pairs."""
    if not any(r["pairs"][group] for r in records):
        return None
    return over_seeds(mean_of_last(m["errors"][group] for m in r["measured"]) for r in records)


def log_odds(records: Seeds, stage: str, group: int) -> MeanStd | None:
    return over_seeds(mean_of_last(m["log_odds"][stage][group] for m in r["measured"]) for r in records)


def mean_of_last(values: Iterable[float | None]) -> float | None:
    """The mean of the last measurements. None if none of them has a value."""
    known = [value for value in list(values)[-LAST:] if value is not None]
    return float(np.mean(known)) if known else None


def over_seeds(values: Iterable[float | None]) -> MeanStd | None:
    """Mean and deviation over the splits that have such pairs. None if there are none."""
    known = [value for value in values if value is not None]
    return population_mean_std(known) if known else None


# -- the table --------------------------------------------------------------------------------------------------------


def table(found: Mapping[Setting, Seeds]) -> str:
    headings = (
        "federation", "clients per round", "method", "accuracy", *(f"errors: {name}" for name in NAMES),
        "log-odds, never meet: received → trained → aggregated", "log-odds, often meet", "splits",
    )  # fmt: skip
    lines = [f"| {' | '.join(headings)} |", "|" + " --- |" * len(headings)]
    for (dataset, split, per_round, method), records in found.items():
        cells = (
            f"{dataset}, {SPLIT_NAMES[split]}", "all" if per_round == CLIENTS else f"{per_round} of {CLIENTS}", method,
            shown(accuracy(records)), *(shown(errors(records, group)) for group in range(len(NAMES))),
            *(" → ".join(shown(log_odds(records, stage, group)) for stage in STAGES) for group in (NEVER, OFTEN)),
            str(len(records)),
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", numbers_of_pairs(found)]) + "\n"


def numbers_of_pairs(found: Mapping[Setting, Seeds]) -> str:
    """Say how many pairs of classes never, rarely and often meet in each federation."""
    by_federation = {setting[:2]: records for setting, records in found.items()}
    means = {place: np.mean([r["pairs"] for r in records], axis=0) for place, records in by_federation.items()}
    words = [
        f"{', '.join(f'{number:.0f}' for number in means[dataset, split])} ({dataset}, {SPLIT_NAMES[split]})"
        for dataset, split in by_federation
    ]
    return f"Pairs of classes that never, rarely and often meet, of 45, mean over the splits: {'; '.join(words)}."


def shown(value: MeanStd | None) -> str:
    return "–" if value is None else f"{value.mean:.1f} ± {value.std:.1f}"


# -- the figure -------------------------------------------------------------------------------------------------------

LINES = ("FedAvg", "FedRS", "FedLMD", "FedVLS")
MARKERS = ("X", "s", "^", "o")
BARS = {
    "10 clients, 8 pairs of classes meet": ("shards", LINES),
    "40 clients, 10 pairs meet": ("ring", ("FedAvg", "FedVLS")),
    "40 clients, 40 pairs meet": ("all-pairs", ("FedAvg", "FedVLS")),
}
"""Federations with two classes per client."""


def draw(found: Mapping[Setting, Seeds]) -> Figure:
    """Draw what clients with two classes of MNIST learn about vacant classes, and the errors of the global model."""
    figure = Figure(figsize=(11.5, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.35))
    draw_log_odds(left, {method: found["mnist", "shards", CLIENTS, method] for method in LINES})
    draw_errors(right, found)
    return figure


def draw_log_odds(axes: Any, found: Mapping[str, Seeds]) -> None:
    for style, (method, records) in enumerate(found.items()):
        values = [value for stage in STAGES if (value := log_odds(records, stage, NEVER)) is not None]
        axes.errorbar(
            range(len(values)), [v.mean for v in values], [v.std for v in values], capsize=3, linewidth=2,
            color="black" if method == "FedAvg" else colour(style - 1), marker=MARKERS[style], label=method,
        )  # fmt: skip
    axes.set_xticks(range(3), ["in the received\nmodel", "after local\ntraining", "after\naveraging"])
    axes.set_xlim(-0.25, 2.25)
    axes.set_ylabel("log p(own class) − log p(vacant class)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    axes.set_title("What clients learn about classes that they lack", fontsize=11)


def draw_errors(axes: Any, found: Mapping[Setting, Seeds]) -> None:
    place, ticks, legend = 0.0, dict[float, str](), []
    for heading, (split, methods) in BARS.items():
        axes.text(0.8, place, heading, va="center", fontsize=9, style="italic")
        for method in methods:
            place += 1
            legend = draw_bar(axes, place, found["mnist", split, CLIENTS, method])
            ticks[place] = method
        place += 1.2
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.set_ylim(place - 0.3, -0.6)
    axes.set_xlim(0, 80)
    axes.set_xlabel("test images taken for another class, %")
    axes.legend(legend, ["classes that meet on a client", "classes that never meet"], fontsize=9, loc="lower right")
    axes.set_title("Which classes the global model confuses", fontsize=11)


def draw_bar(axes: Any, place: float, records: Seeds) -> list[Any]:
    """Draw the errors of a method, and return the two parts of the bar."""
    never, often = errors(records, NEVER), errors(records, OFTEN)
    assert never is not None
    assert often is not None
    first = axes.barh(place, often.mean, color=colour(0))
    second = axes.barh(place, never.mean, left=often.mean, xerr=never.std, capsize=3, color=colour(1))
    end = often.mean + never.mean + never.std + 1
    axes.text(end, place, f"{often.mean:.1f} + {never.mean:.1f}", va="center", fontsize=9)
    return [first, second]


def main() -> None:
    found = records_by_setting()
    (RECORDS.parent / "table.md").write_text(table(found), encoding="utf-8")
    draw(found).savefig(RECORDS.parent / "figure.png", dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    main()
