"""Replicas that go on in another group: after one of them was lost, or with one that joins.

A replica applies a meeting once all ranks of all replicas have its averages. One whose peer is lost
while they tell each other so may have applied it, or not; the others have all that it takes to
follow. So those that go on tell each other how far they are, and end the meeting alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from gradwire.engine import Communicator, ranks_of
from gradwire.errors import GradwireError
from gradwire.outer_loop.steps import OuterSteps


def regroup(
    before: OuterSteps, comm: Communicator, seed: int, make: Callable[..., OuterSteps]
) -> tuple[OuterSteps, int]:
    """The meetings of the replicas of a group, which follow those of another, with the fragment
    that is to meet again, if any; and the seed of random numbers. Collective.

    Args:
        before: of this rank, in a group that may be broken.
        comm: of the replicas that go on.
        make: the meetings of a group, from rules, options, seed, group, those before and version.
    """
    with suppress(GradwireError):  # a meeting that ends well is over
        before.finish()
    step = max((member.step for member in before.members.values()), default=0)
    own = [before.ranks, before.met, before.taken, step, before.plan.version, before.missed]
    inside = [] if before.inside is None else [before.inside]
    ranks = ranks_of([*inside, comm], "outer")
    told = ranks.tell("recovery", [before.prepared, *own]).result()
    applies = [one[0] and _is_applied(one, told) for one in told]
    before.decide(applies[ranks.rank])
    missed = [lost for *_, lost in told if lost is not None]
    # Of the largest group, and of equals those that have met most often: they are followed.
    order = [(of, met + now) for (_, of, met, *_), now in zip(told, applies, strict=True)]
    taken = min(one[3] for one, of in zip(told, order, strict=True) if of == max(order))
    step, version = max(one[4] for one in told), max(one[5] for one in told)

    mine = [before.ranks, before.met, before.fingerprint(), before.lr, before.momentum, seed]
    facts = ranks_of([comm], "outer").tell("outer weights", mine).result()
    source = max(range(len(facts)), key=lambda rank: (*facts[rank][:2], -rank))
    *_, lr, momentum, seed = facts[source]
    behind = [one[1:3] != facts[source][1:3] for one in facts]
    after = make(before.plan.rules, before.plan.options, seed, comm, before, version)
    try:
        if any(behind):
            after.take(comm, source)
        begins = any(ranks_of(inside, "outer").tell("behind", behind[comm.rank]).result())
        if begins:
            after.follow()
    except BaseException:
        after.halt()
        raise
    _carry(before, after, step, begins, any(behind))
    before.leave(to=comm)
    after.met, after.taken, after.lr, after.momentum = facts[source][1], taken, lr, momentum
    line = f"{before.ranks} replicas before, {after.ranks} now, of which {sum(behind)} began anew"
    line += "; a meeting was applied by all" * any(applies)
    line += "; a meeting was held again" * bool(missed)
    after.decisions = before.decisions
    after.decided({"by": "outer", "line": line, "step": taken})
    after.missed = max(missed, default=None)
    return after, seed


def _is_applied(mine: Sequence[Any], told: Sequence[Sequence[Any]]) -> bool:
    """Whether a rank that is prepared applies its meeting: one of its group has, and has met more
    often, or none has given it up."""
    mates = [(met, lost) for _, of, met, *_, lost in told if of == mine[1]]
    given_up = any(met == mine[2] and lost is not None for met, lost in mates)
    return any(met > mine[2] for met, _ in mates) or not given_up


def _carry(before: OuterSteps, after: OuterSteps, step: int, begins: bool, joined: bool) -> None:
    """Give members what they had: a replica that begins anew nothing, the others what is not of all
    ranks alike, if one has joined."""
    for name, member in after.members.items():
        member.step = step  # equal on all ranks, and random numbers that were not drawn yet
        if not begins:
            old = before.members[name]
            old.adopt(member.aggregator)
            specs = member.aggregator.states(member.shape)
            alike = {key for key, spec in specs.items() if spec.kind != "per_rank"}
            member.keep({k: v for k, v in old.state.items() if not (joined and k in alike)})
