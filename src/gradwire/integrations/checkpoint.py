"""A handle's state in a checkpoint of torch.distributed.checkpoint (DCP).

Every rank saves its own state under keys that begin with its number, so that no rank holds the
state of another, and none of it is taken for a replica of another rank's:

    rank3/facts                              uint8[]: steps, seed, levels and so on
    rank3/aggregators/layer.weight/residual  a tensor of the state, by its path

Where a job has several handles side by side, such as one for each column of a mesh with tensor
parallelism, keys begin with the part of the job: part1/rank3/facts. Else what one rank 3 saves
would replace what another does.

A checkpoint of as many ranks is loaded by each rank from its own keys; otherwise every rank reads
the keys of all ranks, and `load_state_dict` merges them.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections import OrderedDict
from collections.abc import ItemsView, Iterable, Mapping
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from gradwire.errors import ConfigError

_FACTS = "facts"
Key = tuple[str, ...]


_DCP = (
    "torch.distributed.checkpoint.state_dict_saver",
    "torch.distributed.checkpoint.state_dict_loader",
    "torch.distributed.checkpoint.staging",  # of async_save, in a thread of its own
)


# Modules that ask every rank for a `state_dict`, and write that of rank 0: what to give them.
_FABRIC = 'give fabric.save {"gradwire": gw.lightning.state(handle)}, and load the same'
_OF_RANK_0 = {
    "accelerate.checkpointing": "attach with gw.accelerate.attach, which registers the whole state",
    **{
        f"{package}.strategies.{name}": _FABRIC
        for package in ("lightning.fabric", "lightning_fabric")
        for name in ("strategy", "model_parallel")
    },
}


def check_caller(world_size: int = 1) -> None:
    """Raise ConfigError within `dcp.save`, `dcp.async_save` and `dcp.load`, which keep one rank's
    tensor of each key: by the keys of a `state_dict` they would mix the residuals of all ranks. Of
    several ranks also within trainers' calls that keep the state of rank 0 alone."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_globals.get("__name__")
        if caller in _DCP:
            raise ConfigError(
                "torch.distributed.checkpoint would mix the states of ranks, whose keys are alike: "
                "save {'gradwire': handle.checkpoint()}, and load with handle.load_checkpoint(path)"
            )
        if caller in _OF_RANK_0 and world_size > 1:
            raise ConfigError(
                f"{caller} keeps rank 0's state alone, and each rank has residuals of its own: "
                f"{_OF_RANK_0[caller]}"
            )
        frame = frame.f_back


class OfOneRank(dict[str, Any]):
    """A part of a `state_dict` that `check_caller` guards: DCP, which reads every dict in what it
    saves, is refused. In a file it is a plain OrderedDict, for torch.load(weights_only=True)."""

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        check_caller()
        return super().items()

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.items())

    def __deepcopy__(self, memo: object) -> OfOneRank:
        return OfOneRank(self.items())


def to_keys(state: Mapping[str, Any], rank: int, part: int | None) -> dict[str, torch.Tensor]:
    """A rank's state as tensors by key."""
    tensors: dict[Key, torch.Tensor] = {}

    def without(value: Any, path: Key) -> Any:
        if isinstance(value, torch.Tensor):
            tensors[path] = value
            return None
        if isinstance(value, Mapping):
            return {name: without(one, (*path, name)) for name, one in value.items()}
        return value

    facts = {"state": without(state, ()), "paths": list(map(list, tensors))}
    file = io.BytesIO()
    torch.save(facts, file)
    packed = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    found = {_FACTS: packed, **{"/".join(path): tensor for path, tensor in tensors.items()}}
    begin = _begin(rank, part)
    return {begin + name: value for name, value in found.items()}


def from_keys(keys: Mapping[str, torch.Tensor], begin: str) -> dict[str, Any]:
    """The inverse of `to_keys`; raises KeyError for a tensor that is missing."""
    packed = keys[begin + _FACTS]
    facts = torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)
    state: dict[str, Any] = facts["state"]
    for path in facts["paths"]:
        within = state
        for name in path[:-1]:
            within = within[name]
        within[path[-1]] = keys[begin + "/".join(path)]
    return state


def _begin(rank: int, part: int | None) -> str:
    return f"rank{rank}/" if part is None else f"part{part}/rank{rank}/"


def read_states(
    path: str | os.PathLike[str], key: str, rank: int, world_size: int, part: int | None
) -> list[dict[str, Any]]:
    """What a rank needs of a checkpoint: its own state, or those of all ranks of another number.
    Collective, as `dcp.load` is.

    Args:
        part: of the job, of this rank's handle; see `StateGather.part`.

    Raises:
        ConfigError: there is no checkpoint, none of a handle under this key, one of another number
            of parts, or one that is not complete.
    """
    reader = dcp.FileSystemReader(path)
    try:
        metadata: Metadata = reader.read_metadata()
        of_key = metadata.state_dict_metadata
    except Exception as error:  # it is a pickle: a damaged one raises anything
        raise ConfigError(
            f"load_checkpoint: {path} has no checkpoint: {_in_a_line(error)}"
        ) from None
    begins = re.compile(re.escape(key) + r"\.((?:part(\d+)/)?rank(\d+)/)(.*)")
    parts: dict[int | None, dict[int, dict[str, torch.Tensor]]] = {}
    for name, of in of_key.items():
        match = begins.fullmatch(name)
        if match is not None and isinstance(of, TensorStorageMetadata):
            empty = torch.empty(of.size, dtype=of.properties.dtype)
            found = parts.setdefault(None if match[2] is None else int(match[2]), {})
            found.setdefault(int(match[3]), {})[match[1] + match[4]] = empty
    if not parts:
        raise ConfigError(
            f"load_checkpoint: {path} has no state of a handle under {key!r}: save "
            f"{{{key!r}: handle.checkpoint()}} with it, or name its key"
        )
    saved_part = _same_part(parts, part)
    found = parts[saved_part]
    saved = len(found)
    wanted = [rank] if saved == world_size and rank in found else sorted(found)
    keys = {name: tensor for one in wanted for name, tensor in found[one].items()}
    try:
        # Without facts, or with a rank left out, it fails on all ranks alike.
        if sorted(found) != list(range(saved)):
            raise KeyError(f"the states of ranks {sorted(found)} alone")
        for one, tensors in found.items():
            tensors[_begin(one, saved_part) + _FACTS]
        dcp.load({key: keys}, storage_reader=reader)
        states = [from_keys(keys, _begin(one, saved_part)) for one in wanted]
    except (Exception, CheckpointException) as error:  # which is no Exception
        raise ConfigError(
            f"load_checkpoint: {path} is damaged or not complete: {_in_a_line(error)}: load an "
            "older one"
        ) from None
    if any(state.get("world_size") != saved for state in states):
        raise ConfigError(
            f"load_checkpoint: {path} has the states of {saved} ranks, not of all "
            f"{states[0].get('world_size')}: save handle.checkpoint() on every rank"
        )
    return states


def _same_part(saved: Iterable[int | None], part: int | None) -> int | None:
    """The saved part that corresponds to this one: both are in the order of their ranks."""
    parts = sorted(one for one in saved if one is not None)
    if part is None and not parts:
        return None
    here: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(here, part)
    known = sorted({one for one in here if one is not None})
    if part is None or len(parts) != len(known):
        raise ConfigError(
            f"load_checkpoint: the checkpoint is of {len(parts) or 1} handles side by side, and "
            f"this job has {len(known) or 1}: load it into a mesh with as many"
        )
    return parts[known.index(part)]


def _in_a_line(error: BaseException) -> str:
    """The last line of what an error says: that of its cause, on the rank that has it."""
    causes = getattr(error, "failures", None)  # of a CheckpointException, by rank
    if causes:
        rank, (cause, _) = sorted(causes.items())[0]
        return f"rank {rank}: {_in_a_line(cause)}"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1]:.200}"
