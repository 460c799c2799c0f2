"""The engine: runs graphs of five kinds of task. It knows no algorithm and no codec."""

from gradwire.engine.communicator import Communicator, GroupInfo
from gradwire.engine.graph import Graph, Kind
from gradwire.engine.message import HEADER_BYTES
from gradwire.engine.owner import Issue, Owner, Ticket
from gradwire.engine.pool import Pool
from gradwire.engine.process import Engine
from gradwire.engine.runs import Outcome
from gradwire.engine.several import ranks_of, run_with_peers
from gradwire.engine.trace import Span, Timeline

__all__ = [
    "HEADER_BYTES",
    "Communicator",
    "Engine",
    "Graph",
    "GroupInfo",
    "Issue",
    "Kind",
    "Outcome",
    "Owner",
    "Pool",
    "Span",
    "Ticket",
    "Timeline",
    "ranks_of",
    "run_with_peers",
]
