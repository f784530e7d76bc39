"""Read a column of a user's table as numbers or categories, and refuse columns that cannot be inputs."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from fedskew.data.spelling import composed
from fedskew.data.table_encoding import Numbers, Strings
from fedskew.errors import UserError

Array = npt.NDArray[np.generic]

GAPS = ("", "na", "n/a", "#n/a", "nan", "<na>", "null", "none", "?")
"""Cells that are gaps in a column of numbers, whatever their case. Among categories, only an empty cell is a gap.

The option `missing` adds other gaps, for numbers and for categories."""
BOOLEANS = ("False", "True")
"""The names of boolean categories and classes."""
_SPELLINGS = (("False", "false", "FALSE", "0"), ("True", "true", "TRUE", "1"))
"""How files, people and other versions of fedskew spell false and true."""
MOST_CATEGORIES = 100
"""A column with more distinct texts is refused, unless the option `categorical`, the column's type or an encoding says
that they are categories. A table's only input column is read as text instead."""
FEW_ROWS = 20
"""With fewer rows, all values of a column may differ by chance. The column is then not refused as an identifier."""

_MONTH = r"(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_DATE = re.compile(
    r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}([ T].*)?|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2})([ T].*)?|"
    r"\d{1,2}:\d{2}(:\d{2}.*)?( ?[ap]\.?m\.?)?|"
    rf"\d{{1,2}}[- .]+{_MONTH}[-, ]+(\d{{4}}|\d{{2}})( .*)?|{_MONTH} \d{{1,2}},? \d{{4}}( .*)?",
    re.IGNORECASE,
)
_DECIMAL_COMMA = re.compile(r"[-+]?\d+(,\d+)?")
_HAS_DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+")
_WITH_UNIT = re.compile(r"[-+]?\d+(?:[.,]\d+)?\s*([^\d\s.,][^\d\s]*)")
_FEW_VALUES = 10
"""With at most this many distinct texts, values such as 4th and 5th are categories, not numbers with a unit."""
_WHOLE = re.compile(r"(-?\d+)(?:[.,]0)?")
_LARGEST_EXACT = 2.0**53
"""Above this, different whole numbers may be the same float."""
_UNNAMED = re.compile(r"\s*|Unnamed: \d+|__index_level_\d+__")


@dataclass(frozen=True)
class EncodedImages:
    """A column of images, each as the bytes of an image file."""

    files: list[bytes]


@dataclass(frozen=True, eq=False)
class Cells:
    """A column of a CSV file. Its cells can be read as numbers or as texts."""

    content: Any
    """The cells: a list or a pyarrow array."""
    decimal: str = "."

    def __len__(self) -> int:
        return len(self.content)

    @cached_property
    def strings(self) -> Strings:
        """The cells as texts, without surrounding spaces. An empty cell is a gap."""
        return make_strings(self.content)

    def cast(self, gaps: Iterable[str]) -> Numbers | None:
        """Parse the cells with pyarrow, which is fast. NaN is a gap.

        Return None if pyarrow did not read the file, if the decimal mark is a comma, or if pyarrow cannot parse all
        cells. `parse_numbers` may still find that they are numbers. `gaps` lists the texts that mean a gap, in lower
        case.
        """
        return None if isinstance(self.content, list) or self.decimal != "." else _cast(self.content, gaps)


Column = Array | Strings | Cells | EncodedImages
"""Numbers (one or more per row), texts, cells of a CSV file, or images."""


def make_strings(texts: Any, categorical: bool = False) -> Strings:
    """Number the distinct texts of a column. `texts` is a list, with None for gaps, or a pyarrow array."""
    if not isinstance(texts, list | tuple | np.ndarray):
        encoded = texts.dictionary_encode()
        codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        raw: list[str | None] = encoded.dictionary.to_pylist()
    else:
        numbers: dict[str | None, int] = {}
        codes = np.array([numbers.setdefault(text, len(numbers)) for text in texts], np.int64)
        raw = list(numbers)
    stripped = [None if text is None else composed(text.strip()) for text in raw]
    values = tuple(dict.fromkeys(text for text in stripped if text))
    index = {text: number for number, text in enumerate(values)}
    lookup = np.array([*(index.get(text or "", -1) for text in stripped), -1], np.int64)  # code −1 reads the last entry
    return Strings(values, lookup[codes], categorical)


def boolean_strings(values: Iterable[bool | None], categorical: bool = False) -> Strings:
    """Write booleans as the texts False and True. None is a gap."""
    return make_strings([None if value is None else BOOLEANS[bool(value)] for value in values], categorical)


def parse_numbers(column: Strings, gaps: Iterable[str], decimal: str = ".") -> tuple[Numbers, int | None]:
    """Return the numbers that the texts spell, with NaN for gaps and other texts.

    Also return the index of the first row whose text is neither a number nor a gap, or None.
    """
    parsed = np.full(len(column.values) + 1, np.nan)  # the code of a gap, −1, reads the last entry
    odd = np.zeros(len(column.values) + 1, np.bool_)
    missing = frozenset(gaps)
    for code, text in enumerate(column.values):
        if text.lower() in missing:
            continue
        number = read_number(text, decimal)
        odd[code] = number is None
        parsed[code] = np.nan if number is None else number
    rows = odd[column.codes]
    return parsed[column.codes], int(rows.argmax()) if rows.any() else None


def read_number(text: str, decimal: str = ".") -> float | None:
    """Return the number that the text spells, or None."""
    if "_" in text or (decimal != "." and "." in text):
        return None
    try:
        return float(text.replace(decimal, ".") if decimal != "." else text)
    except ValueError:
        return None


def _cast(cells: Any, gaps: Iterable[str]) -> Numbers | None:
    """Parse a pyarrow array of texts as numbers. Return None if a cell is neither a gap nor a number for pyarrow."""
    import pyarrow
    from pyarrow import compute

    found = _cast_all(cells)
    if found is None:
        trimmed = compute.ascii_trim_whitespace(cells)
        missing = compute.is_in(compute.ascii_lower(trimmed), value_set=pyarrow.array(sorted({*gaps}), cells.type))
        found = _cast_all(compute.if_else(missing, None, trimmed))
    return found


def _cast_all(cells: Any) -> Numbers | None:
    """Parse a pyarrow array of texts and nulls as numbers. Return None if a text is not a number, or is NaN.

    NaN is left to the caller, because pyarrow also reads nan(x) as NaN, and Python does not.
    """
    import pyarrow
    from pyarrow import compute

    try:
        numbers = cells.cast(pyarrow.float64())
    except pyarrow.ArrowInvalid:
        return None
    if compute.any(compute.is_nan(numbers)).as_py():
        return None
    found: Numbers = numbers.to_numpy(zero_copy_only=False).astype(np.float64)
    return found


@dataclass(frozen=True)
class ColumnReader:
    """Reads the input columns of one table."""

    where: str
    """The source, for error messages."""
    row: Callable[[int], str]
    """Describes a row by its index, for error messages."""
    missing: tuple[str, ...] = ()
    """The values of the option `missing`: texts and numbers that mean a gap."""
    categorical: frozenset[str] = frozenset()
    """Columns of categories that may look like numbers."""
    listed_inputs: frozenset[str] = frozenset()
    """Columns that the user listed as inputs. They are not refused as identifiers."""

    def read(self, name: str, column: Column, expected: str | None = None) -> Array | Strings:
        """Return the column as numbers, in which NaN is a gap, or as categories.

        `expected` is "number" or "category" if an encoding or the training table determines the column's kind. It is
        None if the kind is still open.
        """
        if isinstance(column, EncodedImages):
            raise UserError(f"{self.where}: column {name!r} holds images; expected numbers or categories")
        if isinstance(column, np.ndarray) and column.ndim > 1:
            raise UserError(f"{self.where}: column {name!r} holds arrays; expected numbers or categories")
        if expected == "category" or (expected is None and self._is_categorical(name, column)):
            return self._categories(column)
        if isinstance(column, np.ndarray):
            return self._clean_numbers(name, column.astype(np.float64))
        numbers = self._numbers(name, column, expected)
        if numbers is not None:
            return self._clean_numbers(name, numbers)
        strings = self._texts(column)
        self._refuse_unfit_texts(name, strings, isinstance(column, Cells))
        return strings

    def read_text_or_numbers(self, name: str, column: Column) -> Array | Strings:
        """Read a table's only input column. It may be free text."""
        assert isinstance(column, Strings | Cells)
        numbers = self._numbers(name, column, None)
        if numbers is not None:
            return numbers
        texts = self._texts(column)
        if not texts.categorical:
            self._refuse_measurements(name, texts, f"read it as text with text={name}", isinstance(column, Cells))
        return texts

    def _is_categorical(self, name: str, column: Column) -> bool:
        return name in self.categorical or (isinstance(column, Strings) and column.categorical)

    def _categories(self, column: Array | Strings | Cells) -> Strings:
        return self._texts(array_strings(column) if isinstance(column, np.ndarray) else column)

    def _texts(self, column: Strings | Cells) -> Strings:
        """Return a column's texts. Texts in `missing` become gaps."""
        strings = column.strings if isinstance(column, Cells) else column
        return spell_booleans(_with_gaps(strings, set(self.missing)))

    def _numbers(self, name: str, column: Strings | Cells, expected: str | None) -> Numbers | None:
        """Return the column as numbers, or None if it holds categories.

        A gap word is a text that means a gap, such as NA. A wrong text is neither a number nor a gap word. A column
        with wrong texts is refused if it has fewer wrong texts than numbers, and if wrong texts and gap words together
        fill fewer than half of its rows. If `expected` is "number", any wrong text is refused.
        """
        gaps = (*GAPS, *(marker.lower() for marker in self.missing))
        if isinstance(column, Cells) and (found := column.cast(gaps)) is not None:
            return found
        decimal = column.decimal if isinstance(column, Cells) else "."
        strings = column.strings if isinstance(column, Cells) else column
        numbers, odd = parse_numbers(strings, gaps, decimal)
        if odd is None:
            return numbers if isinstance(column, Cells) or (strings.codes >= 0).any() or expected else None
        if (found := _booleans(strings)) is not None:
            return found
        known = ~np.isnan(numbers)
        texts = ~known & (strings.codes >= 0)
        words = np.array([*(text.lower() in gaps for text in strings.values), False])[strings.codes]
        is_mostly_numbers = (texts & ~words).sum() < known.sum() and 2 * texts.sum() < len(texts)
        if is_mostly_numbers or expected:
            text = strings.values[strings.codes[odd]]
            raise UserError(
                f"{self.where}: {text!r} in column {name!r}, {self.row(odd)}; expected a number"
                f"{', as in the training table or encoding' if expected else ''}; {_number_remedy(text, column)}"
            )
        return None

    def _clean_numbers(self, name: str, numbers: Numbers) -> Numbers:
        """Turn the numbers in `missing` into NaN, and refuse infinite values."""
        for marker in (read_number(text) for text in self.missing):
            if marker is not None:
                numbers = np.where(numbers == marker, np.nan, numbers)
        bad = np.isinf(numbers)
        if bad.any():
            raise UserError(
                f"{self.where}: infinite value in column {name!r}, {self.row(int(bad.argmax()))}; "
                "expected finite numbers or missing values"
            )
        return numbers

    def _refuse_unfit_texts(self, name: str, column: Strings, is_csv: bool) -> None:
        """Refuse texts that are not categories: dates, numbers with a comma or a unit, identifiers and free text."""
        rows = int((column.codes >= 0).sum())
        if not rows:
            return
        example, remedy = repr(column.values[0]), f"leave it out with drop={name}"
        self._refuse_measurements(name, column, remedy, is_csv)
        if len(column.values) == rows >= FEW_ROWS and name not in self.listed_inputs:
            raise UserError(
                f"{self.where}: column {name!r} has a different text in each row, such as {example}, like an "
                f"identifier; {remedy}, or use it alone with text={name}"
            )
        if len(column.values) > MOST_CATEGORIES:
            raise UserError(
                f"{self.where}: column {name!r} has {len(column.values)} different texts, such as {example}; expected "
                f"at most {MOST_CATEGORIES} categories; {remedy}, use it alone with text={name}, or keep it with "
                f"categorical={name}"
            )

    def _refuse_measurements(self, name: str, column: Strings, remedy: str, is_csv: bool) -> None:
        """Refuse texts that are dates, or numbers with a comma or a unit.

        The message suggests the option `decimal` only for a CSV file, because other data do not have it.
        """
        if not column.values:
            return
        if self._are_mostly(column, _DATE):
            example = next(text for text in column.values if _DATE.fullmatch(text))
            raise UserError(
                f"{self.where}: column {name!r} holds dates or times such as {example!r}; expected numbers or "
                f"categories; turn them into numbers such as days, or {remedy}"
            )
        if all(_DECIMAL_COMMA.fullmatch(text) for text in column.values):
            example = next(text for text in column.values if "," in text)
            way_out = 'set decimal=","' if is_csv else "turn the texts into numbers"
            raise UserError(
                f"{self.where}: column {name!r} holds {example!r}; expected numbers; if the comma is the decimal mark, "
                f"{way_out}"
            )
        if unit := _common_unit(column.values):
            raise UserError(
                f"{self.where}: column {name!r} holds numbers with the unit {unit!r}, such as {column.values[0]!r}; "
                f"expected numbers; remove the unit, or {remedy}"
            )

    def _are_mostly(self, column: Strings, pattern: re.Pattern[str]) -> bool:
        matches = np.array([*(bool(pattern.fullmatch(text)) for text in column.values), False])
        return bool(2 * matches[column.codes].sum() > (column.codes >= 0).sum())


def _number_remedy(text: str, column: Strings | Cells) -> str:
    """Say what to do about a text that is not a number. Only CSV files have the option `decimal`."""
    if not _HAS_DECIMAL_COMMA.fullmatch(text):
        return f"if it stands for a gap, set missing={text}"
    if isinstance(column, Strings):
        return "if the comma is the decimal mark, turn the texts into numbers"
    return 'if the comma is the decimal mark, set decimal=","'


def refuse_identifier(where: str, name: str, numbers: Numbers, dropped: str) -> None:
    """Refuse whole numbers that are all different, such as row numbers. They identify a sample, not its class.

    `dropped` is the column that the user can leave out: `name`, or the column of lists that `name` was split from.
    """
    known = numbers[~np.isnan(numbers)]
    if len(known) < FEW_ROWS or (known != np.rint(known)).any():
        return
    if len(np.unique(known)) == len(known):
        raise UserError(
            f"{where}: column {name!r} has a different whole number in each row, like a row number or an identifier; "
            f"leave it out with drop={dropped}, or list all input columns with columns"
        )


def is_unnamed(name: str) -> bool:
    """Return whether a column has no name, or the name that pandas gives to an index."""
    return _UNNAMED.fullmatch(name) is not None


def number_text(value: float | int) -> str:
    """Write a number as a category: 3.0 as 3."""
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def array_strings(column: Array) -> Strings:
    """Return one number or boolean per row as texts. NaN is a gap."""
    values = column.reshape(len(column)).tolist()
    if column.dtype.kind == "b":
        return boolean_strings(values)
    return make_strings([None if value != value else number_text(value) for value in values])


def spell_booleans(column: Strings) -> Strings:
    """Spell true and false as True and False, because files spell them in several ways."""
    return _respell(column, {text: text.capitalize() for text in column.values if text.lower() in ("true", "false")})


def spell_whole_numbers(column: Strings) -> Strings:
    """Spell 1.0 as 1 if all texts are whole numbers, because pandas writes 1.0 if a cell of the column is empty.

    A column that has both 1.0 and 1 is not changed.
    """
    found = [_WHOLE.fullmatch(text) for text in column.values]
    words = {text: match[1] for text, match in zip(column.values, found, strict=True) if match}
    return _respell(column, words) if len(set(words.values())) == len(column.values) else column


def spell_as_known(column: Strings, categories: Collection[str]) -> Strings:
    """Spell booleans and whole numbers as in `categories`.

    There, people or other versions of fedskew may have written true, TRUE or 1, and 1.0 for 1.
    """
    column = _respell(column, _booleans_as_known(column, categories))
    return _respell(column, _whole_numbers_as_known(column, categories))


def _booleans_as_known(column: Strings, categories: Collection[str]) -> dict[str, str]:
    found = {text: spellings for spellings in _SPELLINGS for text in spellings if text in column.values}
    known = {text: next((s for s in spellings if s in categories), text) for text, spellings in found.items()}
    return {text: new for text, new in known.items() if text not in categories}


def _whole_numbers_as_known(column: Strings, categories: Collection[str]) -> dict[str, str]:
    """Map texts such as 1.0 to categories such as 1, or the reverse. Two texts never become one."""
    known: dict[str, list[str]] = {}
    for category in categories:
        if match := _WHOLE.fullmatch(category):
            known.setdefault(match[1], []).append(category)
    found = {text: known.get(match[1], []) for text in column.values if (match := _WHOLE.fullmatch(text))}
    words = {text: same[0] for text, same in found.items() if len(same) == 1 and text not in categories}
    targets = [*words.values(), *column.values]
    return {text: new for text, new in words.items() if targets.count(new) == 1}


def _respell(column: Strings, words: Mapping[str, str]) -> Strings:
    """Replace texts by others. `words` maps old texts to new ones. Texts that become equal are one category."""
    if all(old == new for old, new in words.items()):
        return column
    values = tuple(dict.fromkeys(words.get(text, text) for text in column.values))
    place = {value: number for number, value in enumerate(values)}
    lookup = np.array([*(place[words.get(text, text)] for text in column.values), -1], np.int64)
    return Strings(values, lookup[column.codes], column.categorical)


def _with_gaps(column: Strings, markers: set[str]) -> Strings:
    """Turn the texts in `markers` into gaps."""
    if not markers & set(column.values):
        return column
    kept = tuple(value for value in column.values if value not in markers)
    place = {value: number for number, value in enumerate(kept)}
    lookup = np.array([*(place.get(value, -1) for value in column.values), -1], np.int64)
    return Strings(kept, lookup[column.codes], column.categorical)


def _common_unit(texts: Sequence[str]) -> str | None:
    """Return the unit that follows the number in all texts, or None."""
    if len(texts) <= _FEW_VALUES:
        return None
    matches = [_WITH_UNIT.fullmatch(text) for text in texts]
    units = {None if match is None else match[1] for match in matches}
    return units.pop() if len(units) == 1 else None


def _booleans(column: Strings) -> Numbers | None:
    """Return a column of true and false as 1 and 0, or None if it has other texts."""
    words = {"true": 1.0, "false": 0.0}
    if not column.values or any(text.lower() not in words for text in column.values):
        return None
    numbers = np.array([*(words[text.lower()] for text in column.values), np.nan])
    return numbers[column.codes]


def _exact_integers(column: Strings) -> npt.NDArray[np.int64] | None:
    """Return a column without gaps as integers. Return None if a text is not an integer, or too large for int64."""
    try:
        return np.array([int(text) for text in column.values], np.int64)[column.codes]
    except (ValueError, OverflowError):
        return None


def _label_numbers(column: Strings, decimal: str) -> Array | None:
    """Return numbers, or None if a cell is empty or not a number.

    The numbers are exact if all of them are written as integers and fit int64.
    """
    numbers, odd = parse_numbers(column, (), decimal)
    if odd is not None or (column.codes < 0).any():
        return None
    exact = _exact_integers(column) if (np.abs(numbers) >= _LARGEST_EXACT).any() else None
    return numbers if exact is None else exact


def as_label_values(column: Array | Strings | Cells) -> Sequence[Any] | npt.NDArray[Any]:
    """Return a column's values as labels. A gap is NaN among numbers, and None among texts.

    The cells of a CSV file are numbers if all of them are numbers, else texts.
    """
    if isinstance(column, np.ndarray):
        return column
    if isinstance(column, Cells):
        numbers = _label_numbers(column.strings, column.decimal)
        if numbers is not None:
            return numbers
        column = column.strings
    return np.array(column.to_list(), dtype=object)
