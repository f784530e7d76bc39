"""The partition rules. Importing this package registers all of them."""

from fedskew.data.partitions.balanced import IID, Balanced, OneClass
from fedskew.data.partitions.column import Column
from fedskew.data.partitions.counts import Counts
from fedskew.data.partitions.dirichlet import Dirichlet, DomainDirichlet
from fedskew.data.partitions.fedgr import DoubleImbalance, LabelImbalance, QuantityImbalance
from fedskew.data.partitions.few_labels import LabelsPerClient, Quantity
from fedskew.data.partitions.saved import Saved
from fedskew.data.partitions.shards import Shards

__all__ = [
    "IID",
    "Balanced",
    "Column",
    "Counts",
    "Dirichlet",
    "DomainDirichlet",
    "DoubleImbalance",
    "LabelImbalance",
    "LabelsPerClient",
    "OneClass",
    "Quantity",
    "QuantityImbalance",
    "Saved",
    "Shards",
]
