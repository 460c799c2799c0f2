"""What is sent where codecs would be interpreted, on the CPU, for want of a compiler: 16 bits.

An interpreted codec takes many times as long as to send everything. So ranks tell each other, as a
handle is attached, whether their kernels are compiled; if one has none, all of them make their plan
anew, in which bf16 stands in for codecs, also for those of later updates (`Rules.available`).
A rank on which target eager was asked for interprets them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from gradwire.engine import Communicator, ranks_of
from gradwire.errors import ConfigError
from gradwire.handles.arguments import Decides
from gradwire.handles.bias import warn_once
from gradwire.lang.kernels import MEND, announce, uncompiled
from gradwire.planner import Plan, Rules

_COMPILED, _LACKS, _REFUSED = range(3)  # what a rank tells; the greatest counts


def available(
    plan: Plan,
    planned: Callable[[Rules], Plan],
    device: torch.device,
    comms: Sequence[Communicator],
    decides: Decides,
) -> Plan:
    """The plan, or the one with `Rules.uncompiled`, about which a warning is given; all ranks call.

    Args:
        plan: as this rank was told.
        planned: makes it with other rules.
        device: of the parameters.
        comms: over which it is agreed upon.
        decides: what will choose other methods than the plan's.

    Raises:
        ConfigError: nothing stands in for a method, or a rank may not compile where it would.
        TransportError: a peer did not answer.
    """
    told, refused = None, None
    if device.type == "cpu" and plan.options.target == "auto":
        try:
            told = uncompiled(dict.fromkeys(decides.encoders(plan)))
        except ConfigError as error:  # of this rank's environment: others wait for this one
            refused = error
    rank = comms[0].ranks[comms[0].rank]
    mine = [_COMPILED if told is None else _LACKS, f"rank {rank}: {told}"]
    if refused is not None:
        mine = [_REFUSED, f"rank {rank}: {refused}"]
    kind, reason = max(ranks_of(comms).tell("compiled kernels", mine).result())
    if kind == _REFUSED:
        raise refused or ConfigError(reason)
    alone = all(comm.world_size == 1 for comm in comms)  # which sends nothing
    if kind == _COMPILED or alone:
        return plan
    made = planned(replace(plan.rules, uncompiled=reason))
    warn_once(
        f"no compiled kernels, so bf16 is sent in place of slow interpreted codecs: {reason}; "
        f'{MEND}; options=gw.Options(target="eager") compresses nevertheless',
        "uncompiled",
    )
    if told is not None:
        announce(told, told=True)
    return made
