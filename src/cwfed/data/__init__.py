"""Data sets, partitions and the clients' shares: the only package that reads data files of unknown origin."""

from cwfed.data.clients import Federation, Samples, Shard, export, fixed_shard, of_client, share_out
from cwfed.data.dataset import Dataset
from cwfed.data.holdings import missing_classes, missing_data
from cwfed.data.partition import PartitionSpec
from cwfed.data.shift import shifted
from cwfed.data.sources import NAMES, SourceSpec, load

__all__ = [
    "NAMES",
    "Dataset",
    "Federation",
    "PartitionSpec",
    "Samples",
    "Shard",
    "SourceSpec",
    "export",
    "fixed_shard",
    "load",
    "missing_classes",
    "missing_data",
    "of_client",
    "share_out",
    "shifted",
]
