"""Typed collectives on compressed tensors: choose an algorithm, build its graph, run it."""

from gradwire.collectives.functional import (
    all_gather,
    all_reduce,
    broadcast,
    load_state_dict,
    reduce_scatter,
    state_dict,
)
from gradwire.collectives.job import Item
from gradwire.collectives.legal import check_defined, check_feedback, check_legal
from gradwire.collectives.operation import AVERAGE, SUM, Operation
from gradwire.collectives.options import Options
from gradwire.collectives.prepared import Part
from gradwire.collectives.scope_program import (
    Asked,
    Round,
    ScopeProgram,
    prepare,
    program_for,
)
from gradwire.collectives.typed import AllGather, AllReduce, Broadcast, ReduceScatter, Request

__all__ = [
    "AVERAGE",
    "SUM",
    "AllGather",
    "AllReduce",
    "Asked",
    "Broadcast",
    "Item",
    "Operation",
    "Options",
    "Part",
    "ReduceScatter",
    "Request",
    "Round",
    "ScopeProgram",
    "all_gather",
    "all_reduce",
    "broadcast",
    "check_defined",
    "check_feedback",
    "check_legal",
    "load_state_dict",
    "prepare",
    "program_for",
    "reduce_scatter",
    "state_dict",
]
