"""Run a program on one rank: in the rank's own order, or serially, one collective at a time."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from averaging import started
from gradwire import codecs
from gradwire.aggregators import Aggregator, Attached, Compressed, Context, ErrorFeedback, Steps
from gradwire.collectives import AllGather, AllReduce, Broadcast, ReduceScatter, Request
from gradwire.engine import Communicator
from gradwire.lang import Codec, rng
from stress.programs import Action, Call, Parameter, Program, Scope
from stress.slow import Delays
from typed_values import call

CODECS: dict[str, Codec] = {
    "qsgd": codecs.get("qsgd"),
    "qsgd2": codecs.get("qsgd", bits=2, block=64),
    "terngrad": codecs.get("terngrad"),
    "topk": codecs.get("topk", density=0.05),
    "onebit": codecs.get("onebit"),
    "identity": codecs.get("identity"),
    "fp16": codecs.get("fp16"),
}
WAIT_S = 180.0  # for a scope; the transports end before that


# The results of an action: tensors that are equal on all ranks, and those of this rank alone.
Left = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Chained(Aggregator):
    """An average in rounds: each round averages what earlier rounds have left of the gradient."""

    rounds: tuple[tuple[int, str, str], ...]

    def variant(self, step: int, world_size: int) -> int:
        return step % world_size  # broadcasts take turns

    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        totals = [torch.zeros_like(c.gradient) for c in contexts]
        for numel, codec, way in self.rounds:
            left = [c.gradient[:numel] - t[:numel] for c, t in zip(contexts, totals, strict=True)]
            means = yield from averaged(way, contexts, left, CODECS[codec])
            for total, mean in zip(totals, means, strict=True):
                total[:numel] += mean
        return totals


def averaged(
    way: str, contexts: Sequence[Context], values: Sequence[torch.Tensor], codec: Codec
) -> Generator[list[Request], list[torch.Tensor], list[torch.Tensor]]:
    """The averages of all ranks' values, in one of the `WAYS`."""
    ranks = contexts[0].world_size
    pairs = list(zip(contexts, values, strict=True))
    if way == "all_gather":
        found = yield [AllGather(v, codec=codec, of=c) for c, v in pairs]
        return [gathered.view(ranks, -1).mean(0) for gathered in found]
    if way == "shards":
        lengths = [tuple(len(part) for part in v.tensor_split(ranks)) for v in values]
        cut = zip(pairs, lengths, strict=True)
        found = yield [ReduceScatter(v, lengths=n, codec=codec, of=c) for (c, v), n in cut]
        found = yield [
            AllGather(shard.clone(), lengths=n, of=c)
            for c, shard, n in zip(contexts, found, lengths, strict=True)
        ]
        return found
    if way == "min":
        return (yield [AllReduce(v, "min", of=c) for c, v in pairs])
    if way == "broadcast":
        return (yield [Broadcast(v, c.step % ranks, codec=codec, of=c) for c, v in pairs])
    return (yield [AllReduce(v, codec=codec, of=c) for c, v in pairs])


def aggregator(parameter: Parameter) -> Aggregator:
    if parameter.feedback:
        return ErrorFeedback(Compressed(CODECS[parameter.rounds[0][1]]))
    return Chained(parameter.rounds)


@dataclass
class RankContext:
    """One rank's groups in a run.

    Attributes:
        comms: per group; None if the rank is not in it.
        groups: per group, the argument of public functions.
        delays: before its calls.
        in_order: keep the program's own order, without awaiting collectives: links without tags
            need it.
    """

    rank: int
    comms: Sequence[Communicator | None]
    groups: Sequence[Any]
    delays: Delays | None = None
    in_order: bool = False


class Runner:
    """A program on one rank.

    Args:
        serial: one collective at a time, in the program's own order, each awaited.
        before: called before an action is issued, with (step, place in this rank's order, action);
            the action that it returns is issued instead.

    Attributes:
        found: (step, action's number) -> digests of the action's results on this rank.
    """

    def __init__(
        self,
        program: Program,
        ctx: RankContext,
        serial: bool = False,
        before: Callable[[int, int, Action], Action] = lambda step, place, action: action,
    ) -> None:
        self.program, self.ctx, self.serial, self.before = program, ctx, serial, before
        self.found: dict[tuple[int, int], str] = {}
        self._draw = random.Random(f"rank {ctx.rank} of {program.seed}")
        comms = [ctx.comms[owner.group] for owner in program.owners]  # all open them in one order
        self._owners: list[Any] = [
            comm and comm.owner(owner.name, window=owner.window)
            for comm, owner in zip(comms, program.owners, strict=True)
        ]
        self._members: dict[tuple[int, Parameter], Attached] = {}
        self._later: list[tuple[tuple[int, int], Callable[[], Left]]] = []

    def run(self, steps: int) -> dict[tuple[int, int], str]:
        """Raises a collective's error."""
        for number in range(steps):
            self.step(number)
        self._collect(self._later)
        return self.found

    def step(self, number: int) -> None:
        step = self.program.step(number)
        indices = list(range(len(step.actions)))
        if not (self.serial or self.ctx.in_order):
            indices = self.program.order(self.ctx.rank, number)
        running = []
        before, self._later = self._later, []
        for place, index in enumerate(indices):
            action = self.before(number, place, step.actions[index])
            if not self.program.takes_part(self.ctx.rank, action):
                continue
            if self.ctx.delays is not None:
                self.ctx.delays.before_call()
            key = number, index
            if isinstance(action, Scope):
                parameters = self.program.layout(action.owner, number)[action.bucket]
                keeps = any(parameter.feedback for parameter in parameters)
                ending = self._later if step.lingers and not keeps else running
                ending.append((key, self._scope(action, number)))
            else:
                self._later.append((key, self._call(action, number, index)))
            if self.serial:
                for ending in (running, self._later):
                    self._collect(ending)
                    ending.clear()
        # Most scopes end with their step, as backward does; calls may continue into the next.
        self._draw.shuffle(running)
        self._collect(running)
        self._collect(before)

    def _collect(self, ended: Sequence[tuple[Any, Callable[[], Left]]]) -> None:
        for key, wait in ended:
            self.found[key] = " ".join(map(digest, wait()))

    def values(self, numel: int, *what: object) -> torch.Tensor:
        """This rank's, of an action."""
        seed = random.Random(f"{self.program.seed} {self.ctx.rank} {what}").getrandbits(63)
        return torch.randn(numel, generator=torch.Generator().manual_seed(seed))

    def _scope(self, action: Scope, number: int) -> Callable[[], Left]:
        parameters = self.program.layout(action.owner, number)[action.bucket]
        members = [self._member(action.owner, p, i) for i, p in enumerate(parameters)]
        gradients = [self.values(p.numel, number, p.name) for p in parameters]
        future: Future[Any] = started(self._owners[action.owner], members, gradients)

        def wait() -> Left:
            future.result(WAIT_S)
            kept = [t for m in members for t in m.state.values()]
            return gradients, kept

        return wait

    def wrap(self, action: Scope, number: int, wrapper: Callable[[Aggregator], Aggregator]) -> None:
        """Replace the first parameter's aggregator of a scope that is about to start."""
        parameter = self.program.layout(action.owner, number)[action.bucket][0]
        member = self._member(action.owner, parameter, 0)
        member.aggregator = wrapper(member.aggregator)

    def _member(self, owner: int, parameter: Parameter, rotation: int) -> Attached:
        key, name = (owner, parameter), parameter.name
        if key not in self._members:
            keys = rng.parameter_keys(self.program.seed, name, self._owners[owner].comm.rank)
            of = (parameter.numel,), aggregator(parameter), keys, rotation
            self._members[key] = Attached(name, *of)
        return self._members[key]

    def _call(self, action: Call, number: int, index: int) -> Callable[[], Left]:
        size = len(self.program.groups[action.group])
        scatters = action.kind == "reduce_scatter"
        given = self.values(action.numel * (size if scatters else 1), number, index)
        how: dict[str, Any] = {"group": self.ctx.groups[action.group], "async_op": not action.waits}
        how |= {"seed": self.program.seed, "step": number, "name": "call"}
        if action.kind != "all_gather":
            how["op"] = "avg" if action.average else "sum"
        result, future = call(action.kind, given, size, CODECS[action.codec], **how)

        def wait() -> Left:
            if future is not None:
                future.wait()
            return ([], [result]) if scatters else ([result], [])

        return wait


def digest(tensors: Sequence[torch.Tensor]) -> str:
    """8 bytes of blake2b over the tensors' bits, in hexadecimal."""
    state = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        state.update(tensor.numpy().tobytes())
    return state.hexdigest()


# ---- comparing


Found = dict[tuple[int, int], str]


def difference(program: Program, found: Sequence[Found], expected: Sequence[Found]) -> str | None:
    """The first action whose result differs from the serial execution's on a rank, or None."""
    for key in sorted({key for rank in expected for key in rank}):
        for rank, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            if mine.get(key) != theirs.get(key):
                step, index = key
                return (
                    f"seed {program.seed}, step {step}, {program.step(step).actions[index]}: rank "
                    f"{rank} has {mine.get(key)}, and {theirs.get(key)} in the serial execution"
                )
    return None


def strayed(program: Program, found: Sequence[Found]) -> str | None:
    """The first action after which two ranks' replicas differ; None if there is none."""
    for key in sorted({key for rank in found for key in rank}):
        action = program.step(key[0]).actions[key[1]]
        ranks = program.groups[action.group]
        if len({found[rank].get(key, "").split(" ")[0] for rank in ranks}) > 1:
            return f"seed {program.seed}, step {key[0]}, {action}: replicas differ"
    return None
