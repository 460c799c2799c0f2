"""The forms in which a handle's state is saved, of one rank and of all, and what a rank takes of
them.

    one rank's    `state_dict`: a dict, which belongs in a file of that rank's own
    full          the states of all ranks: gathered over the handle's process groups
    checkpoint    of torch.distributed.checkpoint (DCP), under keys that begin with the rank:

        rank3/facts                              uint8[]: steps, seed, levels and so on
        rank3/aggregators/layer.weight/residual  a tensor of the state, by its path

Every rank saves its own state there, so that no rank holds the state of another, and none of it is
taken for a replica of another rank's. Where a job has several handles side by side, such as one for
each column of a mesh with tensor parallelism, keys begin with the part of the job:
part1/rank3/facts. Else what one rank 3 saves would replace what another does.

Forms know nothing of what a state has (state/state.py): only its header, and its tensors.
"""

from __future__ import annotations

import io
import math
import os
import re
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from gradwire.collectives.options import check_seed
from gradwire.control import digest
from gradwire.engine import Communicator, Issue, Ticket, ranks_of, run_with_peers
from gradwire.errors import ConfigError, GradwireError, TransportError
from gradwire.groups import communicator

State = Mapping[str, Any]
T = TypeVar("T")

_HEADER = {
    "version": int,
    "rank": int,
    "world_size": int,
    "seed": int,
    "parameters": Mapping,
    "steps": Mapping,
    "aggregators": Mapping,
}
_ISSUED = digest(0, "full_state_dict", [])


def mapped(value: Any, change: Callable[[torch.Tensor, tuple[str, ...]], Any], *path: str) -> Any:
    """What a state has, with each tensor replaced by what `change` gives for it and its path."""
    if isinstance(value, torch.Tensor):
        return change(value, path)
    if isinstance(value, Mapping):
        return {name: mapped(one, change, *path, name) for name, one in value.items()}
    return value


# ---- of one rank

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
                "save {'gradwire': handle.checkpoint()}, and load with handle.load(path)"
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


def _check_form(state: object) -> None:
    """Raise ConfigError unless `state` is a handle's state_dict in this version's format."""
    version = state.get("version") if isinstance(state, Mapping) else None
    if not isinstance(state, Mapping) or type(version) is not int or version != 1:
        raise ConfigError("load_state_dict: not the state_dict of a gradwire handle (version 1)")
    for key, kind in _HEADER.items():
        if not isinstance(state.get(key), kind) or isinstance(state[key], bool):
            found = f"has {state[key]!r} for {key!r}" if key in state else f"lacks {key!r}"
            raise ConfigError(
                f"load_state_dict: the state {found}: it is not a result of Handle.state_dict"
            )
    try:
        check_seed(state["seed"])
    except ConfigError as error:
        raise ConfigError(f"load_state_dict: the state has {error}") from None
    if not 0 <= state["rank"] < state["world_size"]:
        raise ConfigError(
            f"load_state_dict: the state is of rank {state['rank']} of {state['world_size']}: it "
            "is not a result of Handle.state_dict"
        )


# ---- of all ranks


class StateGather:
    """Over which process groups the states of all ranks come together.

    Args:
        groups: each gathers what those before it gave; rank 0 of all of them is the handle's rank
            0. They are not kept alive.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._groups = [(weakref.ref(group), communicator(group)) for group in groups]

    def __call__(self, state: State, rank0_only: bool) -> list[State]:
        """All ranks' states, by rank; nothing where only rank 0 gets them.

        Raises:
            ConfigError: a process group was destroyed, or ranks differ in `rank0_only`.
            TransportError: a rank did not make the call, or failed.
        """
        self._living()
        comms = [comm for _, comm in self._groups]
        ranks, asked = ranks_of(comms), [f"rank0_only={bool(rank0_only)}"]
        ranks.agree("agreement", "full_state_dict", asked).result()
        states = [mapped(state, lambda tensor, _: tensor.cpu())]
        try:
            for comm in comms:
                # Where rank 0 alone gets them, all ranks of a later group have some, or none has.
                if states and comm.world_size > 1:
                    states = _gathered(states, comm, rank0_only)
        except TransportError as error:
            for comm in comms:  # ranks wait in the others for this one
                comm.fail(error)
            raise
        return sorted(states, key=lambda one: int(one["rank"]))

    def part(self) -> int | None:
        """Which part of the job these ranks are, if there are others: those of another column of a
        mesh (tensor parallelism) have a handle, a rank 0, and so on of their own. It is the global
        rank of rank 0, in a mesh that numbers its ranks in order; None: these are all ranks."""
        groups = self._living()
        size = math.prod(group.size() for group in groups)
        if not groups or not dist.is_initialized() or size == dist.get_world_size():
            return None
        here = dist.get_rank()
        return here + sum(dist.get_process_group_ranks(group)[0] - here for group in groups)

    def _living(self) -> list[dist.ProcessGroup]:
        groups = [held() for held, comm in self._groups if comm.alive()]
        living = [group for group in groups if group is not None]
        if len(living) < len(self._groups):
            raise ConfigError(
                "the process group of this handle was destroyed: save and load states before "
                "destroy_process_group"
            )
        return living


def _gathered(states: list[State], comm: Communicator, rank0_only: bool) -> list[State]:
    """What all ranks of a group hold; with `rank0_only` nothing on the others."""
    file = io.BytesIO()
    torch.save(states, file)
    mine = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    sizes = run_with_peers(comm, ranks_of([comm]).tell("the sizes of states", len(mine)).result)
    ticket = comm.calls.ticket()
    try:
        ticket.next_round(Issue(_ISSUED, "full_state_dict"))
        ticket.is_prepared = True
        receivers = range(1 if rank0_only else comm.world_size)
        with comm.calls.awaited():
            sent = partial(_sent, comm, ticket, mine, sizes, receivers)
            parts = run_with_peers(comm, sent)
    finally:
        ticket.close()
    files = (io.BytesIO(part.numpy().data) for part in parts)
    return [state for file in files for state in torch.load(file, weights_only=True)]


def _sent(
    comm: Communicator,
    ticket: Ticket,
    mine: torch.Tensor,
    sizes: Sequence[int],
    receivers: Sequence[int],
) -> list[torch.Tensor]:
    """Send this rank's bytes to the receivers; those of all ranks, if this is one of them."""
    transport, tag = comm.transport, ticket.tag(_ISSUED, 0)
    parts, pending = [], []
    for peer, size in enumerate(sizes if comm.rank in receivers else ()):
        parts.append(mine if peer == comm.rank else torch.empty(size, dtype=torch.uint8))
        if peer != comm.rank:
            pending.append(transport.irecv(parts[peer], peer, tag))
    pending += [transport.isend(mine, peer, tag) for peer in receivers if peer != comm.rank]
    for message in pending:
        message.wait()
    return parts


def full(states: Sequence[State]) -> dict[str, Any]:
    """What `full_state_dict` gives: {} where there are none."""
    if not states:
        return {}
    return {"version": 1, "world_size": len(states), "ranks": list(states)}


def states_of(given: object) -> list[State]:
    """The states in what `load_state_dict` was given: one or more, each of the form of a handle's.

    Raises:
        ConfigError: it is something else.
    """
    states = _listed(given)
    if not states:
        raise ConfigError("load_state_dict: the list of states is empty")
    for state in states:
        _check_form(state)
    return states


def _listed(given: object) -> list[State]:
    if isinstance(given, Mapping) and not given:
        raise ConfigError(
            "load_state_dict: the state is empty, as full_state_dict(rank0_only=True) gives it on "
            "all ranks but 0: have rank 0 save it, and load the file on every rank"
        )
    if isinstance(given, Mapping) and "ranks" in given:
        ranks = given["ranks"]
        version, ranks_told = given.get("version"), given.get("world_size")
        if (
            (type(version), version) != (int, 1)
            or type(ranks_told) is not int
            or not isinstance(ranks, Sequence)
            or isinstance(ranks, (str, bytes))
        ):
            raise ConfigError(
                "load_state_dict: not the full_state_dict of a gradwire handle (version 1)"
            )
        if len(ranks) != ranks_told:
            raise ConfigError(
                f"load_state_dict: this full_state_dict has the states of {len(ranks)} ranks, not "
                f"of {ranks_told}: load it as it was saved"
            )
        return list(ranks)
    if isinstance(given, Mapping):
        return [given]
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes, torch.Tensor)):
        raise ConfigError(
            f"load_state_dict takes what state_dict or full_state_dict gave, not "
            f"{type(given).__name__}"
        )
    return list(given)


# ---- of torch.distributed.checkpoint

_FACTS = "facts"


def to_keys(state: State, rank: int, part: int | None) -> dict[str, torch.Tensor]:
    """A rank's state as tensors by key."""
    tensors: dict[tuple[str, ...], torch.Tensor] = {}

    def without(tensor: torch.Tensor, path: tuple[str, ...]) -> None:
        tensors[path] = tensor

    facts = {"state": mapped(state, without), "paths": list(map(list, tensors))}
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
    path: str | os.PathLike[str],
    key: str,
    rank: int,
    world_size: int,
    part: int | None,
    use: Callable[[Sequence[State]], T],
) -> T:
    """What `use` makes of what a rank needs of a checkpoint: its own state, or those of all ranks
    of another number. Collective, as `dcp.load` is: what raises on one rank does on all.

    Args:
        part: of the job, of this rank's handle; see `StateGather.part`.

    Raises:
        ConfigError: there is no checkpoint, none of a handle under this key, one of another number
            of parts, or one that is not complete; or what `use` raises.
        TransportError: a rank did not make the call, or has failed.
    """
    reader, parts = _on_all(path, lambda: _saved_parts(path, key))
    saved_part = _same_part(parts, part)
    found = parts[saved_part]
    wanted = [rank] if len(found) == world_size and rank in found else sorted(found)
    keys = {name: tensor for one in wanted for name, tensor in found[one].items()}

    def used() -> T:
        try:
            dcp.load({key: keys}, storage_reader=reader)
        except RuntimeError as error:  # of torch's collectives: what reading raises is told in them
            raise TransportError(
                f"load: {path} was not read together: {_in_a_line(error)}: see whether "
                "another rank has failed"
            ) from error
        states = [from_keys(keys, _begin(one, saved_part)) for one in wanted]
        if any(state.get("world_size") != len(found) for state in states):
            raise ConfigError(
                f"load: {path} has the states of {len(found)} ranks, not of all "
                f"{states[0].get('world_size')}: save handle.checkpoint() on every rank"
            )
        return use(states)

    return _on_all(path, used)


def _on_all(path: str | os.PathLike[str], step: Callable[[], T]) -> T:
    """What a step returns, once it has raised on no rank of the job: else it raises on all."""
    said: str | None = None
    try:
        made = step()
    except TransportError:
        raise
    except (Exception, CheckpointException) as error:  # which is no Exception
        refused = error
        if not isinstance(error, GradwireError):
            what = f"{path} is damaged or not complete: {_in_a_line(error)}: load an older one"
            refused = ConfigError(f"load: {what}")
        said = str(refused).removeprefix("load: ")
    job = [communicator()] if dist.is_initialized() else []
    for rank, text in enumerate(ranks_of(job).tell("load", said).result()):
        if said is not None:
            raise refused from None
        if text is not None:
            raise ConfigError(f"load: rank {rank}: {text}")
    return made


def _saved_parts(
    path: str | os.PathLike[str], key: str
) -> tuple[dcp.FileSystemReader, dict[int | None, dict[int, dict[str, torch.Tensor]]]]:
    """Of a checkpoint, by part of the job and rank, empty tensors for what is saved, by key.

    Raises:
        KeyError: a rank or its facts were left out.
    """
    try:
        reader = dcp.FileSystemReader(path)
        metadata: Metadata = reader.read_metadata()
        of_key = metadata.state_dict_metadata
    except Exception as error:  # it is a pickle: a damaged one raises anything
        raise ConfigError(f"load: {path} has no checkpoint: {_in_a_line(error)}") from None
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
            f"load: {path} has no state of a handle under {key!r}: save "
            f"{{{key!r}: handle.checkpoint()}} with it, or name its key"
        )
    for part, found in parts.items():
        if sorted(found) != list(range(len(found))):
            raise KeyError(f"the states of ranks {sorted(found)} alone")
        for one, tensors in found.items():
            tensors[_begin(one, part) + _FACTS]
    return reader, parts


def _same_part(saved: Iterable[int | None], part: int | None) -> int | None:
    """The saved part that corresponds to this one: both are in the order of their ranks."""
    parts = sorted(one for one in saved if one is not None)
    if part is None and not parts:
        return None
    here = ranks_of([communicator()]).tell("parts of the job", part).result()
    known = sorted({one for one in here if one is not None})
    if part is None or len(parts) != len(known):
        raise ConfigError(
            f"load: the checkpoint is of {len(parts) or 1} handles side by side, and "
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
