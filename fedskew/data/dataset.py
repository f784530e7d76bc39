"""Datasets: arrays and class names, split into a training and a test part.

This module also has the functions that loaders share. They check samples and options, and hold out a test set.
"""

from __future__ import annotations

import inspect
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedskew.data.table_encoding import RawTable, TableEncoding
from fedskew.errors import UserError, plural, shorten, unknown
from fedskew.randomness import permutation
from fedskew.task import Task, task_for

Kind = Literal["image", "table", "text"]
Index = npt.NDArray[np.int64]

TEST_FRACTION = 0.2
"""The default share of each class that is held out for testing."""
BLOCK_VALUES = 1 << 24
"""How many numbers of a large array are processed at a time."""


@dataclass(frozen=True)
class Samples:
    """Inputs and labels, row by row."""

    x: npt.NDArray[np.generic]
    """Images: uint8 (n, channels, height, width). Tables: float32 (n, features), standardised as `Dataset.scaling`
    says. Text: int64 token ids (n, length). In texts that fedskew splits into words, 0 is padding and 1 an unknown
    word."""
    y: npt.NDArray[np.int64]
    """Class numbers (n). For several labels per sample, a matrix of 0 and 1 (n, labels)."""
    domain: npt.NDArray[np.int64] | None = None
    """Each row's domain, as an index into `Dataset.domains`; None if the dataset has no domains."""
    site: npt.NDArray[np.int64] | None = None
    """Each row's site, as an index into `Dataset.sites`; None if the dataset has no sites."""

    def __len__(self) -> int:
        return len(self.y)

    def __repr__(self) -> str:
        return f"Samples({len(self)} of shape {tuple(self.x.shape[1:])}, {self.x.dtype})"

    def select(self, rows: npt.NDArray[np.generic]) -> Samples:
        """Return the chosen rows, given by index or by mask."""
        domain = None if self.domain is None else self.domain[rows]
        return Samples(self.x[rows], self.y[rows], domain, None if self.site is None else self.site[rows])


@dataclass(frozen=True)
class Dataset:
    """A classification dataset. Images are not normalised yet, and nothing is shuffled."""

    name: str
    kind: Kind
    classes: tuple[str, ...]
    train: Samples
    test: Samples
    mean: tuple[float, ...] = (0.5,)
    """Mean of each channel, for images scaled to [0, 1]."""
    std: tuple[float, ...] = (0.5,)
    vocabulary: int = 0
    """Number of token ids of a text dataset, including 0."""
    words: tuple[str, ...] = ()
    """The words with the ids 2, 3, … of a text dataset; empty if they are unknown."""
    domains: tuple[str, ...] = ()
    """Names of the domains that the samples come from, for example mnist and svhn."""
    scaling: tuple[tuple[float, float], ...] = ()
    """The mean and the standard deviation with which each input of a table was standardised. An input that was not
    standardised has (0, 1). If this is empty, no input was standardised."""
    columns: tuple[str, ...] = ()
    """Names of a table's inputs, in order; empty if they are unknown."""
    fields: tuple[tuple[str, tuple[int, ...], bool], ...] = ()
    """The inputs of a sample, in the order of a row of `x`: name, shape, and whether the input holds whole numbers.
    Empty if a sample is a single input without a name."""
    encoding: TableEncoding | None = None
    """How a table's columns became its inputs."""
    raw_train: RawTable | None = None
    """The training part of a table before encoding, if its encoding is still to be fitted (a `DraftEncoding`)."""
    sites: tuple[str, ...] = ()
    """Names of the sites that the samples come from, for example hospitals."""
    site_column: str = ""
    """The data's own word for a site, for example the name of a table's column."""
    notes: tuple[str, ...] = ()
    """Lines for the user about what loading changed, for example how gaps were filled."""
    in_memory: Mapping[str, object] = field(default_factory=dict)
    """The type, shapes and SHA-256 of data given as Python objects, for the configuration of a run."""
    source: Mapping[str, object] = field(default_factory=dict)
    """The name or path of the data and their options, for the configuration of a run. Empty for Python objects."""

    @property
    def described(self) -> dict[str, object]:
        """The section `data` of a configuration."""
        return dict(self.source) or {"name": self.name}

    def __repr__(self) -> str:
        sizes = f"{len(self.train)} training and {plural(len(self.test), 'test sample')}"
        return f"Dataset({self.name!r}, {self.kind}, {len(self.classes)} classes, {sizes} of shape {self.input_shape})"

    @property
    def task(self) -> Task:
        """Whether a sample has one class or several labels."""
        return task_for(self.train.y)

    @property
    def groups(self) -> tuple[Index, tuple[str, ...]]:
        """The group of each training sample, and the names of the groups.

        With one class per sample, the groups are the classes. With several labels per sample, `Task.groups` assigns
        each sample to one group. Partition rules and hold-outs then use the groups in place of classes.
        """
        return self.task.groups(self.train.y, self.classes)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.train.x.shape[1:])

    def __post_init__(self) -> None:
        if len(self.classes) < 2:
            only = f"one class ({self.classes[0]})" if self.classes else "no class"
            raise UserError(
                f"dataset {self.name!r} has {only}; expected at least 2 classes; if some have no samples, list all "
                "classes with the option 'classes', for example classes: [ill, well]"
            )
        if len(set(self.classes)) < len(self.classes):
            twice = next(name for name in self.classes if self.classes.count(name) > 1)
            raise UserError(f"dataset {self.name!r} has two classes {twice!r}; expected different names")
        for part, samples in (("train", self.train), ("test", self.test)):
            check_samples(samples, len(self.classes), f"{self.name} {part}")
        if self.train.x.shape[1:] != self.test.x.shape[1:]:
            raise UserError(
                f"dataset {self.name!r}: train inputs have shape {self.train.x.shape[1:]}, "
                f"test inputs {self.test.x.shape[1:]}; expected the same"
            )


def keep_classes(dataset: Dataset, kept: Sequence[int]) -> Dataset:
    """Keep only the samples of the classes `kept`. The classes are renumbered in that order."""
    new_number = np.full(len(dataset.classes), -1, np.int64)
    new_number[list(kept)] = np.arange(len(kept))
    parts = []
    for samples in (dataset.train, dataset.test):
        rows = samples.select(np.flatnonzero(new_number[samples.y] >= 0))
        parts.append(replace(rows, y=new_number[rows.y]))
    classes = tuple(dataset.classes[c] for c in kept)
    return replace(dataset, classes=classes, train=parts[0], test=parts[1])


def lacking_notes(dataset: Dataset) -> tuple[str, ...]:
    """Return a line for the user about classes without test samples, and one about classes without training samples.

    A class without any samples has no line, because only the user's own list of classes names it.
    """
    trained, tested = (_occurring(part.y, len(dataset.classes)) for part in (dataset.train, dataset.test))
    notes = []
    if lacking := [name for name, lacks in zip(dataset.classes, trained & ~tested, strict=True) if lacks]:
        has, is_ = ("has", "it is") if len(lacking) == 1 else ("have", "they are")
        notes.append(f"{_classes(dataset, lacking)} {has} no test samples, so no metric says how well {is_} predicted")
    if lacking := [name for name, lacks in zip(dataset.classes, tested & ~trained, strict=True) if lacks]:
        has, it = ("has", "it") if len(lacking) == 1 else ("have", "them")
        notes.append(f"{_classes(dataset, lacking)} {has} test samples, but no training samples to learn {it} from")
    return tuple(notes)


def _occurring(y: npt.NDArray[np.int64], classes: int) -> npt.NDArray[np.bool_]:
    """Return whether a sample has each class or label: [classes]."""
    if y.ndim == 2:
        return np.asarray(y.any(axis=0))
    return np.bincount(y, minlength=classes) > 0


def _classes(dataset: Dataset, names: Sequence[str]) -> str:
    noun = "class" if dataset.task.name == "single-label" else "label"
    nouns = {"class": "classes", "label": "labels"}
    return f"{dataset.name}: {noun if len(names) == 1 else nouns[noun]} {shorten(names, 5)}"


def check_samples(samples: Samples, classes: int, where: str) -> None:
    """Raise `UserError` for bad samples. The message names the first bad row, if there is one."""
    x, y = samples.x, samples.y
    if y.ndim == 2:
        check_label_matrix(y, classes, where)
        y = np.zeros(len(y), np.int64)  # the labels are checked; below, only the number of rows matters
    if len(x) != len(y):
        raise UserError(f"{where}: {plural(len(x), 'input')} but {plural(len(y), 'label')}; expected equal lengths")
    if len(y) == 0:
        raise UserError(f"{where}: no samples")
    outside = np.flatnonzero((y < 0) | (y >= classes))
    if len(outside):
        raise UserError(f"{where}: label {y[outside[0]]} in row {outside[0]}; expected 0 to {classes - 1}")
    if np.issubdtype(x.dtype, np.floating):
        first = 0
        for block in row_blocks(x):
            bad = np.flatnonzero(~np.isfinite(block.reshape(len(block), -1)).all(axis=1))
            if len(bad):
                raise UserError(f"{where}: NaN or infinite value in row {first + bad[0]}; expected finite numbers")
            first += len(block)


def row_blocks(x: npt.NDArray[np.generic]) -> Iterator[npt.NDArray[np.generic]]:
    """Yield blocks of consecutive rows as views, so that temporary arrays stay small.

    The pages of a memory-mapped file are released after each block. So `x` may be larger than the memory.
    """
    rows = max(1, BLOCK_VALUES // max(1, x[:1].size))
    file = getattr(x, "_mmap", None)
    for start in range(0, len(x), rows):
        yield x[start : start + rows]
        if file is not None and hasattr(mmap, "MADV_DONTNEED"):
            file.madvise(mmap.MADV_DONTNEED)


def check_label_matrix(y: npt.NDArray[np.generic], classes: int, where: str) -> None:
    """Raise `UserError` unless the labels are a matrix of 0 and 1 with one column per label."""
    if y.shape[1] != classes:
        columns = plural(y.shape[1], "column")
        raise UserError(f"{where}: {columns} of labels, but {classes} names; expected one name per column")
    bad = np.flatnonzero(~np.isin(y, (0, 1)).all(axis=1))
    if len(bad):
        found = next(value for value in y[bad[0]].tolist() if value not in (0, 1))
        raise UserError(f"{where}: label {found!r} in row {bad[0]}; expected 0 or 1 in each column of labels")


def option_names(loader: Callable[..., Dataset]) -> tuple[str, ...]:
    """Return a loader's options, which are its keyword-only arguments."""
    parameters = inspect.signature(loader).parameters.values()
    return tuple(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)


def check_options(
    loader: Callable[..., Dataset], options: dict[str, Any], data: str, also: Sequence[str] = ()
) -> dict[str, Any]:
    """Return `options`, or raise `UserError` if one of them is not an option of the loader.

    `also` lists further options that the caller handles.
    """
    names = (*option_names(loader), *also)
    for option in options:
        if not names:
            raise UserError(f"unknown option {option!r}; {data} has no options")
        if option not in names:
            raise unknown(f"option of {data}:", option, names)
    return options


def stratified_holdout(y: Index, fraction: float, where: str) -> tuple[Index, Index]:
    """Return the indices of the training samples and of the test samples, each in ascending order.

    The test set has `fraction` of each class, rounded. With several labels per sample, it has `fraction` of each group
    of `Task.groups`. The choice is fixed, so all seeds of an experiment have the same test samples on every machine.
    """
    check_fraction(fraction)
    names = tuple(map(str, range(y.shape[-1])))  # used only with several labels per sample, one name per column
    y, _ = task_for(y).groups(y, names)
    tested = np.zeros(len(y), dtype=bool)
    for label in np.unique(y):
        members = np.flatnonzero(y == label)
        count = round(len(members) * fraction)
        tested[members[permutation(len(members), 0, "holdout", int(label))[:count]]] = True
    if tested.all() or not tested.any():
        few = f"{plural(len(y), 'sample')} {'is' if len(y) == 1 else 'are'} too few"
        raise UserError(f"{where}: {few} to hold out {fraction:g} of each class for testing")
    return np.flatnonzero(~tested), np.flatnonzero(tested)


def check_fraction(fraction: object) -> None:
    if isinstance(fraction, bool) or not isinstance(fraction, int | float | np.floating) or not 0 < fraction < 1:
        raise UserError(f"test_fraction is {fraction!r}; expected a number between 0 and 1, such as 0.2")
