"""Datasets, partitions and federations."""

from fedskew.data.catalogue import DATASETS, DatasetEntry
from fedskew.data.dataset import Dataset, Samples
from fedskew.data.federation import Federation, federation
from fedskew.data.loading import load
from fedskew.data.partitions import (
    IID,
    Balanced,
    Column,
    Counts,
    Dirichlet,
    DomainDirichlet,
    DoubleImbalance,
    LabelImbalance,
    LabelsPerClient,
    OneClass,
    Quantity,
    QuantityImbalance,
    Saved,
    Shards,
)
from fedskew.data.partitions.rule import PARTITIONS, Partition, make_partition

__all__ = [
    "DATASETS",
    "IID",
    "PARTITIONS",
    "Balanced",
    "Column",
    "Counts",
    "Dataset",
    "DatasetEntry",
    "Dirichlet",
    "DomainDirichlet",
    "DoubleImbalance",
    "Federation",
    "LabelImbalance",
    "LabelsPerClient",
    "OneClass",
    "Partition",
    "Quantity",
    "QuantityImbalance",
    "Samples",
    "Saved",
    "Shards",
    "federation",
    "load",
    "make_partition",
]
