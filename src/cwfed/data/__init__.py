"""Data sets, partitions and clients: the only package that reads foreign files."""

from cwfed.data.clients import Federation, Samples, Shard, export, fixed_shard, of_client, share_out
from cwfed.data.dataset import Dataset
from cwfed.data.holdings import classes_held_by_nobody, who_holds_nothing
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
    "classes_held_by_nobody",
    "export",
    "fixed_shard",
    "load",
    "of_client",
    "share_out",
    "shifted",
    "who_holds_nothing",
]
