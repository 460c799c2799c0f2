"""The collectives of a scope, round by round: prepared once for its owner, run every step.

prepare    compile, load kernels, agree with the other ranks: on a worker thread
start      begin the next round of a ticket; fill in addresses and RNG keys; run

A collective that a user calls is a scope of one round.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch

from gradwire.collectives.job import Item, Job, check_item
from gradwire.collectives.legal import check_legal
from gradwire.collectives.operation import AVERAGE, Operation
from gradwire.collectives.options import Options
from gradwire.collectives.ordered_job import OrderedJob
from gradwire.collectives.packed_job import PackedJob
from gradwire.collectives.prepared import CPU, Part, Prepared
from gradwire.control import digest
from gradwire.engine import Issue, Outcome, Owner, Ticket
from gradwire.errors import ConfigError, GradwireError
from gradwire.lang import rng
from gradwire.partition import Spec
from gradwire.waiting import result_of

_KEPT = 512  # single collectives of an owner: more than the layers of any model


class Asked(NamedTuple):
    """What a request of an aggregator runs as.

    Attributes:
        part: the index of the round's collective that carries it.
        spec: of its tensor.
        keys: of its random numbers.
    """

    part: int
    spec: Spec
    keys: rng.Keys


class Round(NamedTuple):
    """The collectives of a round, which run concurrently.

    Attributes:
        parts: the collectives.
        shapes: the requests that they carry, in order: (parameter, `Request.shape`).
        asked: how each of them runs.
    """

    parts: tuple[Part, ...]
    shapes: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    asked: tuple[Asked, ...] = ()


class ScopeProgram:
    """The rounds of a scope, for one owner.

    Args:
        owner: issues its rounds.
        rounds: what they run.

    Raises:
        ConfigError: `check_legal` rejects a collective.

    Attributes:
        lines, digest: of what ranks compare.
        ready: completes when it is prepared, with the collectives of every round.
        issue: its description.
        tells_all: whether any of them does, see `Part.tells_all`.
    """

    def __init__(self, owner: Owner, rounds: Sequence[Round]) -> None:
        self.owner = owner
        self.comm = owner.comm
        self.rounds = rounds
        self.ready: Future[list[list[Prepared]]] = Future()
        parts = [part for one in rounds for part in one.parts]
        for part in parts:
            for spec in part.specs:
                check_legal(part.operation, spec, part.options, self.comm.world_size)
        self.tells_all = any(part.tells_all(self.comm.world_size) for part in parts)
        words = [" and ".join(map(str, one.parts)) for one in rounds]
        if len(words) > 1:
            words = [f"round {number}: {what}" for number, what in enumerate(words)]
        self.lines = [line for part in parts for line in part.lines()]
        self.lines += [f"rounds of {[len(one.parts) for one in rounds]}"] * (len(rounds) > 1)
        self.digest = digest(self.comm.world_size, "a scope", self.lines)
        self.range = f"{self.digest:x}"  # the name of its tag range
        self._begun = False
        if not owner.single:  # others of this digest may differ in options that are local
            owner.held[self.range] += 1
            weakref.finalize(self, owner.held.subtract, [self.range]).atexit = False
        self.issue = Issue(self.digest, "; ".join(words))

    @property
    def prepared(self) -> list[list[Prepared]]:
        """The compiled collectives, by round; waits for preparation here and for the other ranks.

        Raises:
            ConfigError: ranks disagree on the specs or options, a tensor cannot be cut into shards,
                a codec has no kernels for the device, or a checksum is requested over NCCL.
            TransportError: a peer did not answer.
        """
        return result_of(self.ready)

    def reserve(self) -> None:
        """Allocate the memory of one run of each collective in advance."""
        for prepared in chain.from_iterable(self.prepared):
            prepared.reserve()

    def begin(self) -> None:
        """Begin to prepare it, unless that has begun; returns without waiting for peers."""
        with self.owner.preparing:
            if self._begun:
                return
            self._begun = True
            agreement = self.owner.agreement(self.digest)
        self.comm.workers.run(partial(self.prepare, *agreement))

    def prepare(self, agreement: Future[int], name: str | None) -> None:
        """Complete `ready`; called once, on a thread that may block.

        Steps that can fail on a single rank come before ranks compare, so that they compare the
        outcome too.

        Args:
            agreement: completes when all ranks hold this program.
            name: of the agreement, if it begins here.
        """
        refused: GradwireError | None = None
        try:
            try:
                made = [
                    [Prepared(self.comm, part, self.digest) for part in one.parts]
                    for one in self.rounds
                ]
            except ConfigError as error:
                refused = error
                if name is None:  # the others have begun
                    self.comm.fail(error)
            if name is not None:
                verdict = "ready" if refused is None else f"refused: {refused}"
                said = [*self.lines, verdict]
                agreement.set_result(result_of(self.comm.agreement(name, "a collective", said)))
            result_of(agreement)
            if refused is not None:
                raise refused
            tags = self.digest
            if not self.owner.single:
                tags = self.comm.ranges.claim(self.owner, self.range)
            for prepared in made:
                _number(prepared, tags)
        except BaseException as error:
            if not agreement.done():
                agreement.set_exception(error)
            if not isinstance(error, ConfigError):
                self.comm.fail(error)
            self.ready.set_exception(error)
        else:
            self.ready.set_result(made)

    def start(self, items: Sequence[Item]) -> Future[Outcome]:
        """Run a program of a single collective on `items` (one per spec, in order); the result
        replaces the values.

        Returns:
            A future that completes with the result, or fails with the error that prevented it. Over
            NCCL it completes when the collective is queued, and `result()` makes the caller's
            stream wait for it.

        Raises:
            ConfigError: memory differs from its spec; nothing has been sent then.
            TransportError: the group is broken.
            CodecError: the group is broken by a payload on a GPU that could not be decoded.
        """
        self.check(0, [items])
        ticket = self.owner.ticket()
        try:
            (running,) = self.start_round(ticket, 0, [items])
        finally:
            ticket.close()
        return running

    def check(self, number: int, items: Sequence[Sequence[Item]]) -> None:
        """Raise ConfigError unless the memory of `items`, by part, matches the specs."""
        for part, of_part in zip(self.rounds[number].parts, items, strict=True):
            for spec, item in zip(part.specs, of_part, strict=True):
                check_item(spec, item, self.comm, part.device)

    def start_round(
        self,
        ticket: Ticket,
        number: int,
        items: Sequence[Sequence[Item]],
        why: Callable[[], str] | None = None,
    ) -> list[Future[Outcome]]:
        """The next round of `ticket`, on items that have been checked: its collectives begin when
        all are prepared, in one order on every rank. A ticket awaits its receives in the order in
        which they are posted, which must be the same on all ranks. Over NCCL they are queued one
        after the other.

        Args:
            why: returns the purpose of the round, for errors.
        """
        ticket.next_round(replace(self.issue, why=why))
        stream = self.comm.stream(self.rounds[number].parts[0].device)
        if stream is None:
            makes = [
                partial(_job, number, place, of_part, ticket) for place, of_part in enumerate(items)
            ]
            return ticket.begin(self.ready, makes)
        return [
            ticket.begin_in_order(stream, partial(OrderedJob, prepared, of_part, ticket))
            for prepared, of_part in zip(self.prepared[number], items, strict=True)
        ]


def _job(
    number: int, place: int, items: Sequence[Item], ticket: Ticket, made: list[list[Prepared]]
) -> Job:
    prepared = made[number][place]
    return (PackedJob if prepared.program.packings else Job)(prepared, items, ticket)


def _number(collectives: Sequence[Prepared], tags: int) -> None:
    """Number the messages of a round's collectives, which share the tags of one range."""
    used: dict[int, int] = {}  # by peer, which counts alike
    for prepared in collectives:
        prepared.tags, before, graph = tags, dict(used), prepared.graph
        for task, peer in enumerate(graph.peer):
            if peer >= 0:
                prepared.slot[task] = slot = before.get(peer, 0) + graph.slot[task]
                used[peer] = max(used.get(peer, 0), slot + 1)


def prepare(
    owner: Owner,
    specs: Sequence[Spec],
    options: Options | None = None,
    operation: Operation = AVERAGE,
    device: torch.device = CPU,
) -> ScopeProgram:
    """The program of a single collective, made on first use and cached; returns without waiting for
    peers.

    Raises:
        ConfigError: as ScopeProgram.
    """
    part = Part(operation, tuple(specs), options or Options(), device)
    with owner.preparing:
        known = owner.kept.get(part)
        if isinstance(known, ScopeProgram) and owner.agrees(known.digest):
            owner.kept.move_to_end(part)
            return known
        made = owner.kept[part] = ScopeProgram(owner, [Round((part,))])
        if len(owner.kept) > _KEPT:
            owner.kept.popitem(last=False)
    made.begin()
    return made


def program_for(owner: Owner, rounds: Sequence[Round]) -> ScopeProgram:
    """The program of a scope, shared with others of the owner that are alike.

    Raises:
        ConfigError: as ScopeProgram.
    """
    key = tuple(rounds)
    with owner.preparing:
        known = owner.programs.get(key)
        if not isinstance(known, ScopeProgram):
            known = owner.programs[key] = ScopeProgram(owner, key)
    return known
