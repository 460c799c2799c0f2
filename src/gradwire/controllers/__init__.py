"""Controllers: policies that choose a method per layer, and the tables of errors they choose by.

    layers = tables(averaged_gradients, Bits(bits=4))
    proposal = LGreco().propose(layers, Budget.of(layers))

docs/internals/adaptive.md has definitions, docs/laboratory/policies.md measurements.
"""

from gradwire.controllers.accordion import Accordion, AccordionLGreco, critical
from gradwire.controllers.bayes import Bayes
from gradwire.controllers.families import (
    FAMILIES,
    Bits,
    CodecBits,
    Density,
    Family,
    Mixture,
    Rank,
)
from gradwire.controllers.kmeans import KMeans
from gradwire.controllers.layer import Budget, Layer
from gradwire.controllers.lgreco import LGreco
from gradwire.controllers.linear import Linear
from gradwire.controllers.policy import Policy, Proposal, Uniform
from gradwire.controllers.tables import segments, table, tables
from gradwire.controllers.time_weights import time_weights

__all__ = [
    "FAMILIES",
    "Accordion",
    "AccordionLGreco",
    "Bayes",
    "Bits",
    "Budget",
    "CodecBits",
    "Density",
    "Family",
    "KMeans",
    "LGreco",
    "Layer",
    "Linear",
    "Mixture",
    "Policy",
    "Proposal",
    "Rank",
    "Uniform",
    "critical",
    "segments",
    "table",
    "tables",
    "time_weights",
]
