"""Load users' tables. Find the label column, and detect what the inputs are: numbers, categories, text or images."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedskew.data.dataset import Dataset
from fedskew.data.images import BitDepths, Pixels, Size, decode_all, parse_bits, parse_size, same_channels
from fedskew.data.own.arrays import convert_inputs, refuse_unused_options
from fedskew.data.own.assembly import Inputs, Part, assemble, number_sites
from fedskew.data.own.columns import (
    Array,
    Cells,
    Column,
    ColumnReader,
    EncodedImages,
    array_strings,
    as_label_values,
    is_unnamed,
    number_text,
    refuse_identifier,
    spell_as_known,
    spell_booleans,
    spell_whole_numbers,
)
from fedskew.data.own.fields import load_fields, token_columns
from fedskew.data.own.labels import Labels, known_classes, read_labels
from fedskew.data.own.table_columns import (
    Table,
    columns_to_drop,
    name_categories,
    number_as_name,
    parse_columns,
    rename_columns,
    select_columns,
    split_lists,
    split_names,
)
from fedskew.data.published.text import LENGTH, VOCABULARY
from fedskew.data.spelling import composed
from fedskew.data.table_encoding import DraftEncoding, RawTable, Strings, TableEncoding, read_encoding
from fedskew.errors import UserError, shorten, unknown

LABEL_NAMES = ("label", "labels", "class", "target", "y")


class ColumnMismatch(UserError):
    """A table's columns are not those of its encoding. The message has column names, but no values."""


@dataclass(frozen=True)
class _ChosenInputs:
    """The columns that are the inputs, and what they hold."""

    kind: Literal["table", "text", "encoded", "pixels"]
    """`encoded` is a column of image files, and `pixels` a column of arrays."""
    names: tuple[str, ...]


def load_tables(
    name: str,
    tables: list[Table],
    *,
    label: str | Sequence[str] | None = None,
    text: str | None = None,
    site: str | None = None,
    test_fraction: float | None = None,
    image_size: object = None,
    image_bits: object = None,
    layout: str | None = None,
    length: int | None = None,
    vocabulary: int | None = None,
    classes: object = None,
    rename: object = None,
    columns: object = None,
    drop: object = None,
    categorical: object = None,
    missing: object = None,
    encoding: object = None,
) -> Dataset:
    """Load one table, or a training and a test table.

    `label` names the label column, or lists several columns of 0 and 1. `site` names the column that says where a
    sample is from. The inputs are one of these:

    - columns of numbers and categories
    - one column of texts
    - one column of images
    - columns of token ids
    """
    for table in tables:
        _require_rows(table)
    label, text, site = map(number_as_name, (label, text, site))
    for option, column in (("text", text), ("site", site)):
        if column is not None and not isinstance(column, str):
            raise UserError(f"{option} is {column!r}; expected the name of a column")
    tables = [rename_columns(table, rename) for table in tables]
    if label is not None and not isinstance(label, str):
        listed_labels = parse_columns("label", label, tables[0])
        tables, label = [_join_labels(table, listed_labels) for table in tables], _JOINED_LABELS
        classes = known_classes(classes, listed_labels)
    is_label_given = label is not None
    label = _label_column(tables[0], label)
    _check_site(tables[0], site, label)
    label_and_site = (label,) if site is None else (label, site)
    tables = [name_categories(table, label) for table in tables]
    tables = [
        select_columns(table, columns, columns_to_drop(drop, table, tables[0]), label_and_site) for table in tables
    ]

    train, where = tables[0], tables[0].where
    given = {"length": length, "vocabulary": vocabulary, "image_size": image_size, "image_bits": image_bits}
    given |= {
        "layout": layout,
        "categorical": categorical,
        "missing": missing,
        "encoding": _encoding_to_check(encoding),
    }
    listed_inputs = frozenset(() if columns is None else parse_columns("columns", columns, train))
    candidates = {n: c for n, c in train.columns.items() if n not in label_and_site}
    class_names = known_classes(classes, train.class_names.get(label))
    if text is None and (tokens := token_columns(candidates)):
        _check_given_options(where, "tokens", given)
        notes = _unused_columns(name, where, candidates, tokens, listed_inputs)
        pairs = [({n: _column(table, n) for n in tokens}, _label_values(table, label)) for table in tables]
        site_names, numbers = ((), None) if site is None else number_sites([_sites(table, site) for table in tables])
        dataset = load_fields(
            name, pairs, test_fraction=test_fraction, classes=class_names, vocabulary=vocabulary, sites=numbers
        )
        return replace(dataset, sites=site_names, site_column=site or "", notes=notes)

    known = None if encoding is None else read_encoding(encoding)
    like_labels = [n for n in candidates if n.lower() in LABEL_NAMES and n not in listed_inputs]
    categories = frozenset(() if categorical is None else parse_columns("categorical", categorical, train))
    listed_inputs, categories = (split_names(n, train) for n in (listed_inputs, categories | train.categories))
    tables = [split_lists(table, train, label_and_site) for table in tables]
    candidates = {n: c for n, c in tables[0].columns.items() if n not in label_and_site}
    markers = _markers(missing)
    readers = [ColumnReader(table.where, table.row, markers, categories, listed_inputs) for table in tables]
    inputs = _choose_inputs(tables[0], label_and_site, text, readers[0], known)
    if inputs.kind in ("table", "text") and not is_label_given and text is None and known is None:
        _refuse_second_label(where, label, like_labels)
    _check_given_options(where, inputs.kind, given)
    notes = _unused_columns(name, where, candidates, inputs.names, listed_inputs)

    labels = [_labels(table, label, markers) for table in tables]
    sites = [None if site is None else _sites(table, site) for table in tables]

    def make_parts(inputs_by_table: Sequence[Inputs]) -> list[Part]:
        return [Part(x, y, t.where, s) for x, y, t, s in zip(inputs_by_table, labels, tables, sites, strict=True)]

    if inputs.kind == "text":
        parts = make_parts([_text(table, inputs.names[0]) for table in tables])
        form = (LENGTH if length is None else length, VOCABULARY if vocabulary is None else vocabulary)
        return replace(assemble(name, "text", parts, class_names, test_fraction, *form, site=site), notes=notes)
    if inputs.kind == "table":
        parts = make_parts(_read_inputs(tables, readers, inputs.names, known))
        return assemble(name, "table", parts, class_names, test_fraction, site=site, encoding=known)
    if inputs.kind == "encoded":
        size, depths, layout = parse_size(image_size), BitDepths(parse_bits(image_bits)), "nchw"
        pixels: list[Array] = [*same_channels([_decoded(table, inputs.names[0], size, depths) for table in tables])]
        notes = (*notes, *depths.notes(name))
    else:
        pixels = [_pixels(table, inputs.names[0]) for table in tables]
    kind, images = convert_inputs(pixels, [table.where for table in tables], layout)
    return replace(assemble(name, kind, make_parts(images), class_names, test_fraction, site=site), notes=notes)


_UNUSED_OPTIONS = {
    "tokens": ("token ids", ("length", "image_size", "image_bits", "layout", "categorical", "missing", "encoding")),
    "text": ("texts", ("image_size", "image_bits", "layout", "categorical", "missing", "encoding")),
    "table": ("numbers and categories", ("length", "vocabulary", "image_size", "image_bits", "layout")),
    "encoded": ("image files", ("length", "vocabulary", "layout", "categorical", "missing")),
    "pixels": ("arrays of pixels", ("length", "vocabulary", "image_size", "image_bits", "categorical", "missing")),
}
"""For each kind of inputs, its name in messages and the options that have no effect on it."""


def _encoding_to_check(encoding: object) -> object:
    """Return the option `encoding`, or None if it is a `TableEncoding`.

    A deployment passes a `TableEncoding` for any table, and checks the inputs itself. So it is not refused
    if it has no effect.
    """
    return None if isinstance(encoding, TableEncoding) else encoding


def _check_given_options(where: str, kind: str, given: Mapping[str, object]) -> None:
    """Refuse an option that would have no effect on inputs of this kind."""
    inputs, unused = _UNUSED_OPTIONS[kind]
    refuse_unused_options(where, inputs, {option: given[option] for option in unused})


def _unused_columns(
    name: str, where: str, others: Iterable[str], inputs: Sequence[str], listed: Container[str]
) -> tuple[str, ...]:
    """Return a note about columns that are not inputs. Refuse those that the user listed as inputs."""
    unused = [column for column in others if column not in inputs]
    if refused := [column for column in unused if column in listed]:
        raise UserError(
            f"{where}: columns lists {refused[0]!r}, which cannot be an input together with {shorten(inputs)}; "
            "leave it out"
        )
    return (f"{name}: the inputs are {shorten(inputs)}; not used: {shorten(unused)}",) if unused else ()


def _require_rows(table: Table) -> None:
    column = next(iter(table.columns.values()), None)
    rows = 0 if column is None else len(column.files if isinstance(column, EncodedImages) else column)
    if not rows:
        raise UserError(f"{table.where}: no samples")


def _markers(missing: object) -> tuple[str, ...]:
    """Parse the option `missing`: texts and numbers that mean a gap."""
    if missing is None:
        return ()
    listed = missing.split(",") if isinstance(missing, str) else [missing]
    if isinstance(missing, list | tuple):
        listed = list(missing)
    if not all(isinstance(marker, str | int | float | np.number) for marker in listed):
        raise UserError(f"missing is {missing!r}; expected values that stand for a gap, such as [-999, unknown]")
    texts = [composed(str(marker).strip()) for marker in listed]
    # A category -999.0 is written -999.
    numbers = [number_text(float(m)) for m in listed if isinstance(m, float | np.floating) and np.isfinite(m)]
    return tuple(dict.fromkeys([*texts, *numbers]))


def _check_site(table: Table, site: str | None, label: str) -> None:
    if site is None:
        return
    if site not in table.columns:
        raise unknown(f"site column in {table.where}:", str(site), [name for name in table.columns if name != label])
    if site == label:
        raise UserError(f"site is {site!r}, which is the label; expected another column")


def _label_column(table: Table, label: str | None) -> str:
    """Find the label column: `label`, or the only `ClassLabel` column, or a column with one of the `LABEL_NAMES`.

    If several columns have such names, the order of `LABEL_NAMES` decides. Refuse a table if its only `ClassLabel`
    column has no such name, but another column has one.
    """
    if label is not None:
        if label not in table.columns:
            raise unknown(f"label column in {table.where}:", str(label), table.columns)
        return label
    by_name = next((column for name in LABEL_NAMES for column in table.columns if column.lower() == name), None)
    if len(table.class_names) == 1:
        with_names = next(iter(table.class_names))
        if by_name not in (None, with_names) and with_names.lower() not in LABEL_NAMES:
            raise UserError(
                f"{table.where}: column {with_names!r} has class names, but column {by_name!r} has the name of a "
                "label; name the label column with label=NAME"
            )
        return with_names
    if by_name is not None:
        return by_name
    raise UserError(
        f"{table.where}: no column named {', '.join(LABEL_NAMES)}; name the label column with label=NAME; "
        f"columns: {', '.join(table.columns)}"
    )


def _refuse_second_label(where: str, label: str, like_labels: Sequence[str]) -> None:
    """Refuse inputs whose name is in `LABEL_NAMES`, because they may contain the class."""
    if like_labels:
        raise UserError(
            f"{where}: columns {label!r} and {like_labels[0]!r} both have the name of a label; name the label column "
            f"with label=NAME, and leave the other one out with drop=NAME if it also contains the class"
        )


_JOINED_LABELS = "labels"
"""The name of the joined column of several labels."""


def _join_labels(table: Table, names: Sequence[str]) -> Table:
    """Replace several columns of labels by one column with a list of labels per sample."""
    if len(names) < 2:
        raise UserError(f"label is {list(names)!r}; expected one column's name, or a list of several columns")
    joined = np.stack([_label_values(table, name) for name in names], axis=1)
    others = {name: column for name, column in table.columns.items() if name not in names}
    if _JOINED_LABELS in others:
        raise UserError(
            f"{table.where}: the label columns are joined into a column {_JOINED_LABELS!r}, but the table has another "
            "column of that name; give it another name with rename"
        )
    return replace(table, columns={**others, _JOINED_LABELS: joined})


def _choose_inputs(
    table: Table,
    label_and_site: tuple[str, ...],
    text: str | None,
    reader: ColumnReader,
    encoding: TableEncoding | None,
) -> _ChosenInputs:
    others = {name: column for name, column in table.columns.items() if name not in label_and_site}
    if text is not None:
        if not isinstance(others.get(text), Strings | Cells):
            texts = [name for name, column in others.items() if isinstance(column, Strings | Cells)]
            raise unknown(f"text column in {table.where}:", str(text), texts or others)
        return _ChosenInputs("text", (text,))
    if encoding is not None:
        _check_columns(others, encoding)
        return _ChosenInputs("table", encoding.names)
    encoded = [name for name, column in others.items() if isinstance(column, EncodedImages)]
    pixels = [name for name, column in others.items() if isinstance(column, np.ndarray) and column.ndim > 2]
    if len(encoded + pixels) > 1:
        raise UserError(f"{table.where}: columns {', '.join(encoded + pixels)} all hold images; expected one")
    if encoded or pixels:
        return _ChosenInputs("encoded" if encoded else "pixels", (*encoded, *pixels))
    for name in others:
        _require_usable(table, name)
    if not others:
        listed = " and ".join(
            f"the {use} {name!r}" for use, name in zip(("label", "site"), label_and_site, strict=False)
        )
        raise UserError(f"{table.where}: no column besides {listed}; expected inputs")
    only = next(iter(others))
    if len(others) == 1 and isinstance(others[only], Strings | Cells) and only not in reader.categorical:
        read = reader.read_text_or_numbers(only, others[only])
        if isinstance(read, Strings) and not read.categorical:
            return _ChosenInputs("text", (only,))
    return _ChosenInputs("table", tuple(others))


def _check_columns(others: Mapping[str, Column], encoding: TableEncoding) -> None:
    """Refuse a table whose columns are not those of the encoding."""
    strange = [name for name in others if name not in encoding.names]
    lacking = [name for name in encoding.names if name not in others]
    found = [f"columns {shorten(strange)} are not among {shorten(encoding.names)}"] if strange else []
    found += [f"columns {shorten(lacking)} are missing"] if lacking else []
    if found:
        remedy = "; leave others out with drop, or rename them" if strange else ""
        raise ColumnMismatch(f"{'; '.join(found)}; expected the columns of the encoding{remedy}")


def _require_usable(table: Table, name: str) -> None:
    if is_unnamed(name):
        raise UserError(
            f"{table.where}: column {name!r} has no name, like the index that pandas writes; leave it out with "
            f'drop="{name}", or write the file with index=False'
        )
    if name in table.mistakes:
        raise UserError(table.mistakes[name])


def _column(table: Table, name: str) -> Column:
    if name not in table.columns:
        raise UserError(f"{table.where}: no column {name!r}, but the training data has one; expected the same columns")
    return table.columns[name]


def _labels(table: Table, name: str, markers: tuple[str, ...]) -> Labels:
    labels = read_labels(_label_values(table, name), f"{table.where} column {name!r}", table.row)
    return replace(labels, markers=markers)


def _label_values(table: Table, name: str) -> npt.NDArray[np.generic]:
    column = _column(table, name)
    if isinstance(column, EncodedImages):
        raise UserError(f"{table.where}: the label column {name!r} holds images; expected numbers or strings")
    if name in table.mistakes:
        raise UserError(f"{table.mistakes[name].partition(';')[0]}; expected labels: whole numbers or names")
    return np.asarray(as_label_values(column))


def _sites(table: Table, name: str) -> Strings:
    """Return the site of each sample."""
    column = _column(table, name)
    if isinstance(column, EncodedImages) or name in table.mistakes:
        raise UserError(f"{table.where}: the site column {name!r} holds no names; expected numbers or strings")
    if isinstance(column, np.ndarray):
        if column.ndim > 1:
            raise UserError(f"{table.where}: the site column {name!r} holds lists; expected numbers or strings")
        column = array_strings(column)
    sites = spell_booleans(column.strings if isinstance(column, Cells) else column)
    gaps = sites.codes < 0
    if gaps.any():
        raise UserError(
            f"{table.where}: no value in the site column {name!r}, {table.row(int(gaps.argmax()))}; "
            "expected a site for every sample"
        )
    return sites


def _text(table: Table, name: str) -> list[str]:
    column = _column(table, name)
    if not isinstance(column, Strings | Cells):
        raise UserError(f"{table.where}: column {name!r} holds no strings; expected text as in the training data")
    if isinstance(column, Cells):
        content = column.content
        return [composed(text) for text in (content if isinstance(content, list) else content.to_pylist())]
    texts = column.to_list()
    if None in texts:
        raise UserError(
            f"{table.where}: no value in column {name!r}, {table.row(texts.index(None))}; expected one for every sample"
        )
    return [str(text) for text in texts]


def _decoded(table: Table, name: str, size: Size | None, depths: BitDepths) -> Pixels:
    column = _column(table, name)
    if not isinstance(column, EncodedImages):
        raise UserError(f"{table.where}: column {name!r} holds no images; expected them as in the training data")
    return decode_all(column.files, lambda index: f"{table.where} {table.row(index)}", size, depths=depths)


def _pixels(table: Table, name: str) -> Array:
    column = _column(table, name)
    if not isinstance(column, np.ndarray):
        raise UserError(f"{table.where}: column {name!r} holds no arrays; expected them as in the training data")
    return column


def _read_inputs(
    tables: Sequence[Table], readers: Sequence[ColumnReader], names: tuple[str, ...], encoding: TableEncoding | None
) -> list[RawTable]:
    """Read the input columns. The encoding decides which are categories. Without it, the training table decides."""
    expected: dict[str, str | None] = dict.fromkeys(names)
    if encoding is not None:
        expected = {c.name: "number" if c.categories is None else "category" for c in encoding.columns}
    first = _raw_table(tables[0], readers[0], names, expected)
    if encoding is None:
        _refuse_useless(tables[0], first, readers[0])
        expected = {name: "category" if name in first.strings else "number" for name in names}
    rest = [_raw_table(t, r, names, expected) for t, r in zip(tables[1:], readers[1:], strict=True)]
    if encoding is None or isinstance(encoding, DraftEncoding):
        first = replace(first, strings={name: spell_whole_numbers(column) for name, column in first.strings.items()})
        categories: dict[str, tuple[str, ...]] = {name: column.values for name, column in first.strings.items()}
    else:
        categories = {column.name: column.categories or () for column in encoding.columns}
    return [_spell_as_known(raw, categories) for raw in (first, *rest)]


def _spell_as_known(raw: RawTable, categories: Mapping[str, tuple[str, ...]]) -> RawTable:
    """Spell booleans and whole numbers as the encoding or the training table does.

    `categories` has the values by column.
    """
    strings = {name: spell_as_known(column, categories[name]) for name, column in raw.strings.items()}
    return replace(raw, strings=strings)


def _raw_table(
    table: Table, reader: ColumnReader, names: tuple[str, ...], expected: Mapping[str, str | None]
) -> RawTable:
    numbers: list[npt.NDArray[np.float64]] = []
    strings: dict[str, Strings] = {}
    for name in names:
        column = _column(table, name)
        _require_usable(table, name)
        read = reader.read(name, column, expected[name])
        if isinstance(read, Strings):
            strings[name] = read
        else:
            numbers.append(read.astype(np.float64))
    rows = len(numbers[0]) if numbers else len(next(iter(strings.values())))
    return RawTable(names, np.stack(numbers, axis=1) if numbers else np.empty((rows, 0)), strings)


def _refuse_useless(table: Table, raw: RawTable, reader: ColumnReader) -> None:
    """Refuse columns without any value. Also refuse numbers that identify a sample, unless the user listed them."""
    known = {name: int((column.codes >= 0).sum()) for name, column in raw.strings.items()}
    known |= dict(zip(raw.number_names, (~np.isnan(raw.numbers)).sum(axis=0), strict=True))
    if empty := [name for name in raw.names if not known[name]]:
        dropped = table.split_from[empty[0]]
        raise UserError(f"{table.where}: column {empty[0]!r} has no value; leave it out with drop={dropped}")
    for place, name in enumerate(raw.number_names):
        if name not in reader.listed_inputs:
            refuse_identifier(table.where, name, raw.numbers[:, place], table.split_from[name])
