"""The map of a federation: the samples of each client by class, for the terminal, as a figure or as a CSV table."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from fedskew.data.federation import Federation
from fedskew.data.partitions.rule import IntArray
from fedskew.errors import UserError, plural
from fedskew.report.charts.matplotlib_text import escape_math

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable

SHADES = " ░▒▓█"
"""A blank for no samples, then darker shades for more samples."""
ASCII_SHADES = " .:*#"
COLOURS = ("", "color(24)", "color(31)", "color(38)", "bold color(45)")
"""The colour of each shade."""
LEVELS = len(SHADES) - 1
"""The number of shades besides the blank."""
NAME_WIDTH = 12
"""Longer names are cut."""
MAX_LINES = 120
"""A map with more lines is cropped, and a note says so."""
HEADING_LINES = 2
"""The assumed height of a panel's heading. A heading of numbers has one line per digit."""
BUBBLES_UP_TO = 30
"""A figure shows bubbles up to this number of clients and of classes, otherwise a heat map."""


@dataclass(frozen=True)
class PartitionMap:
    """Renders the map in a terminal. Shades show the counts. A blank cell has no samples.

    The longer axis, clients or classes, runs across, in as many panels as the terminal's width requires. If there is
    room, counts are printed instead of shades.
    """

    federation: Federation

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        fed = self.federation
        unused = f"; {plural(fed.unused, 'sample')} unused" if fed.unused else ""
        yield CountsMap(fed.label_counts, fed.client_labels, fed.dataset.classes, f"{unused}; split {fed.hash[:12]}")


@dataclass(frozen=True, eq=False)
class CountsMap:
    """Renders a map of counts. `note` is added to the legend."""

    counts: IntArray
    clients: Sequence[str]
    classes: Sequence[str]
    note: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        grid = _Grid.arrange(self.counts, self.clients, self.classes)
        shades = ASCII_SHADES if options.ascii_only else SHADES
        yield from grid.render(options.max_width, shades)
        legend = "numbers are samples" if grid.writes_counts(options.max_width) else _legend(grid.largest, shades)
        yield Text(f"blank: none; {legend}{self.note}", style="dim")


@dataclass(frozen=True, eq=False)
class _Grid:
    """The map with its axes chosen: `rows` run down, `columns` across."""

    counts: IntArray
    rows: Sequence[str]
    columns: Sequence[str]
    across_kind: str
    """What the columns are: `client` or `class`."""

    @classmethod
    def arrange(cls, counts: IntArray, clients: Sequence[str], classes: Sequence[str]) -> _Grid:
        if len(clients) > len(classes):
            numbered = [f"{c} {name}" if name != str(c) else f"class {c}" for c, name in enumerate(classes)]
            return cls(counts.T, numbered, clients, "client")
        have_no_names = all(name == str(k) for k, name in enumerate(clients))
        return cls(counts, [f"client {k}" for k in clients] if have_no_names else clients, classes, "class")

    @cached_property
    def largest(self) -> int:
        return int(self.counts.max())

    @property
    def digits(self) -> int:
        return len(str(self.largest))

    @cached_property
    def margin(self) -> int:
        """The width of the names of the rows, and a space."""
        return min(NAME_WIDTH, max(map(len, [*self.rows, self.across_kind]))) + 1

    def writes_counts(self, width: int) -> bool:
        """Whether the counts of a whole row fit in one line."""
        return len(self.columns) * (self.digits + 1) <= width - self.margin

    def render(self, width: int, shades: str) -> RenderResult:
        across, room = len(self.columns), max(1, width - self.margin)
        if self.writes_counts(width):
            cell = min(NAME_WIDTH, room // across)
        else:
            cell = max(1, min(3, self.digits, room // across))
        per_panel = max(1, room // cell)
        shown_rows = min(len(self.rows), MAX_LINES - HEADING_LINES)
        panels = max(1, MAX_LINES // (shown_rows + HEADING_LINES))
        for start in range(0, min(across, panels * per_panel), per_panel):
            shown = range(start, min(start + per_panel, across))
            yield from self._heading(shown, cell)
            for row in range(shown_rows):
                yield self._line(row, shown, cell, shades)
        hidden = {"client": 0, "class": 0}
        hidden[self.across_kind] = max(0, across - panels * per_panel)
        hidden["class" if self.across_kind == "client" else "client"] = len(self.rows) - shown_rows
        for kind, number in hidden.items():
            if number:
                yield Text(f"... and {number} more {'clients' if kind == 'client' else 'classes'}", style="dim")

    def _heading(self, shown: range, cell: int) -> list[Text]:
        """Label the columns with names if there is room, otherwise with numbers, one digit per line."""
        if cell > 3:
            names = "".join(f" {self.columns[c][: cell - 1]:>{cell - 1}}" for c in shown)
            return [Text(self.across_kind.ljust(self.margin) + names, style="bold")]
        lines, height = [], len(str(shown.stop - 1))
        for place in range(height):
            numbers = "".join(str(c).rjust(height)[place].ljust(cell) for c in shown)
            kind = self.across_kind if place == height - 1 else ""
            lines.append(Text(kind.ljust(self.margin) + numbers, style="bold"))
        return lines

    def _line(self, row: int, shown: range, cell: int, shades: str) -> Text:
        line = Text(self.rows[row][:NAME_WIDTH].ljust(self.margin), no_wrap=True)
        for count in self.counts[row, shown.start : shown.stop].tolist():
            level = _level(count, self.largest)
            written = str(count) if count else ""
            text = written.rjust(cell) if cell > self.digits else shades[level] * cell
            line.append(text, style=COLOURS[level])
        return line


def _level(count: int, largest: int) -> int:
    """The shade of a count. It grows with the square root, so that small counts stay visible. Only 0 has shade 0."""
    return int(np.ceil(LEVELS * np.sqrt(count / largest))) if largest else 0


def _legend(largest: int, shades: str) -> str:
    """The legend: the largest count of each shade."""
    tops = [largest * level**2 // LEVELS**2 for level in range(LEVELS + 1)]
    used = [level for level in range(1, LEVELS + 1) if tops[level] > tops[level - 1]]
    return ", ".join(f"{shades[level]} up to {tops[level]}" for level in used)


def class_table(fed: Federation, max_clients: int | None = None) -> Table:
    """List the samples of each client, and its vacant, minority and majority classes. Also list its domain, if any.

    `max_clients` limits the number of clients listed.
    """
    table = Table(title="majority: more than an even share (samples / classes); minority: at most that; vacant: none")
    table.add_column("client", justify="left" if fed.client_names else "right")
    table.add_column("samples", justify="right")
    for heading in (*(("domain",) if fed.domains else ()), "vacant", "minority", "majority"):
        table.add_column(heading)
    for k, name in enumerate(fed.client_labels[:max_clients]):
        groups = (fed.vacant(k), fed.minority(k), fed.majority(k))
        listed = (_listed(group, fed.dataset.classes) for group in groups)
        table.add_row(name, str(fed.sizes[k]), *fed.domains[k : k + 1], *listed)
    return table


def _listed(group: Sequence[int], names: Sequence[str]) -> str:
    """List class names. If there are many classes, list their numbers as ranges."""
    if len(names) <= 20:
        return ", ".join(names[c] for c in group) or "-"
    ranges: list[list[int]] = []
    for c in group:
        if ranges and c == ranges[-1][1] + 1:
            ranges[-1][1] = c
        else:
            ranges.append([c, c])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges) or "-"


def save_map(fed: Federation, path: str | os.PathLike[str]) -> None:
    """Save the map as a figure (.png, .svg, .pdf), or its counts as .csv, which the partition `counts` reads."""
    target = Path(path)
    kind = target.suffix.lower()
    if kind not in (".png", ".svg", ".pdf", ".csv"):
        raise UserError(f"cannot save a partition map as {str(path)!r}; expected .png, .svg, .pdf or .csv")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if kind == ".csv":
            _save_counts(fed, target)
        else:
            _save_picture(fed, target)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


def _save_counts(fed: Federation, target: Path) -> None:
    with target.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["client", *fed.dataset.classes])
        rows = zip(fed.client_labels, fed.label_counts.tolist(), strict=True)
        writer.writerows([name, *counts] for name, counts in rows)


def _save_picture(fed: Federation, target: Path) -> None:
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("pictures need matplotlib: install fedskew[report]") from error
    width = min(16.0, 3.0 + 0.4 * max(fed.clients, 10))
    height = min(12.0, 2.0 + 0.35 * max(fed.classes, 8))
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw_map(fed, axes)
    metadata = {"Date": None} if target.suffix.lower() == ".svg" else {}  # without a date, the file is reproducible
    with matplotlib.rc_context({"svg.hashsalt": "fedskew"}):
        figure.savefig(target, dpi=150, metadata=metadata)


def draw_map(fed: Federation, axes: Axes) -> None:
    """Draw the map as in the papers, with clients across and classes up. Few clients and classes get bubbles."""
    marks: ScalarMappable
    if max(fed.clients, fed.classes) <= BUBBLES_UP_TO:
        client, label = np.nonzero(fed.label_counts)
        counts = fed.label_counts[client, label].astype(np.float64)
        area = 500.0 * counts / counts.max(initial=1) * min(1.0, 10 / max(fed.clients, fed.classes)) + 2
        marks = axes.scatter(client, label, s=area, c=counts, cmap="viridis_r", vmin=0)
        axes.set_xlim(-0.7, fed.clients - 0.3)
        axes.set_ylim(-0.7, fed.classes - 0.3)
    else:
        cells = np.ma.masked_equal(fed.label_counts.T, 0)
        marks = axes.imshow(cells, aspect="auto", origin="lower", cmap="viridis_r", interpolation="none", vmin=0)
    axes.figure.colorbar(marks, ax=axes, label="samples")
    axes.set_xlabel("client")
    axes.set_ylabel("class")
    axes.set_title(_title(fed))
    if fed.clients <= BUBBLES_UP_TO:
        labels = [escape_math(name) for name in fed.client_labels]
        axes.set_xticks(range(fed.clients), labels=labels, rotation=45 if fed.client_names else 0)
    if fed.classes <= BUBBLES_UP_TO:
        axes.set_yticks(range(fed.classes), labels=[escape_math(name) for name in fed.dataset.classes])


def _title(fed: Federation) -> str:
    rule = ", ".join(f"{key}={value}" for key, value in fed.partition.items() if key != "name")
    return escape_math(f"{fed.dataset.name}: {fed.partition['name']} ({rule}), seed {fed.seed}")
