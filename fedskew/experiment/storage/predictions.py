"""The final model's predictions on the test set, as a Parquet file with one row per sample.

row                the sample's row in the test set
true, predicted    names of classes, or lists of labels' names
p_NAME             the probability of class NAME
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedskew.data.dataset import Dataset, Samples
from fedskew.experiment.storage.files import replace_file


def write_predictions(
    path: Path, dataset: Dataset, probabilities: npt.NDArray[np.float64], true: npt.NDArray[np.int64]
) -> None:
    """Write the predictions, in the order of the test set.

    `probabilities` and `true` are in the order of the evaluation, which goes domain by domain.
    """
    import pyarrow
    import pyarrow.parquet

    names = np.array(dataset.classes)
    rows = _evaluation_order(dataset.test, len(dataset.domains))
    order = np.argsort(rows)
    columns = {
        "row": rows[order],
        "true": _named(names, true[order]),
        "predicted": _named(names, _predicted(probabilities, true)[order]),
        **{f"p_{name}": probabilities[order, c] for c, name in enumerate(dataset.classes)},
    }
    table = pyarrow.table(columns)
    replace_file(path, lambda draft: pyarrow.parquet.write_table(table, draft))


def _predicted(probabilities: npt.NDArray[np.float64], true: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    found = probabilities.argmax(axis=1) if true.ndim == 1 else probabilities > 0.5
    return found.astype(np.int64)


def _named(names: npt.NDArray[np.str_], y: npt.NDArray[np.int64]) -> npt.NDArray[np.str_] | list[list[str]]:
    return names[y] if y.ndim == 1 else [names[row == 1].tolist() for row in y]


def _evaluation_order(test: Samples, domains: int) -> npt.NDArray[np.int64]:
    """Return the rows of the test set in the order in which they are evaluated, which is domain by domain."""
    if test.domain is None:
        return np.arange(len(test))
    return np.concatenate([np.flatnonzero(test.domain == number) for number in range(domains)])
