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
_TELLING_S = 2.0  # for a refusal: a process that ends sooner may take it along
_CALL = "the call of gw.attach"


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
        ConfigError: nothing stands in for a method, a rank may not compile where it would, a policy
            has no choice, or a rank has refused the call.
        TransportError: a peer did not answer.
    """
    told, refused = None, None
    try:
        decides.check(plan, planned)
        if device.type == "cpu" and plan.options.target == "auto":
            told = uncompiled(dict.fromkeys(decides.encoders(plan)))
    except ConfigError as error:  # of this rank's arguments or environment: others wait for it
        refused = error
    kind = _REFUSED if refused else _COMPILED if told is None else _LACKS
    mine = [kind, f"rank {comms[0].ranks[comms[0].rank]}: {refused or told}"]
    kind, reason = max(ranks_of(comms).tell(_CALL, mine).result())
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


def refuse(comms: Sequence[Communicator], error: Exception) -> None:
    """In place of `available`: this rank's call raises an error, which its peers then raise there.
    Where none refuses, that costs nothing; where all do, they meet here.

    Raises:
        TransportError, TimeoutError: peers did not come in `_TELLING_S`; they are still told.
    """
    mine = [_REFUSED, f"rank {comms[0].ranks[comms[0].rank]}: {error}"]
    ranks_of(comms, breaks=False).tell(_CALL, mine).result(timeout=_TELLING_S)
