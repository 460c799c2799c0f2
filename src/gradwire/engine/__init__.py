"""The engine: runs graphs of five kinds of task. It knows no algorithm and no codec."""

from gradwire.engine.communicator import Communicator
from gradwire.engine.executor import Executor, Job, Outcome
from gradwire.engine.graph import Graph, Kind
from gradwire.engine.message import HEADER_BYTES
from gradwire.engine.pool import Pool
from gradwire.engine.trace import Span, Trace

__all__ = [
    "HEADER_BYTES",
    "Communicator",
    "Executor",
    "Graph",
    "Job",
    "Kind",
    "Outcome",
    "Pool",
    "Span",
    "Trace",
]
