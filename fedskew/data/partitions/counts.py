"""A split with the label counts in a user's CSV file or folder of histograms."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fedskew.data.dataset import Dataset, keep_classes
from fedskew.data.partitions.rule import Arrangement, CountedPartition, IntArray, Labels, check_path, register
from fedskew.errors import UserError, unknown

if TYPE_CHECKING:
    from fedskew.data.label_counts import LabelCounts


@register
@dataclass(frozen=True)
class Counts(CountedPartition):
    """The counts in a CSV file, with one row per client and one column per class.

    `path` may also be a folder with one histogram per client. A header with class names and a first column with client
    names are optional. If the data has too few samples, all counts are scaled down. Samples beyond the counts are not
    used.

    Columns are matched to classes by name, in any order. If one column has the name of a class, all columns must. If
    none has, the first column is the first class, and so on. Classes without a column are left out. If there are more
    columns than classes, several columns share a class.
    """

    name: ClassVar[str] = "counts"
    uses_all: ClassVar[bool] = False
    path: str | os.PathLike[str]

    def __post_init__(self) -> None:
        check_path("path", self.path)

    def arrange(self, dataset: Dataset) -> Arrangement:
        """Leave out classes without a column. Take the names of classes and clients from the file, if it has them."""
        if dataset.train.y.ndim > 1:
            raise self.error("a sample with several labels has no single class to count; expected another rule")
        table = self._read(dataset.classes)
        sizes = np.bincount(dataset.train.y, minlength=len(dataset.classes)).astype(np.int64)
        column_class = self._column_classes(table, dataset.classes)
        _, factor = _scaled(_by_class(table.counts, column_class, len(dataset.classes)), sizes)
        notes = [*table.notes, *_mapping_notes(self.path, table, column_class, dataset)]
        if factor < 1:
            notes.append(f"{self.path}: counts scaled by {factor:.3g}, because {dataset.name} has fewer samples")
        names = table.clients if table.names_clients else ()
        return Arrangement(_arranged(dataset, table, column_class), names, tuple(notes))

    def counts(self, labels: Labels, seed: int) -> IntArray:  # noqa: ARG002 - the counts are not random
        table = self._read(labels.names)
        requested = _by_class(table.counts, self._column_classes(table, labels.names), labels.classes)
        self.require_samples((requested > 0).sum(axis=0), labels.class_sizes, labels)
        return _scaled(requested, labels.class_sizes)[0]

    def _read(self, classes: Sequence[str]) -> LabelCounts:
        from fedskew.data.label_counts import read_counts

        if not Path(self.path).exists():
            raise UserError(
                f"cannot read {self.path}: No such file; expected a CSV file of counts, or a folder of histograms"
            )
        try:
            return read_counts(self.path, classes)
        except UserError as error:
            where = "" if str(self.path) in str(error) else f"{self.path}: "
            raise UserError(f"{where}{error}") from error

    def _column_classes(self, table: LabelCounts, classes: Sequence[str]) -> list[int]:
        """Return the class index of each column of the table."""
        by_lower_case = {name.lower(): c for c, name in enumerate(classes)}
        by_name = {name: c for c, name in enumerate(classes)}  # FEMNIST has the classes A and a
        found = [by_name.get(name, by_lower_case.get(name.lower())) for name in table.classes]
        if table.names_classes and any(c is not None for c in found):
            for name, c in zip(table.classes, found, strict=True):
                if c is None:
                    raise unknown(f"class in {self.path}:", name, classes)
            return [c for c in found if c is not None]
        if not table.names_classes and not table.names_clients and len(table.classes) == len(classes) + 1:
            raise UserError(
                f"{self.path}: {len(table.classes)} columns of counts; expected {len(classes)}, or a header if the "
                "first column numbers the clients"
            )
        return [column % len(classes) for column in range(len(table.classes))]


def _by_class(counts: IntArray, column_class: Sequence[int], classes: int) -> IntArray:
    """Sum the columns that belong to the same class. The result has shape [clients, classes]."""
    total = np.zeros((len(counts), classes), np.int64)
    for column, c in enumerate(column_class):
        total[:, c] += counts[:, column]
    return total


def _scaled(counts: IntArray, available: IntArray) -> tuple[IntArray, float]:
    """Scale the counts down to the available samples, and return the factor, too. Nonzero counts stay ≥ 1."""
    needed = counts.sum(axis=0)
    over = needed > available
    if not over.any():
        return counts, 1.0
    factor = float((available[over] / needed[over]).min())
    scaled = np.where(counts > 0, np.maximum(1, np.floor(counts * factor)), 0).astype(np.int64)
    for c in np.flatnonzero(scaled.sum(axis=0) > available):  # because small counts were rounded up to 1
        while scaled[:, c].sum() > available[c] and scaled[:, c].max() > 1:
            scaled[scaled[:, c].argmax(), c] -= 1
    return scaled, factor


def _arranged(dataset: Dataset, table: LabelCounts, column_class: Sequence[int]) -> Dataset:
    """Keep only the classes with a column, under the file's names if it has names and no two columns share a class."""
    used = sorted(set(column_class))
    kept = dataset if len(used) == len(dataset.classes) else keep_classes(dataset, used)
    if not table.names_classes or len(column_class) > len(used):
        return kept
    column = {c: j for j, c in enumerate(column_class)}
    return replace(kept, classes=tuple(table.classes[column[c]] for c in used))


def _mapping_notes(
    path: str | os.PathLike[str], table: LabelCounts, column_class: Sequence[int], dataset: Dataset
) -> list[str]:
    """Return a line for the user if classes are merged, renamed or left out."""
    classes = dataset.classes
    if len(table.classes) > len(classes):
        return [
            f"{path} has {len(table.classes)} classes, but {dataset.name} has {len(classes)}: class i gets the counts "
            f"of columns i, i + {len(classes)} and so on; to avoid this, use --data synthetic --set "
            f"data.classes={len(table.classes)}"
        ]
    mapped = [classes[c] for c in column_class]
    if table.names_classes and [name.lower() for name in table.classes] != [name.lower() for name in mapped]:
        pairs = [f"{name} = {other}" for name, other in zip(table.classes, mapped, strict=True)]
        more = f" and {len(pairs) - 10} more" if len(pairs) > 10 else ""
        return [f"{path}: classes of {dataset.name} stand in for yours: {', '.join(pairs[:10])}{more}"]
    left_out = [name for c, name in enumerate(classes) if c not in column_class]
    if not left_out:
        return []
    listed = ", ".join(left_out[:10]) + (f" and {len(left_out) - 10} more" if len(left_out) > 10 else "")
    return [f"{path} has no column for {listed}; classes without a column are left out"]
