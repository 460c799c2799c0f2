"""Collectives on compressed tensors: choose an algorithm, build its graph, run it."""

from gradwire.collectives.collective import DTYPES, Collective, prepare
from gradwire.collectives.defined import check_defined, check_feedback
from gradwire.collectives.functional import all_reduce
from gradwire.collectives.job import Item
from gradwire.collectives.options import Options
from gradwire.collectives.shards import all_gather, reduce_scatter

__all__ = [
    "DTYPES",
    "Collective",
    "Item",
    "Options",
    "all_gather",
    "all_reduce",
    "check_defined",
    "check_feedback",
    "prepare",
    "reduce_scatter",
]
