"""Aggregators: they compute averages of gradients, and keep state across steps."""

from gradwire.aggregators.artopk import ARTopK
from gradwire.aggregators.attached import OWED, Attached
from gradwire.aggregators.compressed import Compressed, Encoded
from gradwire.aggregators.deepgradient import DeepGradientCompression
from gradwire.aggregators.dense import Dense
from gradwire.aggregators.error_feedback import ErrorFeedback
from gradwire.aggregators.globaltopk import GlobalTopK
from gradwire.aggregators.lwtopk import LWTopK
from gradwire.aggregators.powersgd import PowerSGD
from gradwire.aggregators.program import AHEAD, drop_programs, program_of, rounds_of
from gradwire.aggregators.protocol import (
    Aggregator,
    Averages,
    Context,
    Observation,
    StateSpec,
    Steps,
)
from gradwire.aggregators.radial import Radial
from gradwire.aggregators.rounds import Rounds
from gradwire.aggregators.sparseloco import SparseLoCo
from gradwire.aggregators.thc import THC
from gradwire.aggregators.topkc import TopKC

__all__ = [
    "AHEAD",
    "OWED",
    "THC",
    "ARTopK",
    "Aggregator",
    "Attached",
    "Averages",
    "Compressed",
    "Context",
    "DeepGradientCompression",
    "Dense",
    "Encoded",
    "ErrorFeedback",
    "GlobalTopK",
    "LWTopK",
    "Observation",
    "PowerSGD",
    "Radial",
    "Rounds",
    "SparseLoCo",
    "StateSpec",
    "Steps",
    "TopKC",
    "drop_programs",
    "program_of",
    "rounds_of",
]
