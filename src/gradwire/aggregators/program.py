"""Scope programs: what the aggregators of a scope ask for, found on zeros.

The kind, number and sizes of an aggregator's collectives depend on its parameters and on
`Aggregator.variant` alone. So its coroutine runs once on zeros, with initial state, where nothing
is sent and each collective leaves its values as they are; what it asks for is compiled and agreed
on, and every step must ask for the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

from gradwire.aggregators.attached import Attached
from gradwire.aggregators.contract import aggregator_error, kind
from gradwire.aggregators.coroutine import Asking, Coroutine, ask
from gradwire.collectives import (
    Asked,
    Item,
    Operation,
    Options,
    Part,
    Request,
    Round,
    ScopeProgram,
    check_legal,
    program_for,
)
from gradwire.engine import Owner
from gradwire.errors import ConfigError
from gradwire.lang import rng

_HELD = 3  # plans before that in force whose programs are held: a trial may go back to one
AHEAD = 16  # steps whose variants a new plan prepares


def coroutines(
    members: Sequence[Attached], reductions: Sequence[Request], rank: int, world_size: int
) -> list[Coroutine]:
    """One coroutine per aggregator, in the order of the aggregators' first parameters."""
    served: dict[int, list[int]] = {}  # id of an aggregator -> indices of its parameters
    for index, member in enumerate(members):
        served.setdefault(id(member.aggregator), []).append(index)
    made, of = [], (reductions[0].values.device, rank, world_size)
    for indices in served.values():
        contexts = [members[i].context(reductions[i], *of) for i in indices]
        made.append(Coroutine(members[indices[0]].aggregator, contexts))
    return made


def program_of(
    owner: Owner,
    plan: int,
    members: Sequence[Attached],
    reductions: Sequence[Request],
    options: Options,
) -> ScopeProgram:
    """The program of a scope at the present step, made on first use; its preparation has yet to
    begin (`ScopeProgram.begin`).

    Args:
        plan: the version of the plan that it belongs to.
        members: its parameters.
        reductions: of their gradients.
        options: defaults for collectives.

    Raises:
        ConfigError: an aggregator breaks the contract, or a request is not legal.
        Exception: an aggregator's own.
    """
    ranks = owner.comm.world_size
    scopes = owner.scopes.setdefault(plan, {})
    variants: list[Any] = [m.aggregator.variant(m.step, ranks) for m in members]
    for m, variant in zip(members, variants, strict=True):
        if type(variant) is not int:
            what = f"`variant` returns {kind(variant)}, not a number"
            raise aggregator_error(m.aggregator, m.name, 0, what)
    places = zip(members, variants, reductions, strict=True)
    key = options, *((m.name, id(m.aggregator), variant, r.shape) for m, variant, r in places)
    if key not in scopes:
        fresh = [m.at_first(m.aggregator, m.step) for m in members]
        zeros = [r.on_zeros() for r in reductions]
        rounds = [*rounds_of(fresh, zeros, options, owner.comm.rank, ranks)]
        # Aggregators are held, too: no other one has the same id meanwhile.
        scopes[key] = program_for(owner, rounds), [m.aggregator for m in members]
    program: ScopeProgram = scopes[key][0]
    return program


def drop_programs(owner: Owner, plan: int) -> None:
    """Drop what only plans long before this version, which comes into force, have used."""
    for version in [v for v in list(owner.scopes) if v < plan - _HELD]:
        del owner.scopes[version]


def rounds_of(
    members: Sequence[Attached], reductions: Sequence[Request], options: Options, rank: int,
    world_size: int,
) -> Iterator[Round]:  # fmt: skip
    """What a scope's aggregators ask for where nothing is sent; they compute between two rounds."""
    active, number = coroutines(members, reductions, rank, world_size), 0
    while active:
        active, asking = ask(active, number)
        if asking:
            one = _round(asking, options, number, world_size)
            items_of(one, asking, number, rank, world_size)
            yield one
            number += 1


def _round(asking: Sequence[Asking], given: Options, number: int, world_size: int) -> Round:
    """The collectives of a round: one per operation and options, in the order of requests."""
    routes: dict[tuple[Operation, Options], int] = {}
    counts: dict[str, int] = {}  # requests of each parameter so far
    found: list[Asked] = []
    for coroutine, c, request in asking:
        count = counts.get(c.name, 0)
        counts[c.name] = count + 1
        name, keys = f"{c.name} ({count + 1})" if count else c.name, c.keys
        if count:
            more = count * rng.GOLDEN
            keys = rng.Keys(rng.mix64(keys.own + more), rng.mix64(keys.shared + more))
        try:
            request.check()
            operation, options = request.operation, request.options(given)
            spec = request.spec(name, c.member.rotation, world_size)
            check_legal(operation, spec, options, world_size)
        except ConfigError as error:
            raise aggregator_error(coroutine.aggregator, c.name, number, str(error)) from None
        part = routes.setdefault((operation, options), len(routes))
        found.append(Asked(part, spec, keys))
    device = asking[0].request.values.device
    parts = tuple(
        Part(operation, tuple(a.spec for a in found if a.part == part), options, device)
        for (operation, options), part in routes.items()
    )
    return Round(parts, shapes_of(asking), tuple(found))


def shapes_of(asking: Sequence[Asking]) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    return tuple([(context.name, request.shape) for _, context, request in asking])


def check_asked(
    rounds: Sequence[Round], number: int, asking: Sequence[Asking], members: Sequence[Attached]
) -> None:
    """Raise ConfigError unless the requests of round `number` are those of the program."""
    found = shapes_of(asking)
    known = rounds[number].shapes if number < len(rounds) else ()
    if found == known:
        return
    for _, _, request in asking:
        request.check()
    now, then = next(pair for pair in zip_longest(found, known) if pair[0] != pair[1])
    name = (now or then or ("",))[0]
    (aggregator,) = (m.aggregator for m in members if m.name == name)
    raise aggregator_error(
        aggregator, name, number,
        f"it asks for {_in_words(now)}, but on zeros for {_in_words(then)}: the kind, number and "
        "sizes of collectives depend on parameters and on `variant` alone",
    )  # fmt: skip


def _in_words(asked: tuple[str, tuple[Any, ...]] | None) -> str:
    if asked is None:
        return "nothing"
    name, (verb, op, root, by, segments, codec, numel, dtype, lengths, stride, _) = asked
    of = op if verb != "broadcast" else f"from rank {root}"
    how = {"through": codec, "by": by, "segments": segments, "lengths": lengths, "stride": stride}
    said = "".join(f", {name} {value}" for name, value in how.items() if value)
    return f"{verb}({of}) of {numel} x {dtype} of {name}{said}"


def items_of(
    one: Round, asking: Sequence[Asking], number: int, rank: int, world_size: int
) -> list[list[Item]]:
    """The memory of a round's collectives; coroutines note the results to come.

    Raises:
        ConfigError: a request's memory does not suit it.
    """
    items: list[list[Item]] = [[] for _ in one.parts]
    round_bits = number << 48  # each round draws different random numbers
    for (coroutine, c, request), (part, spec, keys) in zip(asking, one.asked, strict=True):
        try:
            item = request.item(spec, keys, c.step | round_bits, rank, world_size)
        except ConfigError as error:
            raise aggregator_error(coroutine.aggregator, c.name, number, str(error)) from None
        coroutine.results.append(request.result(spec, item, rank, world_size))
        items[part].append(item)
    return items
