"""The simulator: the engine's graphs on a virtual clock, on modelled links (HIPRESS 3.3).

Read in this order: `models` and `buckets` (what DDP hands over), `work` and `curves` (what a
collective's tasks take), `rank` (the scheduler core on that clock), `fabric` (the links), `run`
(all ranks, or by `symmetry` one node for all), `predict` (a row). docs/reference/simulator.md tells
users the same.
"""

from gradwire.sim.curves import Curves
from gradwire.sim.predict import Net, Scenario, predict

__all__ = ["Curves", "Net", "Scenario", "predict"]
