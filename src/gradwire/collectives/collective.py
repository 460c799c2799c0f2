"""A collective on a fixed set of tensors: prepared once for its owner, run every step.

prepare    compile, load kernels, agree with the other ranks: on a worker thread
start      begin the next round of a ticket; fill in addresses and RNG keys; run
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property, partial
from typing import TypeVar

import torch

from gradwire.collectives.job import Item, Job, check_item
from gradwire.collectives.legal import check_legal
from gradwire.collectives.operation import AVERAGE, Operation
from gradwire.collectives.options import Options
from gradwire.collectives.ordered_job import OrderedJob
from gradwire.collectives.packed_job import PackedJob
from gradwire.collectives.prepared import CPU, Prepared
from gradwire.control import digest
from gradwire.engine import Issue, Outcome, Owner, Ticket
from gradwire.engine.identity import LAYOUTS
from gradwire.errors import ConfigError, GradwireError
from gradwire.lang import fingerprint
from gradwire.partition import Spec
from gradwire.waiting import result_of

T = TypeVar("T")

_KEPT = 1024  # more than the buckets of any model, few enough to keep in memory
_TURNS = 3  # changes of plan after which an unused collective is dropped


class Collective:
    """An operation on tensors of one layout, for one owner.

    Args:
        owner: issues its rounds.
        operation: verb, operator and root.
        specs: the tensors, the same on every rank.
        options: how to run it.
        device: of the tensors: the CPU, or a GPU, whose messages travel over NCCL, or through
            pinned memory where the group has no NCCL.

    Raises:
        ConfigError: `check_legal` rejects it.

    Attributes:
        issue: the description that ranks compare.
        ready: completes when it is prepared.
        turns: changes of plan since its last use; see `retire`.
    """

    def __init__(
        self,
        owner: Owner,
        operation: Operation,
        specs: Sequence[Spec],
        options: Options,
        device: torch.device,
    ) -> None:
        self.owner = owner
        self.comm = owner.comm
        self.operation = operation
        self.specs = tuple(specs)
        self.options = options
        self.device = device
        for spec in self.specs:
            check_legal(operation, spec, options, self.comm.world_size)
        self.ready: Future[Prepared] = Future()
        self.turns = 0
        used = dict.fromkeys((spec.codec, spec.dtype) for spec in self.specs)
        self._description = [f"on {device.type}", str(options), *map(str, self.specs)]
        # A codec's name does not identify its code: a rank may have an older version of the file.
        self._description += [f"{c}: program {fingerprint(c, dtype)}" for c, dtype in used]
        number = digest(self.comm.world_size, str(operation), self._description)
        self.issue = Issue(number, _in_words(operation, self.specs))

    @property
    def range(self) -> str:
        """The name of its tag range."""
        return f"{self.issue.digest:x}"

    @cached_property
    def tells_all(self) -> bool:
        """Whether its messages carry data from every rank to every other: all but broadcasts do,
        and reduce-scatters of which a rank gets nothing."""
        if self.operation.verb == "reduce_scatter":
            ranks = self.comm.world_size
            shards = [[length for _, length, _ in spec.shards(ranks)] for spec in self.specs]
            return all(map(any, zip(*shards, strict=True)))
        return self.operation.verb != "broadcast" and any(spec.numel for spec in self.specs)

    @property
    def prepared(self) -> Prepared:
        """The compiled collective; waits for preparation here and for the other ranks.

        Raises:
            ConfigError: ranks disagree on the specs or options, a tensor cannot be cut into shards,
                a codec has no kernels for the device, or a checksum is requested over NCCL.
            TransportError: a peer did not answer.
        """
        return result_of(self.ready)

    def prepare(self, agreement: Future[int], name: str | None) -> None:
        """Complete `ready`; called once, on a thread that may block.

        Steps that can fail on a single rank come before ranks compare, so that they compare the
        outcome too.

        Args:
            agreement: completes when all ranks hold this layout.
            name: of the agreement, if it begins here.
        """
        refused: GradwireError | None = None
        try:
            try:
                made = Prepared(
                    self.comm, self.operation, self.specs, self.options, self.device,
                    self.issue.digest,
                )  # fmt: skip
            except ConfigError as error:
                refused = error
                if name is None:  # the others have begun
                    self.comm.fail(error)
            if name is not None:
                verdict = "ready" if refused is None else f"refused: {refused}"
                lines = [str(self.operation), *self._description, verdict]
                _copy(self.comm.agreement(name, "a collective", lines), agreement)
            result_of(agreement)
            if refused is not None:
                raise refused
            number = self.issue.digest
            made.tags = number if self.owner.single else self.comm.claim(self.owner, self.range)
        except BaseException as error:
            if not agreement.done():
                agreement.set_exception(error)
            if not isinstance(error, ConfigError):
                self.comm.fail(error)
            self.ready.set_exception(error)
        else:
            self.ready.set_result(made)

    def start(self, items: Sequence[Item]) -> Future[Outcome]:
        """Run it on `items` (one per spec, in order), as its own scope; the result replaces the
        values.

        Returns:
            A future that completes with the result, or fails with the error that prevented it. Over
            NCCL it completes when the collective is queued, and `result()` makes the caller's
            stream wait for it.

        Raises:
            ConfigError: memory differs from its spec; nothing has been sent then.
            TransportError: the group is broken.
            CodecError: the group is broken by a payload on a GPU that could not be decoded.
        """
        self.check(items)
        ticket = self.owner.ticket()
        try:
            (running,) = start_round(ticket, [(self, items)])
        finally:
            ticket.close()
        return running

    def check(self, items: Sequence[Item]) -> None:
        """Raise ConfigError unless the memory of `items` matches the specs."""
        for spec, item in zip(self.specs, items, strict=True):
            check_item(self.operation, spec, item, self.comm, self.device)


def start_round(
    ticket: Ticket,
    parts: Sequence[tuple[Collective, Sequence[Item]]],
    why: Callable[[], str] | None = None,
) -> list[Future[Outcome]]:
    """The next round of `ticket`: collectives of its owner, concurrently, no two of one layout.
    They begin when all are prepared. The caller has checked their items.

    They begin in this order on every rank, whichever is prepared first: a ticket awaits its
    receives in the order in which they are posted, which must be the same on all ranks. Over NCCL
    they are queued one after the other.

    Args:
        why: returns the purpose of the round, for errors.
    """
    issue = parts[0][0].issue
    if len(parts) > 1:
        issues = [collective.issue for collective, _ in parts]
        text = [f"{issue.digest:x}" for issue in issues]
        issue = Issue(digest(len(parts), "a round", text), " and ".join(i.what for i in issues))
    ticket.next_round(replace(issue, why=why))
    running = []
    turns: list[Future[Prepared]] = []
    for collective, items in parts:
        stream = ticket.owner.comm.stream(collective.device)
        if stream is None:
            make = partial(_job, items=items, ticket=ticket)
            if len(parts) > 1:
                turns.append(Future())
            running.append(ticket.begin(turns[-1] if turns else collective.ready, make))
        else:
            ready = collective.prepared
            running.append(ticket.begin_in_order(stream, partial(OrderedJob, ready, items, ticket)))
    if turns:
        _take_turns([collective.ready for collective, _ in parts], turns)
    return running


def _job(prepared: Prepared, items: Sequence[Item], ticket: Ticket) -> Job:
    return (PackedJob if prepared.program.packings else Job)(prepared, items, ticket)


def _take_turns(ready: Sequence[Future[Prepared]], turns: Sequence[Future[Prepared]]) -> None:
    """Once all of `ready` have completed, complete `turns` in order, with their results; one error
    fails all.

    A ticket waits for its messages one after the other, in the order in which its collectives have
    begun. Ranks that began them in different orders, as they happen to be prepared, would deadlock.
    """
    left, lock = len(ready), threading.Lock()

    def ended(_: Future[Prepared]) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left:
                return
        errors = [future.exception() for future in ready]
        first = next((error for error in errors if error is not None), None)
        for future, error, turn in zip(ready, errors, turns, strict=True):
            if first is None:
                turn.set_result(future.result())
            else:
                turn.set_exception(error or first)

    for future in ready:
        future.add_done_callback(ended)


def prepare(
    owner: Owner,
    specs: Sequence[Spec],
    options: Options | None = None,
    operation: Operation = AVERAGE,
    device: torch.device = CPU,
) -> Collective:
    """The Collective of `specs`, made on first use and cached; returns without waiting for peers.

    Raises:
        ConfigError: as Collective.
    """
    options = options or Options()
    key = (operation, tuple(specs), options, device)
    with owner.preparing:
        known = owner.kept.get(key)
        if isinstance(known, Collective) and _is_agreed(owner, known):
            owner.kept.move_to_end(key)
            known.turns = 0
            return known
        made = Collective(owner, operation, specs, options, device)
        owner.kept[key] = made
        if len(owner.kept) > _KEPT:
            owner.kept.popitem(last=False)
        agreement, name = _agreement(owner, made)
    owner.comm.workers.run(partial(made.prepare, agreement, name))
    return made


def retire(owner: Owner) -> None:
    """Called when a handle's plan changes: drop collectives that none of its last plans used."""
    with owner.preparing:
        for key, kept in list(owner.kept.items()):
            assert isinstance(kept, Collective)
            kept.turns += 1
            if kept.turns > _TURNS:
                del owner.kept[key]
                owner.retired.add(kept.range)


def _agreement(owner: Owner, made: Collective) -> tuple[Future[int], str | None]:
    """(the agreement on a layout, its name if it has yet to begin).

    Agreements are cached by digest, not by key, since ranks may differ in options that are local.
    The calls of a stream have one order: their agreements are numbered, so that calls that differ
    are compared, and a layout replaces one with the same tags. Rounds of a handle's tickets come in
    any order: there, the digest names the agreement.
    """
    number = made.issue.digest
    place = number % LAYOUTS if owner.single else number
    if _is_agreed(owner, made):
        return owner.agreed[place][1], None
    name = f"{owner.key}/{owner.made if owner.single else f'{number:x}'}"
    owner.made += 1
    agreement: Future[int] = Future()
    owner.agreed[place] = number, agreement
    return agreement, name


def _is_agreed(owner: Owner, made: Collective) -> bool:
    """Whether the ranks have agreed on this layout, or are comparing it."""
    number = made.issue.digest
    held, agreement = owner.agreed.get(number % LAYOUTS if owner.single else number, (None, None))
    if held != number or agreement is None:
        return False
    failed = agreement.done() and agreement.exception() is not None
    # A handle's layout comes from its plan: a rejected layout would be rejected again.
    return not (failed and owner.single)


def _in_words(operation: Operation, specs: Sequence[Spec]) -> str:
    values = sum(spec.numel for spec in specs)
    codecs = ", ".join(dict.fromkeys(str(spec.codec) for spec in specs))
    dtypes = ", ".join(dict.fromkeys(str(spec.dtype).removeprefix("torch.") for spec in specs))
    what = f"{specs[0].name} of" if len(specs) == 1 else f"{len(specs)} tensors of"
    return f"{operation} ({what} {values} x {dtypes} through {codecs})"


def _copy(source: Future[T], target: Future[T]) -> None:
    """Wait for `source`, and complete `target` with its result or error."""
    error = source.exception()
    if error is None:
        target.set_result(source.result())
    else:
        target.set_exception(error)
