"""A collective on a fixed set of tensors: prepared once for its owner, run every step.

prepare    compile, load kernels, agree with the other ranks: on a thread that nobody waits for
start      take the next round of a ticket; fill in addresses and RNG keys; run
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import torch

from gradwire.collectives.defined import check_defined, check_feedback
from gradwire.collectives.job import Item, Job, check_item
from gradwire.collectives.options import Options
from gradwire.collectives.ordered_job import OrderedJob
from gradwire.collectives.prepared import CPU, Prepared
from gradwire.control import digest
from gradwire.engine import Issue, Outcome, Owner, Ticket
from gradwire.engine.identity import LAYOUTS
from gradwire.errors import ConfigError, GradwireError
from gradwire.lang import fingerprint
from gradwire.partition import Spec

_KEPT = 1024  # more than the buckets of any model, few enough to hold
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Collective:
    """What an owner runs on tensors of one layout.

    Args:
        owner: whose rounds these are.
        specs: the tensors, the same on every rank.
        options: how to run it.
        kind: "all_reduce", or one of its halves: "reduce_scatter", "all_gather". Of a half, each
            tensor holds every rank's shard, in rank order.
        device: of the tensors: the CPU, or a GPU, from which messages go over NCCL, or by way of
            pinned memory where the group has none.

    Raises:
        ConfigError: a dtype is not a supported float, or a codec is not defined in the algorithm or
            with error feedback.

    Attributes:
        issue: what ranks compare.
    """

    def __init__(
        self,
        owner: Owner,
        specs: Sequence[Spec],
        options: Options,
        kind: str,
        device: torch.device,
    ) -> None:
        self.owner = owner
        self.comm = owner.comm
        self.specs = tuple(specs)
        self.options = options
        self.kind = kind
        self.device = device
        self._check()
        self._ready: Future[Prepared] = Future()
        used = dict.fromkeys((spec.codec, spec.dtype) for spec in self.specs)
        self._description = [f"on {device.type}", str(options), *map(str, self.specs)]
        # A codec's name says little of a user's file, which may be an older one elsewhere.
        self._description += [f"{c}: program {fingerprint(c, dtype)}" for c, dtype in used]
        number = digest(self.comm.world_size, kind, self._description)
        self.issue = Issue(number, _in_words(kind, self.specs))

    def _check(self) -> None:
        for spec in self.specs:
            if spec.dtype not in DTYPES:
                raise ConfigError(
                    f"{spec.name}: cannot compress {spec.dtype}; float32, float16 and bfloat16 "
                    f"can be. Use torch.distributed.{self.kind} for other dtypes"
                )
            if self.kind == "all_reduce":
                check_defined(self.options.algorithm, spec.codec)
            if spec.feedback:
                check_feedback(spec.codec)

    @property
    def prepared(self) -> Prepared:
        """What was compiled; waits for it, and for the other ranks.

        Raises:
            ConfigError: ranks disagree on the specs or options, a tensor cannot be cut into shards,
                a codec has no kernels for the device, or a checksum is asked for over NCCL.
            TransportError: a peer did not answer.
        """
        return self._ready.result()

    def prepare(self, agreement: Future[int], name: str | None) -> None:
        """Make `prepared`; called once, on a thread that may wait.

        What can go wrong on one rank alone goes wrong before ranks compare: they compare that too.

        Args:
            agreement: ends when all ranks hold this layout.
            name: of the agreement, if it begins here.
        """
        refused: GradwireError | None = None
        try:
            try:
                made = Prepared(
                    self.comm, self.specs, self.options, self.kind, self.device, self.issue.digest
                )
            except ConfigError as error:
                refused = error
                if name is None:  # the others have begun
                    self.comm.fail(error)
            if name is not None:
                verdict = "ready" if refused is None else f"refused: {refused}"
                lines = [self.kind, *self._description, verdict]
                _copy(self.comm.agreement(name, "a collective", lines), agreement)
            agreement.result()
            if refused is not None:
                raise refused
            number = self.issue.digest
            made.tags = number if self.owner.single else self.comm.claim(self.owner, f"{number:x}")
        except BaseException as error:
            if not agreement.done():
                agreement.set_exception(error)
            if not isinstance(error, ConfigError):
                self.comm.fail(error)
            self._ready.set_exception(error)
        else:
            self._ready.set_result(made)

    def start(
        self, items: Sequence[Item], average: bool, ticket: Ticket | None = None
    ) -> Future[Outcome]:
        """Run it on `items` (one for each spec, in order); the values are replaced by the result.

        Args:
            items: this step's tensors.
            average: divide the sum by the world size.
            ticket: whose next round this is; None: a ticket of its own.

        Returns:
            A future that ends when the result is in place, or with the error that prevented it;
            over NCCL, when it is queued: `result()` has the caller's stream wait for it.

        Raises:
            ConfigError: memory that is not what the spec says; nothing has been sent then.
            TransportError: the group is broken.
            CodecError: likewise, by a payload on a GPU.
        """
        for spec, item in zip(self.specs, items, strict=True):
            check_item(spec, item, self.comm.world_size, self.device)
        mine = self.owner.ticket() if ticket is None else ticket
        try:
            stream = self.comm.stream(self.device)
            if stream is None:
                running = mine.begin(
                    self.issue, self._ready, lambda ready: Job(ready, items, average, mine)
                )
            else:
                ready = self.prepared
                running = mine.begin_in_order(
                    self.issue, stream, lambda: OrderedJob(ready, items, average, mine)
                )
        finally:
            if ticket is None:
                mine.close()
        return running


def prepare(
    owner: Owner,
    specs: Sequence[Spec],
    options: Options | None = None,
    kind: str = "all_reduce",
    device: torch.device = CPU,
) -> Collective:
    """The Collective of `specs`, made on first use and kept for its owner; it waits for nobody.

    Raises:
        ConfigError: as Collective, or `options` of another type.
    """
    if not (options is None or isinstance(options, Options)):
        raise ConfigError(f"options={options!r}: give a gradwire.Options(...), or None")
    options = options or Options()
    key = (kind, tuple(specs), options, device)
    with owner.preparing:
        known = owner.kept.get(key)
        if isinstance(known, Collective) and _is_agreed(owner, known):
            owner.kept.move_to_end(key)
            return known
        made = Collective(owner, specs, options, kind, device)
        owner.kept[key] = made
        if len(owner.kept) > _KEPT:
            owner.kept.popitem(last=False)
        agreement, name = _agreement(owner, made)
    owner.comm.workers.run(partial(made.prepare, agreement, name))
    return made


def _agreement(owner: Owner, made: Collective) -> tuple[Future[int], str | None]:
    """(the agreement on a layout, its name if it has yet to begin).

    Ranks may differ in options that are nobody else's business, so what was agreed on is kept by
    digest, not by key. The calls of a stream have one order: their agreements are counted, so that
    unlike calls meet, and a layout gives up its place to one that has the same tags. Rounds of a
    handle's tickets come in any order: there, all ranks that need a layout meet under its digest.
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
    """Whether the ranks hold this layout, or are about to find out."""
    number = made.issue.digest
    held, agreement = owner.agreed.get(number % LAYOUTS if owner.single else number, (None, None))
    if held != number or agreement is None:
        return False
    failed = agreement.done() and agreement.exception() is not None
    # A handle's layout comes from its plan: what was refused once will be refused again.
    return not (failed and owner.single)


def _in_words(kind: str, specs: Sequence[Spec]) -> str:
    values = sum(spec.numel for spec in specs)
    codecs = ", ".join(dict.fromkeys(str(spec.codec) for spec in specs))
    dtypes = ", ".join(dict.fromkeys(str(spec.dtype).removeprefix("torch.") for spec in specs))
    what = f"{specs[0].name} of" if len(specs) == 1 else f"{len(specs)} tensors of"
    return f"{kind} ({what} {values} x {dtypes} through {codecs})"


def _copy(source: Future[int], target: Future[int]) -> None:
    """End `target` as `source` ends, which is awaited."""
    error = source.exception()
    if error is None:
        target.set_result(source.result())
    else:
        target.set_exception(error)
