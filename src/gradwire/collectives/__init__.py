"""Collectives on compressed tensors: choose an algorithm, build its graph, run it."""

from gradwire.collectives.functional import all_reduce
from gradwire.collectives.options import Options
from gradwire.collectives.prepared import DTYPES, AllReduce, Item, prepare

__all__ = ["DTYPES", "AllReduce", "Item", "Options", "all_reduce", "prepare"]
