"""The simulator: runs the engine's graphs on a virtual clock and modelled links (HIPRESS 3.3).

Read in this order: `models` and `buckets` (what DDP's hook averages, in which rounds), `task_times`
and `curves` (the time per task of a collective), `rank` (the scheduler core on the virtual clock),
`fabric` (the links), `run` (all ranks, or by `symmetry` one node that represents all), `predict`
(one result row), `crossing` (steps without a barrier), `meetings` (of replicas), `choice` (the
fastest setting). docs/laboratory/simulator.md is the user's page.
"""

from gradwire_tools.sim.curves import Curves
from gradwire_tools.sim.predict import Net, Scenario, predict

__all__ = ["Curves", "Net", "Scenario", "predict"]
