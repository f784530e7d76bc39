"""Fit the encoding of tables to column sums. The server requests these sums from the sites before the first round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedskew.data.column_sums import CategorySums, ColumnSums, NumberSums, find_other_units, fit_encoding_to_sums
from fedskew.data.table_encoding import ColumnEncoding, TableEncoding
from fedskew.errors import UserError
from fedskew.flower.contract import Contract
from fedskew.flower.settings import FederationSettings
from fedskew.flower.site_replies import Failure, Reply
from fedskew.flower.sites import Sites
from fedskew.flower.wire import Facts, Garbled, is_count

_MAX_CATEGORIES = 10_000
"""The maximum number of categories per column that a site may report."""
_LONGEST_CATEGORY = 1_000
"""The maximum number of characters in a category."""
_LARGEST_MOMENT = 1e150
"""The largest mean that a site may report. The square of this number is the largest sum of squares that it may report.
Without these limits, a square could overflow, and so one site could end the run."""
_NUMBER_FIELDS = {"name", "count", "missing", "mean", "correction", "squares"}
_CATEGORY_FIELDS = {"name", "categories", "has_gaps"}


@dataclass(frozen=True)
class FittedEncoding:
    """An encoding, and the names of the sites whose sums it was fitted to."""

    encoding: TableEncoding
    sites: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"columns": self.encoding.to_json(), "sites": list(self.sites)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> FittedEncoding:
        return cls(TableEncoding.from_json(value["columns"]), tuple(map(str, value["sites"])))


def fit_at_sites(sites: Sites, draft: Contract, settings: FederationSettings) -> FittedEncoding:
    """Ask the connected sites for their sums, and fit the encoding. A site that declines can still train.

    `draft` is the app's contract, whose encoding is not fitted yet.
    """
    assert draft.encoding is not None
    sites.wait_for(settings.begin_with or settings.required_sites)
    sites.wait_for_greetings(settings.grace_seconds)
    answers = sites.request("column_sums", {client: {} for client in sites.online}, b"", settings.round_timeout)
    received: dict[str, tuple[ColumnSums, ...]] = {}
    problems: dict[str, str] = {}
    for client, answer in sorted(answers.items(), key=lambda item: sites.names[item[0]]):  # messages list sites by name
        name = sites.names[client]
        try:
            received[name] = read_sums(answer, draft.encoding, settings.most_samples)
        except Garbled as problem:
            problems[name] = str(problem)
            sites.log(f"no usable column sums from {name}: {problem}")
    if len(received) < settings.required_sites:
        reasons = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        raise UserError(
            f"{len(received)} of {settings.required_sites} required sites sent usable column sums ({reasons}); "
            "expected more, or an encoding from a file (init --encoding without --column-sums)"
        )
    for warning in find_other_units(received):
        sites.log(f"warning: {warning}")
    sites.log(f"the encoding is fitted to the column sums of {', '.join(received)}")
    return FittedEncoding(fit_encoding_to_sums(list(received.values())), tuple(received))


def read_sums(answer: Reply | Failure, draft: TableEncoding, most_samples: int) -> tuple[ColumnSums, ...]:
    """Read the sums in a site's reply. Raise `Garbled` if they are not possible sums of the draft's columns."""
    if isinstance(answer, Failure):
        raise Garbled(answer.reason)
    columns = answer.facts.get("columns")
    if not isinstance(columns, list) or len(columns) != len(draft.columns):
        raise Garbled(f"it does not report {len(draft.columns)} columns")
    return tuple(_read_column(found, like, most_samples) for found, like in zip(columns, draft.columns, strict=True))


def _read_column(found: Any, column: ColumnEncoding, most_samples: int) -> ColumnSums:
    expected = _NUMBER_FIELDS if column.categories is None else _CATEGORY_FIELDS
    if not isinstance(found, dict) or found.keys() != expected or found["name"] != column.name:
        raise Garbled(f"its sums of column {column.name!r} do not have the expected form")
    if column.categories is not None:
        return _read_categories(found)
    counts, moments = [found["count"], found["missing"]], [found["mean"], found["correction"], found["squares"]]
    if not all(map(is_count, counts)) or sum(counts) > most_samples:
        raise Garbled(f"its counts of column {column.name!r} are impossible")
    if not all(isinstance(value, float) and math.isfinite(value) for value in moments) or not _are_possible(*moments):
        raise Garbled(f"its moments of column {column.name!r} are impossible")
    return NumberSums(**found)


def _are_possible(mean: float, correction: float, squares: float) -> bool:
    return max(abs(mean), abs(correction)) <= _LARGEST_MOMENT and 0 <= squares <= _LARGEST_MOMENT**2


def _read_categories(found: Facts) -> CategorySums:
    values = found["categories"]
    are_texts = isinstance(values, list) and all(isinstance(v, str) and len(v) <= _LONGEST_CATEGORY for v in values)
    if not are_texts or len(values) > _MAX_CATEGORIES or not isinstance(found["has_gaps"], bool):
        raise Garbled(f"its categories of column {found['name']!r} are impossible")
    return CategorySums(found["name"], tuple(values), found["has_gaps"])
