"""`gw.state_dict` and `gw.load_state_dict`: what calls outside a handle need to resume."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from gradwire.engine import Communicator
from gradwire.errors import ConfigError
from gradwire.groups import communicator

_CALLS = "calls"
_MOST = 1 << 61  # gradwire.collectives.calling sets bit 62 of a counted call's step


def state_dict(group: dist.ProcessGroup | Communicator | None = None) -> dict[str, int]:
    """The state of `gw.all_reduce` and its like on a group, the same on every rank.

    It holds how many calls named no `step`, from which their random numbers derive. What a handle
    needs is in the handle's own state.
    """
    return {_CALLS: _communicator(group).counted}


def load_state_dict(
    state: Mapping[str, int], group: dist.ProcessGroup | Communicator | None = None
) -> None:
    """Go on from `state_dict()`, on every rank, between calls.

    Raises:
        ConfigError: it is not what `state_dict` returns.
    """
    calls = state.get(_CALLS) if isinstance(state, Mapping) else None
    if type(calls) is not int or not 0 <= calls < _MOST or len(state) != 1:
        raise ConfigError(f"state {state!r:.60} is not what gradwire.state_dict() returns")
    _communicator(group).counted = calls


def _communicator(group: dist.ProcessGroup | Communicator | None) -> Communicator:
    return group if isinstance(group, Communicator) else communicator(group)
