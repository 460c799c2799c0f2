"""Measures this machine for `gradwire sim`: the kernels' curves and the engine's overheads.

Kernels as in gradwire.sim.kernel_costs. The engine is measured between two ranks of this machine
over gloo: posting, latency, processor time per byte, and the time of a tiny all-reduce beyond the
simulated time. The results are kept in the user's cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gradwire.bench import workers
from gradwire.codecs import Identity, name_of
from gradwire.lab import Network
from gradwire.lang import Codec
from gradwire.sim import Curves, curves, kernel_costs
from gradwire.sim.calibrate import engine
from gradwire.sim.curves import Curve

_TIMEOUT_S = 120.0
# The shares of a link's rate that TCP gets in the lab, with one busy connection and with several,
# and the seconds that several lose at first (docs/internals/simulator.md). They are constants
# because not every machine has a lab.
_GOODPUT = {"goodput": 0.985, "shared": 0.965, "settling": 0.003}


@dataclass(frozen=True)
class Config:
    """The workers' arguments: none."""


def measured(
    codecs: Iterable[Codec],
    threads: int = 1,
    fresh: bool = False,
    advance: workers.Advance | None = None,
) -> Curves:
    """The curves of these codecs, and of Identity, on this machine.

    Args:
        threads: threads per kernel.
        fresh: ignore cached results.
        advance: called before every codec that is measured.

    Raises:
        WorkerError: a rank that measures the engine failed.
    """
    wanted = list(dict.fromkeys([*codecs, Identity()]))
    file = kernel_costs.file(threads)
    known = None if fresh or not file.exists() else curves.load(file)
    if known is None:
        known = engine(
            Curves(kernel_costs.processor(), threads, _all([Identity()], threads, advance)),
            _overheads(),
        )
    known = replace(known, link=replace(known.link, **_GOODPUT))
    missing = [codec for codec in wanted if str(codec) not in known.codecs]
    if missing:
        known = replace(known, codecs={**known.codecs, **_all(missing, threads, advance)})
    known.save(file)
    return known


def _all(
    codecs: Sequence[Codec], threads: int, advance: workers.Advance | None
) -> dict[str, dict[str, Curve]]:
    found = {}
    for index, codec in enumerate(codecs):
        if advance is not None:
            advance(f"kernels of {name_of(codec)}", index, len(codecs))
        found[str(codec)] = kernel_costs.kernel_curves(codec, threads)
    return found


def _overheads() -> dict[str, float]:
    """The engine's costs, measured by two ranks; see gradwire.bench.curves_worker."""
    worker, network = "gradwire.bench.curves_worker", Network.parse("none")
    (found,) = workers.rows(worker, Config(), 2, network, _TIMEOUT_S)
    return found
