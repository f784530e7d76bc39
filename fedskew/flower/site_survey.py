"""What a site reports in a survey before training: label counts, and ranges and missing values of a table's columns.

A survey must not show single samples, so no number in it is exact:

- Label counts: a class of fewer than `hide_below` samples has the count 0. Other counts are rounded to a multiple of
  `round_to`.
- The largest label count: the server knows the site's number of samples, from which a hidden count could follow. So the
  largest count is replaced by the number of samples minus the other reported counts, rounded. With more than ten
  classes, it is not replaced, because the total says hardly anything about a single class. With several labels per
  sample, it is not replaced either, because the counts do not add up to the number of samples.
- Label counts with `epsilon`: the counts are neither hidden nor rounded, but have discrete Laplace noise, which makes
  them ε-private (Ghosh, Roughgarden and Sundararajan, "Universally utility-maximizing privacy mechanisms", SIAM J.
  Comput. 2012). Neighbouring datasets have the same number of samples and differ in one sample. The survey then reports
  nothing about columns, because noise on them would need a share of ε.
- A column of numbers: the survey has a low value, a median and a high value, but no minimum and maximum. About 5 % of
  the column's values, and never fewer than `hide_below`, lie at or below the low value. As many lie at or above the
  high value. All three are then rounded to multiples of a step, which is at least a tenth of the distance from low to
  high. A column of fewer than 4·`hide_below` values has none of the three.
- A column of categories: the survey names the categories with at least `hide_below` rows.
- Missing values of a column: the survey has their share. Their number is rounded to a multiple of `hide_below`, and the
  share to 1 %. The share is 0 if fewer than `hide_below` values are missing. It is 1 if at least `hide_below` values
  are missing and fewer than `hide_below` are present.

A site answers a survey only once for the same classes and columns. Otherwise, a server could average out the noise, or
compare two answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from fedskew.data.column_sums import SMALLEST_GROUP
from fedskew.data.federation import Federation
from fedskew.data.partitions.rule import IntArray
from fedskew.data.table_encoding import Numbers, RawTable, Strings
from fedskew.flower.secret_noise import draw_discrete_laplace

_TAIL = 0.05
"""The share of values at or below the low value, and of values at or above the high value."""
_FEW_CLASSES = 10
"""Up to this number of classes, the largest count is computed from the others."""
_STEPS = 10
"""The low and the high value are at most about this many steps apart."""


@dataclass(frozen=True)
class SurveyRules:
    """How a site hides single samples in its answer."""

    hide_below: int = SMALLEST_GROUP
    round_to: int = SMALLEST_GROUP
    epsilon: float | None = None
    """ε of the noise on label counts. None: counts are hidden and rounded, and have no noise."""


def describe_site(federation: Federation, raw: RawTable | None, rules: SurveyRules) -> dict[str, Any]:
    """Describe a site's training part. `raw` has the columns of a table before they are encoded."""
    counts = federation.label_counts[0]
    is_single = federation.dataset.task.name == "single-label"
    hide = hide_counts_given_total if is_single and len(counts) <= _FEW_CLASSES else hide_counts
    found = hide(counts, rules) if rules.epsilon is None else _add_noise(counts, rules.epsilon, is_single)
    columns = [] if raw is None or rules.epsilon is not None else describe_columns(raw, rules.hide_below)
    return {"label_counts": found, "columns": columns, "rules": asdict(rules)}


def hide_counts(counts: IntArray, rules: SurveyRules) -> list[int]:
    """Return the counts, rounded, and with 0 for small ones."""
    return [0 if count < rules.hide_below else _round(count, rules.round_to) for count in counts.tolist()]


def hide_counts_given_total(counts: IntArray, rules: SurveyRules) -> list[int]:
    """Return the counts as `hide_counts` does, but replace the largest one, so that no hidden count follows.

    The largest count is computed from the other reported counts and the total, the number of samples. The server knows
    all of these, so the largest count tells it nothing new. If no class has enough samples, all counts are 0.
    """
    found, largest = hide_counts(counts, rules), int(counts.argmax())
    others = [count for place, count in enumerate(found) if place != largest]
    if found[largest]:
        found[largest] = max(_round(int(counts.sum()) - sum(others), rules.round_to), *others)  # it stays the largest
    return found


def _round(count: int, step: int) -> int:
    return (count + step // 2) // step * step


def _add_noise(counts: IntArray, epsilon: float, is_single: bool) -> list[int]:
    """Return the counts with discrete Laplace noise, and 0 for negative results.

    If one sample is replaced by another, two counts change by one. With several labels per sample, all counts may
    change by one.
    """
    rate = Fraction(epsilon) / (min(2, len(counts)) if is_single else len(counts))
    return [max(0, count + draw_discrete_laplace(rate)) for count in counts.tolist()]


def describe_columns(table: RawTable, smallest: int) -> list[dict[str, Any]]:
    """Describe each column of a table."""
    place = {name: position for position, name in enumerate(table.number_names)}
    return [
        _describe_categories(name, table.strings[name], smallest)
        if name in table.strings
        else _describe_numbers(name, table.numbers[:, place[name]], smallest)
        for name in table.names
    ]


def _describe_numbers(name: str, column: Numbers, smallest: int) -> dict[str, Any]:
    values = np.sort(column[~np.isnan(column)])
    entry: dict[str, Any] = {"name": name, "kind": "number", "missing": _share_of_gaps(column, len(values), smallest)}
    outside = max(smallest, math.floor(_TAIL * len(values)))
    if len(values) < 4 * smallest:
        return entry | {"low": None, "median": None, "high": None}
    low, median, high = (float(values[position]) for position in (outside, len(values) // 2, len(values) - 1 - outside))
    step = _step(high - low, abs(median))
    multiples = (math.floor(low / step), round(median / step), math.ceil(high / step))
    return entry | dict(zip(("low", "median", "high"), (_plain(number * step) for number in multiples), strict=True))


def _step(distance: float, size: float) -> float:
    """Return the smallest step that is at least a tenth of the distance, and that is 1, 2 or 5 times a power of ten.

    If the distance is 0, the step is at least a tenth of `size` instead. If both are 0, it is 0.1.
    """
    target = (distance or size or 1.0) / _STEPS
    power = 10.0 ** math.floor(math.log10(target))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= target)


def _plain(number: float) -> float:
    """Remove the digits that a multiplication by a power of ten adds, as in 0.30000000000000004."""
    return float(f"{number:.10g}")


def _describe_categories(name: str, column: Strings, smallest: int) -> dict[str, Any]:
    present = column.codes[column.codes >= 0]
    counts = np.bincount(present, minlength=len(column.values))
    frequent = sorted(value for value, count in zip(column.values, counts, strict=True) if count >= smallest)
    missing = _share_of_gaps(column.codes, len(present), smallest)
    return {"name": name, "kind": "category", "missing": missing, "values": frequent}


def _share_of_gaps(column: Sequence[Any] | Numbers | IntArray, present: int, smallest: int) -> float:
    gaps = len(column) - present
    if gaps < smallest:
        return 0.0
    return 1.0 if present < smallest else round(min(_round(gaps, smallest), len(column)) / len(column), 2)
