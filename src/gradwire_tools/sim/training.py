"""The training thread of one rank, on the virtual clock: it computes, starts collectives, and waits
for them.

Collectives of one lane run one after the other, in the order in which they were started; lanes run
beside each other. Under FSDP2 they are its streams: gathers, and reduce-scatters. Under DDP
(`crossing`) each scope has one of its own. `order` is FSDP2's:

    forward   the root's gather, then those of the blocks; a block is computed once its weights have
              come, and gathers are at most two blocks ahead
    backward  from the last block: the gather of the block before is started as one begins; its
              reduce-scatter as it ends. The root has kept its weights, and comes last.

A block's reduce-scatter starts once that of the block after has ended. On a CPU (`blocking`) the
host waits for every gather of forward and every reduce-scatter where it starts it. An all-reduce
between replicas follows the reduce-scatter of its block, in its lane; unless the host waits for it,
it is waited for at the end of backward. The micro-batches of a step follow each other.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from gradwire_tools.sim.clock import Cores, Thread
from gradwire_tools.sim.rank import Rounds, SimulatedRank


class StepAction(NamedTuple):
    """What the training thread does: "compute" for as many seconds; "start" a collective, or "wait"
    for its result; or "mark" the time."""

    do: str
    job: int = -1
    seconds: float = 0.0


@dataclass(frozen=True)
class StepCollective:
    """A collective of a step.

    Attributes:
        group: its group's number, of which the root is the last; or its scope's.
        lane: "gather" or "reduce"; or a scope's own.
        before, after: kernel seconds beyond the graph's.
        hop: whether it is an all-reduce between replicas.
        computing: seconds of its aggregators, as of `SimulatedRank.submit`.
    """

    group: int
    lane: str
    before: float = 0.0
    after: float = 0.0
    hop: bool = False
    computing: Sequence[float] = ()


@dataclass(frozen=True)
class Times:
    """Seconds that a group takes on the training thread.

    Attributes:
        forward, backward: to compute it.
        encode, decode: its weights, once.
    """

    forward: float
    backward: float
    encode: float = 0.0
    decode: float = 0.0


def order(
    groups: Sequence[Times | None],
    backward_gather: str,
    blocking: bool = False,
    prefetches: bool = True,
    hops: Sequence[bool] = (False,),
) -> tuple[list[StepCollective], list[StepAction]]:
    """The collectives of a step, and what the training thread does.

    Args:
        groups: the blocks, then the root; None: a root without parameters.
        backward_gather: what backward does for a block's weights: "gather" them again, "decode"
            what forward kept, or "" (they are there).
        blocking: whether the thread waits for gathers of forward and for reduce-scatters, where
            they start.
        prefetches: whether gathers of backward are started ahead, if `blocking`.
        hops: of each micro-batch, whether gradients are all-reduced between replicas, too.
    """
    jobs: list[StepCollective] = []
    actions: list[StepAction] = []
    for hop in hops:
        _micro_batch(jobs, actions, groups, backward_gather, blocking, prefetches, hop)
    return jobs, actions


def _micro_batch(
    jobs: list[StepCollective],
    actions: list[StepAction],
    groups: Sequence[Times | None],
    backward_gather: str,
    blocking: bool,
    prefetches: bool,
    hop: bool,
) -> None:
    """Append those of one micro-batch; arguments as of `order`."""
    present = [(number, of) for number, of in enumerate(groups) if of is not None]
    last = [one for one in present if one[0] == len(groups) - 1]
    blocks = present[: len(present) - len(last)]

    def job(lane: str, group: int, of: Times) -> int:
        kernels = (of.encode, of.decode) if lane == "gather" else ()
        jobs.append(StepCollective(group, lane, *kernels))
        return len(jobs) - 1

    def walk(gathers: Sequence[int], seconds: Sequence[float], ahead: int) -> Iterator[None]:
        """Compute one group after the other; those beyond `gathers` have their weights."""

        def start(at: int) -> None:
            actions.extend(StepAction("start", gather) for gather in gathers[at : at + 1])

        for at in range(ahead):
            start(at)
        for at, time in enumerate(seconds):
            if not ahead:
                start(at)
            actions.extend(StepAction("wait", gather) for gather in gathers[at : at + 1])
            if ahead:
                start(at + ahead)
            actions.append(StepAction("compute", seconds=time))
            yield

    forward, backward = last + blocks, blocks[::-1] + last
    gathers = [job("gather", *one) for one in forward]
    for _ in walk(gathers, [of.forward for _, of in forward], 0 if blocking else 2):
        pass
    again = blocks[::-1] if backward_gather == "gather" else []
    gathers = [job("gather", *one) for one in again]
    decodes = backward_gather == "decode"
    seconds = [of.backward + (of.decode if decodes else 0.0) for _, of in blocks[::-1]]
    seconds += [of.backward for _, of in last]
    ahead = 1 if prefetches or not blocking else 0
    before: list[StepAction] = []
    hopped: list[StepAction] = []  # what is waited for at the end
    for _, one in zip(walk(gathers, seconds, ahead), backward, strict=True):
        reduces = [job("reduce", *one)]
        if hop:
            jobs.append(StepCollective(one[0], "reduce", hop=True))
            reduces.append(len(jobs) - 1)
        starts, waits = ([StepAction(do, at) for at in reduces] for do in ("start", "wait"))
        if blocking:
            actions += itertools.chain(*zip(starts, waits, strict=True))
        else:
            actions += [*before[:1], *starts]
            hopped += waits[1:]
        before = waits
    actions += [*before[:1], *hopped]


class TrainingThread:
    """Performs the actions of one rank's step.

    Args:
        rank: runs the collectives.
        rounds: of each job.
        cores: on which the thread computes; None: on the rank's.

    Attributes:
        ended: seconds at which the step ended.
        marks: seconds at which it came to each mark.
        kernel_seconds: of kernels beside the collectives' own.
    """

    def __init__(
        self,
        rank: SimulatedRank,
        jobs: Sequence[StepCollective],
        rounds: Sequence[Rounds],
        actions: Sequence[StepAction],
        cores: Cores | None = None,
    ) -> None:
        self.ended: float | None = None
        self.marks: list[float] = []
        self.kernel_seconds = 0.0
        self._rank = rank
        self._jobs, self._rounds = jobs, rounds
        self._actions = deque(actions)
        self._thread = Thread(cores or rank.cores)
        self._lanes: dict[str, deque[int]] = {job.lane: deque() for job in jobs}
        self._kernels = {lane: Thread(rank.cores) for lane in self._lanes}
        self._done: set[int] = set()
        self._computes = False
        rank.on_result = self._arrived

    def go_on(self) -> None:
        """Perform actions until one takes time."""
        while self._actions:
            action = self._actions[0]
            if action.do == "wait" and action.job not in self._done:
                return
            self._actions.popleft()
            if action.do == "start":
                self._start(action.job)
            elif action.do == "mark":
                self.marks.append(self._rank.clock.now)
            elif action.do == "compute":
                self._computes = True
                self._thread.do(action.seconds, self._computed)
                return
        if self.ended is None:
            self.ended = self._rank.clock.now

    def _computed(self) -> None:
        self._computes = False
        self.go_on()

    def _start(self, job: int) -> None:
        lane = self._lanes[self._jobs[job].lane]
        lane.append(job)
        if len(lane) == 1:
            self._begin(job)

    def _begin(self, job: int) -> None:
        of = self._jobs[job]
        submit = partial(self._rank.submit, job, self._rounds[job], of.computing)
        self._kernel(job, of.before, submit)

    def _arrived(self, job: int) -> None:
        self._kernel(job, self._jobs[job].after, partial(self._end, job))

    def _kernel(self, job: int, seconds: float, then: partial[None]) -> None:
        self.kernel_seconds += seconds
        self._kernels[self._jobs[job].lane].do(seconds, then)

    def _end(self, job: int) -> None:
        self._done.add(job)
        lane = self._lanes[self._jobs[job].lane]
        lane.popleft()
        if lane:
            self._begin(lane[0])
        if not self._computes:
            self.go_on()
