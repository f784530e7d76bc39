"""Tables in memory: pandas and Polars DataFrames, and Arrow tables. All these packages are optional."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt

from fedskew.data.own.arrays import make_label_array
from fedskew.data.own.columns import Column, boolean_strings, make_strings, number_text
from fedskew.data.own.labels import is_gap
from fedskew.data.own.table_columns import Table
from fedskew.data.own.table_files import arrow_table, describe_unusable, import_pyarrow
from fedskew.data.spelling import composed
from fedskew.errors import UserError


def is_frame(data: object) -> bool:
    """Return whether this is a DataFrame of pandas or Polars, or an Arrow table."""
    is_polars = all(hasattr(data, name) for name in ("to_arrow", "schema", "height"))
    is_arrow = all(hasattr(data, name) for name in ("column_names", "schema", "combine_chunks"))
    return _is_pandas(data) or is_polars or is_arrow


def _is_pandas(data: object) -> bool:
    return all(hasattr(data, name) for name in ("columns", "iloc", "dtypes"))


def frame_table(frame: Any, where: str, labels: Any = None, label: str | None = None) -> Table:
    """Read the columns of a DataFrame. If `labels` are given, they become the column `label`.

    Without `label`, the column gets the labels' own name, or "label". Underscores are added if that name is taken.
    """
    table = _pandas_table(frame, where) if _is_pandas(frame) else arrow_table(_arrow(frame), where, {})
    if labels is None:
        return table
    name = _free_name(labels, table) if label is None else label
    return replace(table, columns={**table.columns, name: _label_column(labels)})


def _free_name(labels: Any, table: Table) -> str:
    """Return the labels' name, or "label". Add underscores until no column of the table has this name."""
    own = getattr(labels, "name", None)  # if the labels are a DataFrame, this may be its column "name"
    name = composed(own) if isinstance(own, str) and own else "label"
    while name in table.columns:
        name += "_"
    return name


def _arrow(frame: Any) -> Any:
    if not hasattr(frame, "to_arrow"):
        return frame
    import_pyarrow()
    return frame.to_arrow()


def _pandas_table(frame: Any, where: str) -> Table:
    columns: dict[str, Column] = {}
    mistakes: dict[str, str] = {}
    for position, key in enumerate(frame.columns):
        name = composed(str(key))
        if name in columns:
            raise UserError(f"{where}: column {name!r} appears twice; expected different names")
        columns[name], content = _frame_column(frame.iloc[:, position])
        if content is not None:
            mistakes[name] = describe_unusable(where, name, content)
    return Table(where, "row {}".format, columns, mistakes=mistakes)


def _frame_column(column: Any) -> tuple[Column, str | None]:
    """Read a column of a pandas DataFrame. If it cannot be an input, also describe what it holds."""
    missing = np.asarray(column.isna())
    categorical = str(column.dtype) == "category"
    if column.dtype.kind in "biuf" and not categorical:
        if column.dtype.kind == "b" and not missing.any():
            return column.to_numpy(dtype=np.bool_), None
        if column.dtype.kind in "iu" and not missing.any():
            return np.asarray(column), None
        if column.dtype.kind != "b":
            return column.to_numpy(dtype=np.float64, na_value=np.nan), None
    values = [None if gap else value for gap, value in zip(missing.tolist(), column.tolist(), strict=True)]
    if not missing.all() and all(value is None or isinstance(value, bool | np.bool_) for value in values):
        if categorical or missing.any():
            return boolean_strings(values, categorical), None
        return np.array(values, np.bool_), None
    texts = [None if value is None else number_text(value) if _is_number(value) else str(value) for value in values]
    return make_strings(texts, categorical), None if categorical else _odd_content(column, values)


def _odd_content(column: Any, values: Sequence[Any]) -> str | None:
    """Describe what a column holds, or return None if it holds only numbers and texts."""
    if column.dtype.kind in "mM":
        return "dates or times"
    odd = next(
        (value for value in values if value is not None and not (isinstance(value, str) or _is_number(value))), None
    )
    if isinstance(odd, datetime.date | datetime.time | datetime.timedelta):
        return "dates or times"
    return None if odd is None else f"values of type {type(odd).__name__}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | Decimal | np.number | np.bool_)


def _label_column(labels: Any) -> Column:
    """Read labels that are given separately from the table."""
    values = make_label_array(labels, "y")
    if values.dtype.kind != "O":
        return values
    return (
        make_strings([None if is_gap(value) else value for value in values.tolist()])
        if _are_all_texts(values)
        else values
    )


def _are_all_texts(values: npt.NDArray[Any]) -> bool:
    return all(is_gap(value) or isinstance(value, str) for value in values)
