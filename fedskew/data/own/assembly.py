"""Assemble a dataset from a user's inputs and labels: encode the labels, hold out a test set, scale inputs."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fedskew.data.dataset import TEST_FRACTION, Dataset, Kind, Samples, stratified_holdout
from fedskew.data.images import channel_statistics
from fedskew.data.own.labels import Labels, encode_labels
from fedskew.data.published.text import LENGTH, VOCABULARY, text_dataset
from fedskew.data.table_encoding import (
    DraftEncoding,
    PooledEncoding,
    RawTable,
    Strings,
    TableEncoding,
    UnknownValues,
    fit_encoding,
)
from fedskew.errors import UserError, plural

Array = npt.NDArray[np.generic]
IntArray = npt.NDArray[np.int64]


Inputs = Array | list[str] | RawTable


@dataclass(frozen=True)
class Part:
    """Unprepared inputs (uint8 images, a table, or a list of texts) and their labels."""

    x: Inputs
    labels: Labels
    where: str
    """The source, for error messages."""
    sites: Strings | None = None
    """The site of each sample, if the data have sites."""


def assemble(
    name: str,
    kind: Kind,
    parts: Sequence[Part],
    classes: Sequence[str] | None = None,
    test_fraction: float | None = None,
    length: int = LENGTH,
    vocabulary: int = VOCABULARY,
    site: str | None = None,
    encoding: TableEncoding | None = None,
) -> Dataset:
    """Assemble a dataset from a training and a test part. If there is only one part, hold out a test set from it.

    `site` is the name of the column with the samples' sites. `encoding` turns a table into inputs. By default, it is
    fitted on the training part.
    """
    for part in parts:
        if len(part.x) != len(part.labels):
            found = f"{plural(len(part.x), 'input')} but {plural(len(part.labels), 'label')}"
            raise UserError(f"{part.where}: {found}; expected equal lengths")
    names, numbers = encode_labels([part.labels for part in parts], classes)
    splits = _train_and_test(parts, numbers, test_fraction)
    dataset = _dataset(name, kind, names, splits, (length, vocabulary), encoding)
    if site is None:
        return dataset
    sites, numbered = number_sites([split.sites for split in splits])
    train, test = (replace(s, site=n) for s, n in zip((dataset.train, dataset.test), numbered, strict=True))
    return replace(dataset, train=train, test=test, sites=sites, site_column=site)


@dataclass(frozen=True)
class _Split:
    """The training or the test part."""

    x: Inputs
    y: IntArray
    where: str
    sites: Strings | None


def _dataset(
    name: str,
    kind: Kind,
    classes: tuple[str, ...],
    splits: tuple[_Split, _Split],
    text_form: tuple[int, int],
    encoding: TableEncoding | None,
) -> Dataset:
    """Make the dataset, without sites. `text_form` is the length of a text and the size of the vocabulary."""
    train, test = splits
    if kind == "text":
        texts = [(list(split.x), split.y) for split in splits]  # type: ignore[arg-type]
        return text_dataset(name, classes, texts[0], texts[1], *text_form)
    if isinstance(train.x, RawTable):
        return _table_dataset(name, classes, splits, encoding)
    x = [np.asarray(split.x) for split in splits]
    if x[0].shape[1:] != x[1].shape[1:]:
        raise UserError(
            f"{name}: train inputs have shape {x[0].shape[1:]}, test inputs {x[1].shape[1:]}; expected the same"
        )
    mean, std = channel_statistics(x[0])
    return Dataset(name, kind, classes, Samples(x[0], train.y), Samples(x[1], test.y), mean, std)


def _table_dataset(
    name: str, classes: tuple[str, ...], splits: tuple[_Split, _Split], encoding: TableEncoding | None
) -> Dataset:
    train, test = (split.x for split in splits)
    assert isinstance(train, RawTable)
    assert isinstance(test, RawTable)
    fitted = fit_encoding(train) if encoding is None else encoding
    for column in fitted.columns:
        if not (math.isfinite(column.mean) and math.isfinite(column.std)):
            raise UserError(
                f"{name}: the values in column {column.name!r} are too large to be standardised; "
                "correct them, or divide the column by a constant"
            )
    if encoding is not None and not isinstance(encoding, DraftEncoding):
        _refuse_lost_columns(splits[0].where, encoding, (train, test))
        fitted = TableEncoding(encoding.columns)
    samples = []
    for raw, split in ((train, splits[0]), (test, splits[1])):
        x = fitted.encode(raw)
        bad = np.flatnonzero(~np.isfinite(x).all(axis=1))
        if len(bad):
            feature = fitted.features[int(np.argmin(np.isfinite(x[bad[0]])))]
            raise UserError(
                f"{split.where}: a value in column {feature!r} is too large to be standardised; "
                "correct it, or remove its row"
            )
        samples.append(Samples(x, split.y))
    return Dataset(
        name,
        "table",
        classes,
        train=samples[0],
        test=samples[1],
        scaling=fitted.scaling,
        columns=fitted.features,
        encoding=fitted,
        raw_train=train if isinstance(fitted, DraftEncoding) else None,
        notes=_encoding_notes(name, fitted, train, test, is_fitted=encoding is None),
    )


def _encoding_notes(
    name: str, encoding: TableEncoding, train: RawTable, test: RawTable, is_fitted: bool
) -> tuple[str, ...]:
    """Return lines for the user about gaps, constant columns and unknown categories."""
    notes = []
    gaps = dict(zip(train.names, _gap_counts(train) + _gap_counts(test), strict=True))
    if found := [f"{column} ({count})" for column, count in gaps.items() if count]:
        marked = [column.name for column in encoding.columns if column.marks_gaps and gaps[column.name]]
        how = ["the mean replaces missing numbers"] if any(gaps[column] for column in train.number_names) else []
        if any(gaps[column] for column in train.strings):
            how.append("a missing category is 0 in all inputs of its column")
        if marked:
            where = "" if len(marked) == len(found) else f" in {_shortened(marked)}"
            how.append(f"and {plural(len(marked), 'more input')} mark{'s' * (len(marked) == 1)} the gaps{where}")
        notes.append(f"{name}: gaps in {_shortened(found)}; {', '.join(how)}")
    constant = [c for p, c in enumerate(train.number_names) if _is_constant(train.numbers[:, p])]
    constant += [column for column, strings in train.strings.items() if len(np.unique(strings.codes)) == 1]
    if constant and is_fitted:
        has, carries = ("has", "it carries") if len(constant) == 1 else ("have", "they carry")
        notes.append(
            f"{name}: {_shortened(constant)} {has} only one value in the training part, so {carries} no information"
        )
    if isinstance(encoding, DraftEncoding):  # its categories are not known yet
        return tuple(notes)
    return (*notes, *(_unknown_note(name, found) for found in encoding.unknown_values((train, test))))


def _unknown_note(name: str, found: UnknownValues) -> str:
    total = found.rows + found.known_rows
    if not found.known_rows and found.column.categories:
        return (
            f"{name}: no value of column {found.column.name!r} ({_shortened(found.values)}) is among its categories "
            f"({_shortened(found.column.categories)}); the whole column is lost, because all its inputs become 0"
        )
    return (
        f"{name}: column {found.column.name!r} has values that are not among its categories "
        f"({_shortened(found.values)}); they become 0 in {found.rows} of {total} rows ({found.rows / total:.1%})"
    )


def _refuse_lost_columns(where: str, encoding: TableEncoding, tables: Sequence[RawTable]) -> None:
    """Refuse a column without any known value, unless it has one new value only.

    Its categories are probably spelled in another way, as F and M for f and m. But all rows of a site may have the same
    new value, as the name of the site's own ward.
    """
    for found in encoding.unknown_values(tables):
        categories = found.column.categories
        if found.known_rows or not categories:
            continue
        is_new = len(found.values) == 1 or isinstance(encoding, PooledEncoding)
        if is_new and not {_rough(value) for value in found.values} & {_rough(value) for value in categories}:
            continue
        raise UserError(
            f"{where}: no value of column {found.column.name!r} ({_shortened(found.values)}) is among its categories "
            f"({_shortened(categories)}), so the whole column would be lost; expected the same spelling; if all values "
            "are really new, list them with missing, which makes them gaps"
        )


def _rough(value: str) -> str:
    """Return a category without what files often spell differently: capitals, leading zeros and .0 at the end."""
    return re.sub(r"^0+(?=\d)|[.,]0$", "", value.casefold())


def _gap_counts(table: RawTable) -> IntArray:
    """Return the number of gaps in each column."""
    gaps = dict(zip(table.number_names, np.isnan(table.numbers).sum(axis=0), strict=True))
    gaps |= {name: (column.codes < 0).sum() for name, column in table.strings.items()}
    return np.array([gaps[name] for name in table.names], np.int64)


def _is_constant(numbers: npt.NDArray[np.float64]) -> bool:
    return bool(len(numbers) and (numbers == numbers[0]).all())


def _shortened(names: Sequence[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _train_and_test(
    parts: Sequence[Part], numbers: Sequence[IntArray], fraction: float | None
) -> tuple[_Split, _Split]:
    if len(parts) == 2:
        if fraction is not None:
            raise UserError(f"{parts[1].where} is the test set; leave out test_fraction")
        train, test = (_Split(part.x, y, part.where, part.sites) for part, y in zip(parts, numbers, strict=True))
        return train, test
    part, y = parts[0], numbers[0]
    if not len(y):
        raise UserError(f"{part.where}: no samples")
    rows = stratified_holdout(y, TEST_FRACTION if fraction is None else fraction, part.where)
    train, test = (
        _Split(_take(part.x, r), y[r], part.where, None if part.sites is None else part.sites.take(r)) for r in rows
    )
    return train, test


def _take(x: Inputs, rows: IntArray) -> Inputs:
    if isinstance(x, RawTable):
        return x.take(rows)
    return [x[row] for row in rows] if isinstance(x, list) else x[rows]


def number_sites(columns: Sequence[Strings | None]) -> tuple[tuple[str, ...], list[IntArray]]:
    """Return the names of all sites, and for each part, its samples' sites as indices into these names."""
    sites = tuple(sorted({value for column in columns for value in _used_sites(column)}, key=_natural_order))
    return sites, [_site_numbers(column, sites) for column in columns]


def _used_sites(sites: Strings | None) -> set[str]:
    assert sites is not None
    return {sites.values[code] for code in np.unique(sites.codes)}


def _site_numbers(column: Strings | None, sites: tuple[str, ...]) -> IntArray:
    """Return each sample's site, as an index into `sites`."""
    assert column is not None
    index = {site: number for number, site in enumerate(sites)}
    return np.array([index.get(value, -1) for value in column.values], np.int64)[column.codes]


def _natural_order(text: str) -> tuple[tuple[tuple[int, int, str], ...], str]:
    """Return a sort key that puts site 2 before site 10. Different texts have different keys."""
    words = [word for word in re.split(r"(\d+)", text) if word]
    return tuple((0, int(word), "") if word.isdecimal() else (1, 0, word) for word in words), text
