"""A split by the sites that the data name, for example by a table's column `hospital`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedskew.data.catalogue import DATASETS
from fedskew.data.dataset import Dataset
from fedskew.data.partitions.rule import Arrangement, IntArray, Labels, Partition, group_by_client, register
from fedskew.errors import UserError, shorten


@register
@dataclass(frozen=True)
class Column(Partition):
    """One client per site. The column `column` has the site of each sample. The split does not depend on the seed.

    Without `column`, the sites are those of the dataset, such as the writers of femnist.
    """

    name: ClassVar[str] = "column"
    is_drawn: ClassVar[bool] = False
    column: str | None = None

    def __post_init__(self) -> None:
        # A column's name may be a number.
        if isinstance(self.column, int | np.integer) and not isinstance(self.column, bool):
            object.__setattr__(self, "column", str(self.column))
        if self.column is not None and (not isinstance(self.column, str) or not self.column):
            raise UserError(f"partition.column is {self.column!r}; expected the name of a column")

    def data_options(self) -> dict[str, Any]:
        return {} if self.column is None else {"site": self.column}

    def arrange(self, dataset: Dataset) -> Arrangement:
        """Take the clients' names from the data. A site that has only test samples is not a client."""
        site = dataset.train.site
        if site is None:
            if dataset.name in DATASETS:
                advice = "expected data with sites, such as femnist"
            elif self.column is None:
                advice = "expected partition.column to name a column"
            else:
                advice = f"load it with site={self.column!r}; expected data with such a column"
            raise self.error(f"{dataset.name} does not say which site a sample is from; {advice}")
        if self.column not in (None, dataset.site_column):
            raise self.error(f"the sites of {dataset.name} come from {dataset.site_column!r}; expected that column")
        present = np.unique(site)
        names = tuple(dataset.sites[number] for number in present)
        clients = set(present.tolist())
        absent = [name for number, name in enumerate(dataset.sites) if number not in clients]
        notes = (f"not clients, because they have no training samples: {shorten(absent)}",) if absent else ()
        return Arrangement(dataset, names, notes)

    def draw(self, labels: Labels, seed: int) -> Sequence[IntArray]:  # noqa: ARG002 - the data determine the split
        if labels.site is None:
            raise self.error("the labels alone do not say which site a sample is from; split a dataset")
        present, client = np.unique(labels.site, return_inverse=True)
        return group_by_client(client.astype(np.int64), len(present))
