"""The results of a comparison: JSON, and one Markdown table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from measure import Measurement

OURS = "fedskew"


@dataclass(frozen=True)
class Row:
    """A peer in one number format, measured several times."""

    peer: str
    precision: str
    repeats: list[Measurement]

    def fastest(self, figure: str) -> float | None:
        """The lowest value over the repeats. Other programs on the machine can only add to it."""
        values = [getattr(repeat, figure) for repeat in self.repeats]
        return None if None in values else min(values)

    @property
    def gpu_memory(self) -> float | None:
        return self.fastest("gpu_memory")


@dataclass
class Comparison:
    """Everything that `compare.py` writes."""

    machine: str
    date: str
    command: str
    device: str
    work: str
    rounds: int
    rows: list[Row] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Why a peer, or a peer in one number format, was not measured."""
    load: list[float] = field(default_factory=list)
    """The machine's load average, noted during the comparison."""

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {
            "rows": [
                {"peer": row.peer, "precision": row.precision, "repeats": [r.to_json() for r in row.repeats]}
                for row in self.rows
            ]
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Comparison:
        rows = [
            Row(row["peer"], row["precision"], [Measurement(**repeat) for repeat in row["repeats"]])
            for row in value["rows"]
        ]
        return cls(**(value | {"rows": rows}))


def markdown(comparison: Comparison) -> str:
    """The comparison as a page: where and how it was measured, the table, and what was left out."""
    lines = [
        f"# Peers: {comparison.work}, {comparison.rounds} rounds, {comparison.device}",
        "",
        f"{comparison.machine}; {comparison.date}; `{comparison.command}`. How it is measured: "
        f"[peers/README.md](peers/README.md).{_load(comparison)}",
        "",
        f"{_repeats(comparison)} “÷ same” divides by fedskew's figure in the same number format. “÷ best” divides "
        "the peer's fastest format by fedskew's fastest. Values above 1 mean that fedskew is better.",
        "",
        *_table(comparison),
    ]
    if comparison.skipped:
        lines += ["", "Not measured:", "", *(f"- {reason}" for reason in comparison.skipped)]
    return "\n".join(lines) + "\n"


def _repeats(comparison: Comparison) -> str:
    """Say how each figure follows from the runs."""
    repeats = max((len(row.repeats) for row in comparison.rows), default=0)
    if repeats < 2:
        return "Each figure is from one run."
    return (
        f"The runs are interleaved. Each figure is the lowest of {repeats} runs, or of fewer if one took more than a "
        "minute."
    )


def _load(comparison: Comparison) -> str:
    if not comparison.load:
        return ""
    least, most = min(comparison.load), max(comparison.load)
    return (
        f" The load average was {least:.1f} to {most:.1f}. "
        "If it is above the number of cores, only CPU seconds can be compared."
    )


def _table(comparison: Comparison) -> Iterator[str]:
    has_gpu = any(row.gpu_memory is not None for row in comparison.rows)
    heads = [
        "", "version", "format", "s per round", "÷ same", "÷ best", "CPU s per round", "÷ same",
        "start-up, s", "÷ same", "start-up, CPU s", "÷ same", f"{comparison.rounds} rounds, s", "÷ same", "host MB",
    ]  # fmt: skip
    yield _line([*heads, "GPU MB"] if has_gpu else heads)
    yield _line(["---"] * (len(heads) + has_gpu))
    for row in comparison.rows:
        same = _find(comparison.rows, OURS, row.precision)
        cells = [
            row.peer,
            row.repeats[0].version,
            row.precision,
            _seconds(row.fastest("seconds_per_round")),
            _ratio(row, same, "seconds_per_round"),
            _best_ratio(comparison.rows, row),
            _seconds(row.fastest("cpu_per_round")),
            _ratio(row, same, "cpu_per_round"),
            _seconds(row.fastest("start_up")),
            _ratio(row, same, "start_up"),
            _seconds(row.fastest("start_up_cpu")),
            _ratio(row, same, "start_up_cpu"),
            _seconds(row.fastest("whole_run")),
            _ratio(row, same, "whole_run"),
            _whole(row.fastest("host_memory")),
        ]
        yield _line([*cells, _whole(row.gpu_memory)] if has_gpu else cells)


def _find(rows: Iterable[Row], peer: str, precision: str) -> Row | None:
    return next((row for row in rows if (row.peer, row.precision) == (peer, precision)), None)


def _ratio(row: Row, ours: Row | None, figure: str) -> str:
    theirs, reference = row.fastest(figure), ours.fastest(figure) if ours else None
    return f"{theirs / reference:.2f}" if theirs and reference else ""


def _best_ratio(rows: Sequence[Row], row: Row) -> str:
    """The peer's fastest format divided by fedskew's fastest, in the peer's fastest row only."""

    def best(peer: str) -> float | None:
        return min((v for r in rows if r.peer == peer and (v := r.fastest("seconds_per_round"))), default=None)

    theirs, ours = best(row.peer), best(OURS)
    is_fastest_row = theirs is not None and row.fastest("seconds_per_round") == theirs
    return f"{theirs / ours:.2f}" if is_fastest_row and theirs and ours else ""


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _whole(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
