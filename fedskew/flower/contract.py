"""The contract of a federation: the class names, the form of an input, and the normalisation at all sites.

With `column_sums`, the app's contract is a draft. Of a table's columns, it has only the names and kinds. Before the
first round, the sites send sums of their columns. The server makes the complete contract from these sums.

Classes are numbered in the order of the contract. A site may list them in another order. Its labels are then renumbered
by name. With one label per sample, a site may also lack some classes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import starmap
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from fedskew.data.dataset import Dataset, Kind, Samples
from fedskew.data.own.forms import is_table
from fedskew.data.own.labels import ClassesElsewhere
from fedskew.data.spelling import composed
from fedskew.data.table_encoding import ColumnEncoding, DraftEncoding, PooledEncoding, TableEncoding
from fedskew.errors import UserError, shorten, unknown
from fedskew.task import TASKS

_FAR = 5.0
"""A site gets a warning if the mean of a column is more than this many standard deviations from the contract's."""

Array = npt.NDArray[np.generic]
Scaling = tuple[tuple[float, float], ...]
"""Mean and standard deviation of each input of a table."""


class ContractMismatch(UserError):
    """A site's data do not meet the contract. The message has names from the data, so it stays at the site."""


@dataclass(frozen=True)
class Contract:
    """What the data of all sites must have in common."""

    kind: Kind
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    """Shape of one input: channels, height and width of an image, inputs of a table, or words of a text."""
    mean: tuple[float, ...] = ()
    """Mean per channel of images scaled to [0, 1], or per input of a table. If a table has no means
    here, each site uses its own means and standard deviations."""
    std: tuple[float, ...] = ()
    """Standard deviation per channel or input."""
    vocabulary: int = 0
    """For text: the number of word or token ids."""
    columns: tuple[str, ...] = ()
    """Names of a table's inputs, in order. With `encoding`, a column may become several inputs. If there are no names,
    nothing checks that sites use the same columns."""
    words: str = ""
    """For text: the dataset whose training part gives the words their numbers. Empty for tokenised text."""
    words_hash: str = ""
    """For text: SHA-256 of the words in the order of their numbers. `words` alone does not identify them."""
    fields: tuple[tuple[str, tuple[int, ...], bool], ...] = ()
    """The inputs of a sample that has several, as in `Dataset.fields`."""
    encoding: TableEncoding | None = None
    """How a table's columns become inputs. None if no column has categories or an input that marks missing values:
    `columns`, `mean` and `std` then describe all columns. Also None for images and texts."""
    task: str = "single-label"
    """Whether a sample has one class or any number of labels: a name in `task.TASKS`."""
    column_sums: bool = False
    """Whether this is a draft: it lists no categories, and every mean is 0 and every standard deviation 1."""
    from_sums: bool = False
    """Whether this is a completed draft. A site that hid its categories may then lack every category of a column."""

    def __post_init__(self) -> None:
        if self.kind not in ("image", "table", "text"):
            raise UserError(f"contract.kind is {self.kind!r}; expected image, table or text")
        if self.task not in TASKS:
            raise unknown("task of the contract:", self.task, TASKS)
        if len(self.classes) < 2 or len(set(self.classes)) < len(self.classes):
            raise UserError(f"contract.classes is {list(self.classes)!r}; expected two or more different names")
        if not self.shape or min(self.shape) < 1:
            raise UserError(f"contract.shape is {list(self.shape)!r}; expected sizes such as [1, 28, 28]")
        if self.kind == "image" and not len(self.mean) == len(self.std) == self.shape[0]:
            raise UserError(f"{self._lengths()}; expected {self.shape[0]}, one per channel")
        if self.kind == "table" and not len(self.mean) == len(self.std) in (0, self.shape[0]):
            raise UserError(f"{self._lengths()}; expected {self.shape[0]}, one per input")
        if not all(map(math.isfinite, (*self.mean, *self.std))) or min(self.std, default=1.0) <= 0:
            raise UserError("contract.mean or contract.std is unusable; expected finite numbers, and each std above 0")
        if self.columns and not len(set(self.columns)) == len(self.columns) == self.shape[0]:
            raise UserError(f"contract.columns is {list(self.columns)!r}; expected {self.shape[0]} different names")
        if self.encoding is not None and self.encoding.features != self.columns:
            raise UserError("contract.encoding and contract.columns differ; expected the same inputs in the same order")

    def _lengths(self) -> str:
        return f"the lengths of contract.mean and contract.std are {len(self.mean)} and {len(self.std)}"

    @property
    def scaling(self) -> Scaling:
        """Mean and standard deviation of each input of a table. Empty for other data, and if each site uses its own."""
        return tuple(zip(self.mean, self.std, strict=True)) if self.kind == "table" else ()

    @property
    def table_encoding(self) -> TableEncoding | None:
        """The encoding of a table. None for other data, and if the contract has no names or no means of columns."""
        if self.encoding is not None or self.kind != "table" or not self.columns or not self.scaling:
            return self.encoding
        return TableEncoding(tuple(starmap(ColumnEncoding, zip(self.columns, self.mean, self.std, strict=True))))

    @property
    def column_names(self) -> tuple[str, ...]:
        """Names of a table's columns, of which an encoding may make several inputs. Empty if they are not known."""
        encoding = self.table_encoding
        return self.columns if encoding is None else tuple(column.name for column in encoding.columns)

    def data_options(self, path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
        """Add the contract's classes and table encoding to the options with which a site's own data are loaded."""
        if not path.exists():  # the data are given by a dataset's name, so their classes are known
            return dict(given)
        known: dict[str, Any] = {"classes": ClassesElsewhere(self.classes)}
        encoding = self.table_encoding
        if is_table(path) and encoding is not None:
            known["encoding"] = encoding
            if self.column_sums or self.from_sums:
                known["encoding"] = (DraftEncoding if self.column_sums else PooledEncoding)(encoding.columns)
        return {**known, **given}

    def draft(self) -> Contract:
        """Return the draft of this contract: the columns and their kinds, without categories, means and deviations."""
        if self.table_encoding is None:
            raise UserError("column sums need a table with named columns; expected CSV or Parquet data, or --encoding")
        # Every column marks gaps in a draft, because only the sums show which columns have any.
        columns = (
            ColumnEncoding(column.name, categories=None if column.categories is None else (), marks_gaps=True)
            for column in self.table_encoding.columns
        )
        draft = Contract.from_encoding(self.classes, TableEncoding(tuple(columns)))
        return replace(draft, task=self.task, column_sums=True)

    def complete(self, encoding: TableEncoding) -> Contract:
        """Complete a draft with the encoding that was fitted to the sites' sums."""
        return replace(Contract.from_encoding(self.classes, encoding), task=self.task, from_sums=True)

    def completes(self, draft: Contract) -> bool:
        """Whether this contract could result from that draft."""
        is_complete = draft.column_sums and not self.column_sums and self.table_encoding is not None
        return is_complete and self.draft() == draft

    @classmethod
    def from_encoding(cls, classes: tuple[str, ...], encoding: TableEncoding) -> Contract:
        """Make a contract without data, for tables with this encoding."""
        mean, std = zip(*encoding.scaling, strict=True)
        shape = (len(encoding.features),)
        own = None if encoding.only_numbers else encoding
        return cls("table", classes, shape, mean, std, columns=encoding.features, encoding=own)

    @classmethod
    def from_dataset(cls, dataset: Dataset) -> Contract:
        """Make the contract that this dataset meets."""
        image, text = dataset.kind == "image", dataset.kind == "text"
        return cls(
            kind=dataset.kind,
            classes=dataset.classes,
            shape=dataset.input_shape,
            mean=dataset.mean if image else tuple(mean for mean, _ in dataset.scaling),
            std=dataset.std if image else tuple(std for _, std in dataset.scaling),
            vocabulary=dataset.vocabulary,
            columns=dataset.columns,
            words=dataset.name if text and not dataset.fields else "",
            words_hash=_hash_words(dataset),
            fields=dataset.fields,
            encoding=None if dataset.encoding is None or dataset.encoding.only_numbers else dataset.encoding,
            task=dataset.task.name,
        )

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Contract:
        for key in ("classes", "columns"):
            if isinstance(value.get(key), str):  # its letters would become the names
                raise UserError(f'contract.{key} is {value[key]!r}; expected a list such as ["one", "two"]')
        try:
            return cls(
                kind=cast(Kind, value["kind"]),
                classes=tuple(composed(str(name)) for name in value["classes"]),
                shape=tuple(map(int, value["shape"])),
                mean=tuple(map(float, value.get("mean", ()))),
                std=tuple(map(float, value.get("std", ()))),
                vocabulary=int(value.get("vocabulary") or 0),
                columns=tuple(composed(str(name)) for name in value.get("columns") or ()),
                words=str(value.get("words") or ""),
                words_hash=str(value.get("words_hash") or ""),
                fields=tuple(
                    (composed(str(n)), tuple(map(int, form)), bool(w)) for n, form, w in value.get("fields") or ()
                ),
                encoding=TableEncoding.from_json(value["encoding"]) if value.get("encoding") else None,
                task=str(value.get("task") or "single-label"),
                column_sums=bool(value.get("column_sums")),
                from_sums=bool(value.get("from_sums")),
            )
        except KeyError as error:
            raise UserError(f"the contract has no {error.args[0]!r}; expected kind, classes and shape") from error
        except (TypeError, ValueError) as error:
            raise UserError(f"the contract cannot be read ({error}); expected lists such as [1, 28, 28]") from error

    def to_json(self) -> dict[str, Any]:
        optional = ("encoding", "column_sums", "from_sums", "words_hash")
        values = {spec.name: getattr(self, spec.name) for spec in fields(self) if spec.name not in optional}
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
        if self.encoding is not None:
            plain["encoding"] = self.encoding.to_json()
        if self.words_hash:
            plain["words_hash"] = self.words_hash
        return plain | {key: True for key in ("column_sums", "from_sums") if getattr(self, key)}

    def admit(self, dataset: Dataset) -> Dataset:
        """Return the data with the federation's classes and scaling. Refuse data that do not meet the contract."""
        dataset = self._in_colour(dataset)
        if differences := self._differences(dataset):
            raise ContractMismatch(f"the data do not meet the federation's contract: {'; '.join(differences)}")
        dataset = self._reorder(dataset)
        number = {name: index for index, name in enumerate(self.classes)}
        renumbered = np.array([number[name] for name in dataset.classes], dtype=np.int64)
        train, test = (
            replace(
                part,
                x=self._rescale(part.x, dataset.scaling),
                y=dataset.task.renumber(part.y, renumbered, len(self.classes)),
            )
            for part in (dataset.train, dataset.test)
        )
        return replace(
            dataset,
            classes=self.classes,
            train=train,
            test=test,
            mean=self.mean if self.kind == "image" else dataset.mean,
            std=self.std if self.kind == "image" else dataset.std,
            scaling=self.scaling or dataset.scaling,
            vocabulary=self.vocabulary,
        )

    def warnings(self, dataset: Dataset) -> list[str]:
        """Warn about grey images among colours, and about columns whose mean is far from the contract's.

        Such columns may be in other units.
        """
        if self._in_colour(dataset) is not dataset:
            return ["the images are grey, but the federation's are in colour: each gets three equal channels"]
        if not self.scaling or not dataset.scaling or len(dataset.scaling) != len(self.scaling) or self.column_sums:
            return []
        names = self.columns or tuple(f"number {index}" for index in range(1, len(self.scaling) + 1))
        ordered = self._reorder(dataset)
        # The data are standardised with `ordered.scaling`, but `means` are in the original units.
        shifts = np.asarray(ordered.train.x, np.float64).mean(axis=0)
        means = [mean + shift * std for (mean, std), shift in zip(ordered.scaling, shifts, strict=True)]
        return [
            f"column {name!r} has mean {mean:.4g}, but the federation's contract has {expected:.4g} ± {std:.4g}: "
            "is it in other units?"
            for name, mean, (expected, std) in zip(names, means, self.scaling, strict=True)
            if abs(mean - expected) > _FAR * std
        ]

    def _in_colour(self, dataset: Dataset) -> Dataset:
        """Give grey images three equal channels if the contract has colours, as loading does beside colour images.

        Images on disk are not changed, because they may be larger than the memory.
        """
        is_grey = dataset.kind == "image" and dataset.input_shape == (1, *self.shape[1:])
        if self.kind != "image" or self.shape[0] != 3 or not is_grey or isinstance(dataset.train.x, np.memmap):
            return dataset
        train, test = (replace(part, x=part.x.repeat(3, axis=1)) for part in (dataset.train, dataset.test))
        return replace(dataset, train=train, test=test)

    def _reorder(self, dataset: Dataset) -> Dataset:
        """Put the dataset's columns, or its named inputs, into the contract's order."""
        if dataset.fields != self.fields:
            return self._reorder_fields(dataset)
        if not self.columns or dataset.columns in ((), self.columns):
            return dataset
        order = [dataset.columns.index(name) for name in self.columns]
        train, test = (replace(part, x=part.x[:, order]) for part in (dataset.train, dataset.test))
        scaling = tuple(dataset.scaling[index] for index in order) if dataset.scaling else ()
        return replace(dataset, train=train, test=test, scaling=scaling, columns=self.columns)

    def _reorder_fields(self, dataset: Dataset) -> Dataset:
        """Put named inputs into the contract's order. In `x`, the inputs are flattened and lie side by side."""
        ends = np.cumsum([math.prod(shape) for _, shape, _ in dataset.fields]).tolist()
        columns = {
            name: np.arange(end - math.prod(shape), end)
            for (name, shape, _), end in zip(dataset.fields, ends, strict=True)
        }
        order = np.concatenate([columns[name] for name, _, _ in self.fields])
        train, test = (replace(part, x=part.x[:, order]) for part in (dataset.train, dataset.test))
        return replace(dataset, train=train, test=test, fields=self.fields)

    def _rescale(self, x: Array, scaling: Scaling) -> Array:
        """Scale a table's inputs with the contract's means and deviations.

        `x` is scaled with `scaling`, or unscaled if that is empty. If the contract has no means, return `x` itself.
        """
        if not self.scaling or scaling == self.scaling:
            return x
        mean, std = np.array(scaling or ((0.0, 1.0),)).T
        raw = np.asarray(x, np.float64) * std + mean
        scaled: Array = ((raw - np.array(self.mean)) / np.array(self.std)).astype(np.float32)
        return scaled

    def blank(self) -> Dataset:
        """Make a dataset of this form with one blank sample per class, in place of the sites' data."""
        numbers = np.dtype({"image": "u1", "table": "f4", "text": "i8"}[self.kind])
        samples = Samples(
            np.zeros((len(self.classes), *self.shape), numbers), TASKS[self.task].example_labels(len(self.classes))
        )
        dataset = Dataset("federation", self.kind, self.classes, samples, samples, vocabulary=self.vocabulary)
        normalised = replace(dataset, mean=self.mean, std=self.std) if self.kind == "image" else dataset
        return replace(
            normalised, scaling=self.scaling, columns=self.columns, fields=self.fields, encoding=self.encoding
        )

    def _differences(self, dataset: Dataset) -> list[str]:
        """Say how the data differ from the contract. Empty if they meet it."""
        found = []
        if dataset.kind != self.kind:
            found.append(f"they are of kind {dataset.kind}, expected {self.kind}")
        if dataset.task.name != self.task:
            found.append(f"labels are {dataset.task.name}, expected {self.task}")
        elif self.task == "multi-label" and (missing := [name for name in self.classes if name not in dataset.classes]):
            found.append(f"labels {shorten(missing)} are missing, and it is not known which samples have them")
        if foreign := [name for name in dataset.classes if name not in self.classes]:
            found.append(f"classes {shorten(foreign)} are not among {shorten(self.classes)}")
        if dataset.input_shape != self.shape:
            shapes = f"inputs have shape {list(dataset.input_shape)}, expected {list(self.shape)}"
            found.append(shapes + self._shape_remedy(dataset))
        if self.columns and dataset.columns:
            if surplus := [name for name in dataset.columns if name not in self.columns]:
                found.append(f"columns {shorten(surplus)} are not among {shorten(self.columns)}")
            if missing := [name for name in self.columns if name not in dataset.columns]:
                found.append(f"columns {shorten(missing)} are missing")
        if sorted(dataset.fields) != sorted(self.fields):
            found.append(f"inputs are {_inputs(dataset.fields)}, expected {_inputs(self.fields)}")
        elif self.kind == dataset.kind == "text" and not self.fields and dataset.name != self.words:
            found.append(
                f"words are numbered by {dataset.name!r}, expected {self.words!r}: sites must share one numbering"
            )
        if self.kind == dataset.kind == "text" and (problem := self._vocabulary_problem(dataset)):
            found.append(problem)
        return found

    def _shape_remedy(self, dataset: Dataset) -> str:
        """Say what to do about images of another size or with other channels. Empty for other data."""
        if self.kind != "image" or dataset.kind != "image":
            return ""
        (channels, *size), (own_channels, *own_size) = self.shape, dataset.input_shape
        remedies = []
        if size != own_size:
            remedies.append(f"resize the images, for which image files have the option image_size: {size[0]}x{size[1]}")
        if channels != own_channels:
            remedies.append({1: "convert them to grey", 3: "convert them to colour"}.get(channels, "add the channels"))
        return f" ({' and '.join(remedies)})"

    def _vocabulary_problem(self, dataset: Dataset) -> str | None:
        """Say why the model cannot use the site's vocabulary. None if it can."""
        if self.fields and dataset.vocabulary > self.vocabulary:
            return f"the largest token id is {dataset.vocabulary - 1}, expected less than {self.vocabulary}"
        if not self.fields and dataset.vocabulary != self.vocabulary:
            return f"the vocabulary has {dataset.vocabulary} entries, expected {self.vocabulary}"
        if self.words_hash and self.words == dataset.name and _hash_words(dataset) != self.words_hash:
            return "words have other numbers, expected one numbering for all sites, such as one tokenizer's ids"
        return None


def _hash_words(dataset: Dataset) -> str:
    """A hash of the numbered words of a text dataset. Empty if they are unknown."""
    return hashlib.sha256("\n".join(dataset.words).encode()).hexdigest() if dataset.words else ""


def _inputs(fields: Sequence[tuple[str, tuple[int, ...], bool]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape, _ in fields) or "one array"
