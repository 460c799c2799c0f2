"""Replicas that go on in another group: after one of them was lost, or with one that joins.

A replica applies a meeting once all ranks of all replicas have its averages. One whose peer is lost
while they tell each other so may have applied it, or not; the others have all that it takes to
follow. So those that go on tell each other how far they are, and end the meeting alike.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

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
    steps = [member.step for member in before.members.values()]
    own = [before.met, before.taken, max(steps), before.plan.version, before.missed]
    inside = [] if before.inside is None else [before.inside]
    told = ranks_of([*inside, comm], "outer").tell("recovery", [before.prepared, *own]).result()
    missed = [lost for *_, lost in told if lost is not None]
    before.decide(apply=not missed)
    met = [of + (prepared and not missed) for prepared, of, *_ in told]
    taken = min(one[2] for one, of in zip(told, met, strict=True) if of == max(met))
    step, version = max(one[3] for one in told), max(one[4] for one in told)

    mine = [before.met, before.taken, before.fingerprint(), before.lr, before.momentum, seed]
    facts = ranks_of([comm], "outer").tell("outer weights", mine).result()
    source = max(range(len(facts)), key=lambda rank: (*facts[rank][:2], -rank))
    *_, before.lr, before.momentum, seed = facts[source]
    behind = [[of, number] != facts[source][:3:2] for of, _, number, *_ in facts]
    if any(behind):
        before.take(comm, source)
    plan = before.plan
    after = make(plan.rules, plan.options, seed, comm, before, version)
    begins = any(ranks_of(inside, "outer").tell("behind", behind[comm.rank]).result())
    if begins:
        after.follow()
    _carry(before, after, step, begins, any(behind))
    before.leave(to=comm)
    after.met, after.taken, after.lr, after.momentum = max(met), taken, before.lr, before.momentum
    ended = "held again" if missed else "applied by all" if any(one[0] for one in told) else ""
    line = f"{before.ranks} replicas before, {after.ranks} now, of which {sum(behind)} began anew"
    after.decisions = before.decisions
    after.decided({"by": "outer", "line": f"{line}; a meeting was {ended}" if ended else line})
    after.missed = max(missed, default=None)
    return after, seed


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
