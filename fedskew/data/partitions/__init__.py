"""The partition rules; importing them fills the registry."""

from fedskew.data.partitions.counts import Counts
from fedskew.data.partitions.dirichlet import Dirichlet
from fedskew.data.partitions.domains import DomainDirichlet
from fedskew.data.partitions.fedgr import DoubleImbalance, LabelImbalance, QuantityImbalance
from fedskew.data.partitions.iid import IID
from fedskew.data.partitions.labels_per_client import LabelsPerClient
from fedskew.data.partitions.pkd import Balanced, OneClass
from fedskew.data.partitions.quantity import Quantity
from fedskew.data.partitions.saved import Saved
from fedskew.data.partitions.shards import Shards

__all__ = [
    "IID",
    "Balanced",
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
