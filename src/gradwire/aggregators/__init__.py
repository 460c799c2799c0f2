"""Aggregators: how one gradient becomes its average, across steps."""

from gradwire.aggregators.compressed import Compressed
from gradwire.aggregators.dense import Dense
from gradwire.aggregators.error_feedback import ErrorFeedback
from gradwire.aggregators.protocol import Aggregator, CompressedAllReduce, Steps
from gradwire.aggregators.rounds import Attached, Rounds

__all__ = [
    "Aggregator",
    "Attached",
    "Compressed",
    "CompressedAllReduce",
    "Dense",
    "ErrorFeedback",
    "Rounds",
    "Steps",
]
