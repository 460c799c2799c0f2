"""`gw.probe`: what the network between the ranks of a job costs, and codecs on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gradwire import codecs as codec_table
from gradwire.codecs import Cast, Identity
from gradwire.engine import ranks_of
from gradwire.errors import ConfigError
from gradwire.groups import communicator
from gradwire.lang import Codec
from gradwire.planner import kernel_costs
from gradwire.planner.kernel_costs import Curve
from gradwire.planner.links import MOST_SECONDS, SECONDS, Links, measure_links


@dataclass(frozen=True)
class Probe:
    """What was measured; the same on all ranks.

    Attributes:
        links: latency in seconds (`alpha`) and seconds per byte (`beta`) between all ranks,
            [from][to].
        machines: the number of each rank's machine.
        kernels: codec -> kernel -> (seconds of a call, per value, per value and payload), on rank
            0's machine.
    """

    links: Links
    machines: tuple[int, ...]
    kernels: Mapping[str, Mapping[str, Curve]]

    def __str__(self) -> str:
        links, machines = self.links, len(set(self.machines))
        if links.ranks == 1:
            return "1 rank, which has no link"
        return (
            f"{links.ranks} ranks on {machines} machine{'s' * (machines > 1)}; latency "
            f"{1e3 * links.typical_alpha:.3g} ms, {1e3 * links.worst_alpha:.3g} ms at most; "
            f"{_rate(links.typical_beta)}, {_rate(links.worst_beta)} at least"
        )


def probe(
    group: dist.ProcessGroup | None = None,
    codecs: Sequence[str] = ("qsgd:bits=4",),
    seconds: float = SECONDS,
) -> Probe:
    """Measure the links between all ranks of a group, and what codecs cost; collective.

        print(gw.probe())

    Costs of kernels are measured once per machine, some seconds for each codec, and kept in the
    user's cache. `gradwire probe` does the same without a job of one's own.

    Args:
        group: None: the default group.
        codecs: by name, with options in the name.
        seconds: what measuring the links should take, 600 at most; slow networks take longer.

    Raises:
        ConfigError: torch.distributed is not initialised, an unknown codec, `seconds` out of range,
            ranks that disagree, a link's figure that makes no sense, or rank 0 cannot measure
            kernels.
        TransportError: a peer failed or did not come.
    """
    comm = communicator(group)
    try:
        wanted = [Identity(), Cast("bf16"), *_known(codecs, seconds)]
        told = f"codecs {tuple(codecs)}, seconds {seconds:g}"
    except ConfigError as error:  # other ranks, with other arguments, learn it, too
        comm.agree("the call of gw.probe", [f"refused: {error}"])
        raise
    comm.agree("the call of gw.probe", [told])
    links = measure_links(comm, seconds)
    mine: dict[str, Any] = {}
    if comm.rank == 0:
        try:
            mine = {"kernels": kernel_costs.measured(wanted, torch.get_num_threads())}
        except Exception as error:  # other ranks wait for it
            mine = {"failed": f"rank 0 cannot measure kernels: {error}"}
    found = ranks_of([comm], "probe", breaks=False).tell("kernels", mine).result()[0]
    if "failed" in found:
        raise ConfigError(found["failed"])
    kernels = {
        codec: {k: tuple(c) for k, c in of.items()} for codec, of in found["kernels"].items()
    }
    machines = comm.topology.machines if comm.world_size > 1 else (0,)
    return Probe(links, machines, kernels)


def _known(names: Sequence[str], seconds: float) -> list[Codec]:
    """The codecs; raises ConfigError for arguments that make no sense."""
    several = isinstance(names, Sequence) and not isinstance(names, str)
    if not several or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f'probe: codecs={names!r:.60}: give several names, as in ("qsgd:bits=4",)'
        )
    if not isinstance(seconds, int | float) or not 0 < seconds <= MOST_SECONDS:
        raise ConfigError(
            f"probe: seconds={seconds!r} must be above 0 and at most {MOST_SECONDS:g}"
        )
    return [codec_table.get(name) for name in names]


def _rate(beta: float) -> str:
    return f"{8e-6 / beta:.4g} Mbit/s" if beta else "no measurable time per byte"
