"""Convert users' labels (numbers, names or booleans) to class numbers. Several labels per sample stay a matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedskew.data.own.columns import BOOLEANS, GAPS, read_number
from fedskew.data.own.label_matrix import encode_matrix, read_matrix
from fedskew.data.spelling import composed
from fedskew.errors import UserError

MANY_NUMBERS = 20
FEW_SAMPLES = 5
"""Labels are refused as a regression target if they have more than `MANY_NUMBERS` different whole numbers, with fewer
than `FEW_SAMPLES` samples of each on average. Listed classes are not refused."""
_TOO_LARGE = 2.0**63
"""The smallest float that does not fit into int64."""


@dataclass(frozen=True)
class Labels:
    """Labels before they are encoded."""

    values: npt.NDArray[np.generic]
    """int64, bool or str, one per sample. An int64 matrix for several labels per sample."""
    where: str
    """The source, for error messages."""
    row: Callable[[int], str]
    """Describes a row by its index, for error messages."""
    markers: tuple[str, ...] = ()
    """The values of the option `missing`: texts and numbers that mean a gap."""

    def __len__(self) -> int:
        return len(self.values)


def read_labels(values: npt.NDArray[np.generic], where: str, row: Callable[[int], str]) -> Labels:
    """Read whole numbers (of any dtype), strings, booleans, or a matrix of 0 and 1 with a column per label.

    Raise `UserError` for anything else. The message names the first bad row if there is one.
    """
    if values.ndim and not len(values):
        raise UserError(f"{where}: no samples")
    values = _without_single_column(values)
    if values.ndim == 1 and values.dtype.kind == "O":
        values = _without_single_column(_unbox(values, where, row))
    if values.ndim != 1:
        return Labels(read_matrix(values, where, row), where, row)
    if values.dtype.kind == "S":
        values = _decode(values.astype(np.bytes_), where, row)
    if values.dtype.kind == "U":
        return Labels(_read_booleans(_strip(values, where, row)), where, row)
    if values.dtype.kind not in "biuf":
        raise UserError(f"{where}: labels of type {values.dtype}; expected whole numbers or strings")
    if values.dtype.kind == "b":
        return Labels(values, where, row)
    if values.dtype.kind == "u" and int(values.max(initial=0)) > np.iinfo(np.int64).max:
        return Labels(values.astype(np.str_), where, row)  # too large for int64
    if values.dtype.kind in "iu":
        return Labels(np.asarray(values.astype(np.int64)), where, row)
    numbers = values.astype(np.float64)
    fits = np.abs(numbers) < _TOO_LARGE  # False for NaN
    bad = np.flatnonzero(~fits | (numbers != np.rint(numbers)))
    if len(bad):
        first = int(bad[0])
        reason = ", because fedskew does classification only, not regression" if np.isfinite(numbers[first]) else ""
        raise UserError(f"{where}: label {values[first]} in {row(first)}; expected a whole number or a name{reason}")
    return Labels(values.astype(np.int64), where, row)


def _without_single_column(values: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Return the column of a matrix with one column, and other arrays unchanged."""
    return values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values


def _unbox(values: npt.NDArray[Any], where: str, row: Callable[[int], str]) -> npt.NDArray[np.generic]:
    """Convert an array of Python objects, as in pandas, to strings or numbers. Objects may be lists of equal length."""
    missing = np.array([is_gap(value) for value in values], dtype=bool)
    if missing.any():
        raise UserError(f"{where}: no label in {row(int(missing.argmax()))}; expected one for every sample")
    try:
        unboxed = np.array(values.tolist())
    except ValueError as error:
        raise UserError(f"{where}: labels of unequal length; expected one label per sample, or a matrix") from error
    strings = [isinstance(value, str) for value in values]
    if unboxed.dtype.kind == "O" or any(strings) != all(strings):
        odd = next((i for i, value in enumerate(values) if type(value) is not type(values[0])), 0)
        raise UserError(
            f"{where}: label {str(values[odd])!r} in {row(odd)}; expected only whole numbers, or only strings"
        )
    return unboxed


def _decode(values: npt.NDArray[np.bytes_], where: str, row: Callable[[int], str]) -> npt.NDArray[np.str_]:
    try:
        return np.char.decode(values, "utf-8")
    except UnicodeDecodeError as error:
        place = row(values.tolist().index(error.object))
        raise UserError(f"{where}: label {error.object!r} in {place} is not UTF-8; expected text") from error


def is_gap(value: Any) -> bool:
    """Return whether this is None, NaN or pandas' NA."""
    if isinstance(value, Sized):  # a text, or several labels
        return False
    try:
        return value is None or bool(value != value)
    except TypeError:  # pandas' NA is neither true nor false
        return True


class ClassesElsewhere(tuple[str, ...]):
    """The class names of other sites. They are added if a site's own labels have only one class."""


class StoredClasses(tuple[str, ...]):
    """The class names that come with the data. Labels that are numbers are positions among them."""

    __slots__ = ()

    def __new__(cls, names: Iterable[str]) -> StoredClasses:
        return super().__new__(cls, map(composed, names))


def class_list(option: object) -> tuple[str, ...] | None:
    """Parse the option `classes`: a list of names, or text with commas. A listed class may have no samples."""
    if option is None or isinstance(option, ClassesElsewhere | StoredClasses):
        return option
    names = option.split(",") if isinstance(option, str) else option
    if not isinstance(names, list | tuple):
        raise UserError(f"classes is {option!r}; expected the names of all classes, such as [benign, malignant]")
    return tuple(composed(str(name).strip()) for name in names)


def encode_labels(
    parts: Sequence[Labels], classes: Sequence[str] | None
) -> tuple[tuple[str, ...], list[npt.NDArray[np.int64]]]:
    """Return the class names and each part's class numbers. For several labels per sample, return each part's matrix.

    Without a class list, the classes are the values that occur in any part, sorted. With a list, labels are names or
    positions in it, and a listed class may have no samples. `_numbers_as_names` decides whether numbers are names.
    """
    matrices = [part.values for part in parts if part.values.ndim == 2]
    if len(matrices) == len(parts):
        named = None if isinstance(classes, ClassesElsewhere) else classes  # another site's order may be different
        return encode_matrix([matrix.astype(np.int64) for matrix in matrices], parts[0].where, named)
    if matrices:
        raise UserError(
            f"{parts[0].where}: one class per sample in one part and several labels in the other; expected one kind"
        )
    if isinstance(classes, ClassesElsewhere):
        return _encode_by_name(parts, classes)
    if classes is not None:
        parts = parts if isinstance(classes, StoredClasses) else _numbers_as_names(parts, classes)
        return tuple(classes), [_numbers_in_list(part, tuple(classes)) for part in parts]
    names, numbers = _encode_by_value(parts)
    if parts[0].values.dtype.kind != "U":
        _check_classes(len(names), sum(map(len, parts)), parts[0].where)
    return names, numbers


def _numbers_as_names(parts: Sequence[Labels], classes: Sequence[str]) -> Sequence[Labels]:
    """Return whole numbers as names, or leave them as positions in the user's list.

    They are names if the list contains all of them, or if it contains some of them and not all can be positions.
    """
    if any(part.values.dtype.kind != "i" for part in parts):
        return parts
    found = {int(value) for part in parts for value in np.unique(part.values)}
    listed = {value for value in found if str(value) in classes}
    if not listed or (listed != found and found <= set(range(len(classes)))):
        return parts
    return [replace(part, values=part.values.astype(np.str_)) for part in parts]


def _encode_by_value(
    parts: Sequence[Labels], known: Sequence[str] = ()
) -> tuple[tuple[str, ...], list[npt.NDArray[np.int64]]]:
    """Encode labels by the values that occur in any part, sorted. Labels in `known` are not gaps."""
    for part in parts:
        _refuse_gaps(part, known)
    kinds = {part.values.dtype.kind for part in parts}
    if len(kinds) == 2 and "b" in kinds:  # one part has booleans, and the other has numbers or names
        kind = np.str_ if "U" in kinds else np.int64
        parts, kinds = [replace(part, values=part.values.astype(kind)) for part in parts], kinds - {"b"}
    if len(kinds) > 1:
        raise UserError(
            f"{parts[0].where} and {parts[1].where}: labels are numbers in one and strings in the other; "
            "expected one kind"
        )
    found = np.unique(np.concatenate([part.values for part in parts]))
    return tuple(str(value) for value in found), [np.searchsorted(found, part.values) for part in parts]


def _refuse_gaps(part: Labels, known: Sequence[str]) -> None:
    """Refuse labels that mean a gap: those in the option `missing`, and texts such as NA among numbers or booleans.

    Labels in `known` are not refused.
    """
    if part.values.dtype.kind != "U" and not part.markers:
        return
    found = np.unique(part.values).tolist()
    gaps = [value for value in found if _is_marker(value, part.markers)]
    words = [text for text in found if isinstance(text, str) and text.lower() in GAPS]
    others = [text for text in found if text not in words]
    if others and all(read_number(str(text)) is not None or text in BOOLEANS for text in others):
        gaps += words
    gaps = [value for value in gaps if str(value) not in known]
    if not gaps:
        return
    first = int(np.isin(part.values, gaps).argmax())
    reason = ", because missing lists it" if _is_marker(part.values[first].item(), part.markers) else ""
    raise UserError(
        f"{part.where}: {str(part.values[first])!r} in {part.row(first)} is not a label{reason}; expected one for "
        "every sample; if it is a class, list all classes with the option 'classes'"
    )


def _is_marker(value: int | bool | str, markers: Sequence[str]) -> bool:
    """Return whether the option `missing` lists this label."""
    if isinstance(value, bool | str):
        return str(value) in markers
    return value in [read_number(marker) for marker in markers]


def _encode_by_name(
    parts: Sequence[Labels], elsewhere: ClassesElsewhere
) -> tuple[tuple[str, ...], list[npt.NDArray[np.int64]]]:
    """Encode labels by the classes that occur. If only one occurs, add the classes of other sites.

    If no other site has the class False or True, booleans become the classes 0 and 1.
    """
    if set(BOOLEANS).isdisjoint(elsewhere):
        parts = [replace(p, values=p.values.astype(np.int64)) if p.values.dtype.kind == "b" else p for p in parts]
    names, numbers = _encode_by_value(parts, elsewhere)
    if len(names) > 1:
        return names, numbers
    classes = tuple(elsewhere) if set(names) <= set(elsewhere) else (*names, *elsewhere)
    return classes, [np.full(len(part), classes.index(names[0]), np.int64) for part in numbers]


def _check_classes(different: int, samples: int, where: str) -> None:
    """Refuse whole numbers that look like measurements: many different ones, with few samples each."""
    if different > MANY_NUMBERS and samples < FEW_SAMPLES * different:
        raise UserError(
            f"{where}: {different} different numbers in {samples} labels look like measurements; expected classes, "
            "because fedskew does classification only, not regression; if they are classes, number them from 0 and "
            "name them with the option 'classes'"
        )


def known_classes(option: object, found: Sequence[str] | None) -> Sequence[str] | None:
    """Return the classes that the user lists, else those `found` in the data, else those of other sites."""
    listed = class_list(option)
    if found is None or not (listed is None or isinstance(listed, ClassesElsewhere)):
        return listed
    return StoredClasses(found)


def _strip(values: npt.NDArray[np.generic], where: str, row: Callable[[int], str]) -> npt.NDArray[np.generic]:
    stripped = np.char.strip(values.astype(np.str_))
    empty = np.flatnonzero(stripped == "")
    if len(empty):
        raise UserError(f"{where}: no label in {row(int(empty[0]))}; expected one for every sample")
    names = stripped.tolist()
    spelled = [composed(name) for name in names]
    return stripped if spelled == names else np.array(spelled)


def _read_booleans(texts: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Return booleans if all texts are True or False. Otherwise, return the texts."""
    if not np.isin(texts[:1], BOOLEANS).all() or not np.isin(texts, BOOLEANS).all():
        return texts
    return np.asarray(texts == "True")


def _numbers_in_list(part: Labels, classes: tuple[str, ...]) -> npt.NDArray[np.int64]:
    if len(set(classes)) < len(classes):
        twice = next(name for name in classes if classes.count(name) > 1)
        raise UserError(f"{part.where}: class {twice!r} is listed twice; expected different names")
    if not classes:
        raise UserError(f"{part.where}: the class list is empty; expected at least 2 names")
    kind = part.values.dtype.kind
    if kind == "U" or (kind == "b" and not set(BOOLEANS).isdisjoint(classes)):
        by_name = {name: number for number, name in enumerate(classes)}
        numbers = np.array([by_name.get(str(value), -1) for value in part.values], dtype=np.int64)
        expected = ", ".join(classes[:5]) + (", …" if len(classes) > 5 else "")
    else:
        numbers = part.values.astype(np.int64)
        expected = f"0 to {len(classes) - 1}"
    outside = np.flatnonzero((numbers < 0) | (numbers >= len(classes)))
    if len(outside):
        first = int(outside[0])
        raise UserError(f"{part.where}: label {str(part.values[first])!r} in {part.row(first)}; expected {expected}")
    return numbers
