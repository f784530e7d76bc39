"""The kinds of charts.

Each chart can describe itself in words (`alt`), for readers who cannot see it, and list its values (`table`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedskew.report.charts.table import Cell, Table

Values = Sequence[float | None]
MAX_LISTED = 12
"""The maximum number of items in a list of a description."""


@dataclass(frozen=True)
class Chart(ABC):
    """The base class of charts. `key` names the chart and its table on a page."""

    key: str
    title: str

    @abstractmethod
    def alt(self) -> str:
        """Describe the chart in words."""

    @abstractmethod
    def table(self) -> Table:
        """The chart's values as a table."""


@dataclass(frozen=True)
class Line:
    """A curve. If it is the mean of several runs, a band spans their values from lowest to highest."""

    name: str
    x: Sequence[float]
    y: Values
    low: Values | None = None
    high: Values | None = None
    style: int = 0
    """Index of colour, dash and marker. A method has the same index in all chapters of a report."""


@dataclass(frozen=True)
class Lines(Chart):
    """Curves over a common axis."""

    x_label: str
    y_label: str
    lines: Sequence[Line]
    y_range: tuple[float, float] | None = None
    thin: bool = False
    """Whether to draw thin curves without a legend, because there are many."""

    def alt(self) -> str:
        ends = []
        for line in self.lines:
            known = [(x, y) for x, y in zip(line.x, line.y, strict=True) if y is not None]
            if known:
                (x0, y0), (x1, y1) = known[0], known[-1]
                ends.append(f"{line.name} goes from {y0:.4g} at {x0:g} to {y1:.4g} at {x1:g}")
        return f"Line chart: {self.y_label} over {self.x_label}. {_join_some(ends)}."

    def table(self) -> Table:
        has_bands = any(line.low is not None for line in self.lines)
        rows: list[list[Cell]] = []
        for line in self.lines:
            empty: Values = [None] * len(line.x)
            for x, y, low, high in zip(line.x, line.y, line.low or empty, line.high or empty, strict=True):
                rows.append([line.name, x, y, low, high] if has_bands else [line.name, x, y])
        columns = ["series", self.x_label, self.y_label, *(["lowest", "highest"] if has_bands else [])]
        return Table(self.key, self.title, columns, rows)


@dataclass(frozen=True)
class BarSeries:
    """The bars of one series: one bar in every category, or none where the value is None."""

    name: str
    values: Values
    errors: Values | None = None
    """How far the error bars reach up and down, such as a standard deviation."""
    style: int = 0


@dataclass(frozen=True)
class Bars(Chart):
    """Categories, each with one bar per series."""

    category_label: str
    value_label: str
    categories: Sequence[str]
    series: Sequence[BarSeries]
    value_range: tuple[float, float] | None = None
    stacked: bool = False

    def alt(self) -> str:
        parts = []
        for one in self.series:
            pairs = [f"{c} {v:.4g}" for c, v in zip(self.categories, one.values, strict=True) if v is not None]
            parts.append(f"{one.name}: {_join_some(pairs, ', ')}")
        return f"Bar chart: {self.value_label} by {self.category_label}. {_join_some(parts)}."

    def table(self) -> Table:
        has_errors = any(one.errors is not None for one in self.series)
        columns, body = [self.category_label], [list(self.categories)]
        for one in self.series:
            columns.append(one.name)
            body.append(list(one.values))  # type: ignore[arg-type]
            if has_errors:
                columns.append(f"± {one.name}")
                body.append(list(one.errors or [None] * len(self.categories)))  # type: ignore[arg-type]
        return Table(self.key, self.title, columns, list(zip(*body, strict=True)))


Scale = Literal["amount", "share", "difference"]
"""Colour scales: amounts from zero, shares from 0 to 100 %, differences around zero."""


@dataclass(frozen=True)
class Heat(Chart):
    """Values by row and column, shown as colours or as bubbles."""

    row_label: str
    column_label: str
    value_label: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Values]
    scale: Scale = "amount"
    bubbles: bool = False
    show_numbers: bool = False
    """Whether the cells show their numbers."""
    top: float | None = None
    """Upper end of the colour scale, if several heat maps share one."""

    def alt(self) -> str:
        cells = [
            (value, self.rows[r], self.columns[c])
            for r, row in enumerate(self.values)
            for c, value in enumerate(row)
            if value is not None
        ]
        subject = f"{self.value_label} by {self.row_label} and {self.column_label}"
        text = f"Heat map of {len(self.rows)} × {len(self.columns)}: {subject}"
        if not cells:
            return f"{text}; empty."
        (low, *at_low), (high, *at_high) = min(cells), max(cells)
        return f"{text}. Lowest {low:.4g} at {', '.join(at_low)}; highest {high:.4g} at {', '.join(at_high)}."

    def table(self) -> Table:
        heading = f"{self.row_label} \\ {self.column_label}"
        rows = [[name, *row] for name, row in zip(self.rows, self.values, strict=True)]
        return Table(self.key, self.title, [heading, *self.columns], rows)


@dataclass(frozen=True)
class Cloud:
    """A group of points."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    style: int = 0


@dataclass(frozen=True)
class Points(Chart):
    """Groups of points in the plane, such as a t-SNE. The axes have no labels."""

    clouds: Sequence[Cloud]

    def alt(self) -> str:
        sizes = [f"{cloud.name} {len(cloud.x)}" for cloud in self.clouds]
        return f"Scatter plot of {sum(len(c.x) for c in self.clouds)} samples by class: {_join_some(sizes, ', ')}."

    def table(self) -> Table:
        rows: list[list[Cell]] = [[c.name, x, y] for c in self.clouds for x, y in zip(c.x, c.y, strict=True)]
        return Table(self.key, self.title, ["class", "x", "y"], rows)


@dataclass(frozen=True)
class Figure:
    """Charts that belong together. They share a block of the page, and a file if the figure is saved."""

    key: str
    caption: str
    charts: Sequence[Chart]
    columns: int = 1
    wide: bool = False
    """Whether the figure takes the full page width even with a single column."""


def _join_some(parts: Sequence[str], join: str = "; ") -> str:
    if not parts:
        return "no values"
    more = f"{join}and {len(parts) - MAX_LISTED} more" if len(parts) > MAX_LISTED else ""
    return join.join(parts[:MAX_LISTED]) + more
