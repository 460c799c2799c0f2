"""`gradwire bench planner`: the planner's choice against measured settings, by size and network.

For a gradient of one matrix, `gradwire plan` ranks settings by the simulator. Measured by `bench
collectives` are its choice, and those that it expects to be at most `HOPELESS` times as slow: of
each codec and algorithm the one with the best segments and the one with the default, and the
choice with all other segments. The fastest of a single round of all would owe much to chance: so
the choice and the `FINALISTS` fastest of each kind are measured again, together, `TURNS` times
(once where they take long), and the medians of these count.

The lab's nodes and its switch share this machine's cores, which the simulation takes into account.
What messages and bytes cost there depends on the machine and its day: on each network it is fitted
first, to averages of 64 KB and 16 MB (of `sizes`, if these are smaller) by three algorithms,
uncompressed.

A row per size and network: ranks, net, nbytes (of fp32), method, algorithm, segments, coordinated
(the choice), expected_seconds, seconds (measured, as in bench collectives), best_method,
best_seconds (the fastest that was measured), ratio (seconds / best_seconds), compress (whether a
codec was chosen), best_compresses (whether the fastest has one), decline_ratio (the fastest without
a codec / the fastest), partition_ratio (the choice / the fastest with other segments; None if there
are none), error (expected / measured - 1), settings (number measured), message_seconds (of a core,
as fitted).
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial

from gradwire import codecs as codec_table
from gradwire.aggregators import registry
from gradwire.collectives import Options
from gradwire.errors import ConfigError
from gradwire.lang import Codec
from gradwire_tools.bench import memory
from gradwire_tools.bench.micro import curves as measuring
from gradwire_tools.bench.network import collectives
from gradwire_tools.bench.network.world import emulable, several
from gradwire_tools.bench.paper.validate import SWITCH_S
from gradwire_tools.bench.progress import cells, unwatched
from gradwire_tools.bench.provenance import stamped
from gradwire_tools.bench.rows import Row, row_kind
from gradwire_tools.lab import Network
from gradwire_tools.sim import Curves, Net
from gradwire_tools.sim.choice import FULL, HALF, Choice, Setting, Situation, choose, name, simulate
from gradwire_tools.sim.models import Shapes

KINDS = (
    row_kind(
        "bench planner",
        "partition_ratio decline_ratio",
        "ranks:positive net:text nbytes:positive method:text algorithm:text "
        "segments:count? expected_seconds:amount seconds:amount best_method:text "
        "best_seconds:amount ratio:amount compress:flag best_compresses:flag "
        "decline_ratio:amount partition_ratio:amount? error:number settings:count",
        "message_seconds:amount coordinated:flag",
    ),
)

NETS = ("100mbit,1ms", "1gbit,1ms", "10gbit,100us", "none")
SIZES = tuple(1 << n for n in range(14, 27, 2))  # bytes of fp32: 16 KB to 64 MB
HOPELESS = 1.8
FINALISTS, TURNS = 2, 3
_LONG_S = 0.25  # so long, what else the machine does matters little
_FITTED = ("tree", "all_gather", "sra")
_SMALL, _LARGE = 1 << 14, 1 << 22  # values, at most
_MESSAGE_S = [0.0] + [1e-5 * 1.2**n for n in range(30)]  # to 2 ms
_COPIES = 6  # of the gradient that a rank holds for each setting, at most
_TOGETHER_BYTES = 6 << 30  # of all settings: more are measured in several runs


@stamped
def run(
    ranks: int = 4,
    nets: Sequence[str] = NETS,
    sizes: Sequence[int] = SIZES,
    codecs: Sequence[str] = ("qsgd:bits=4",),
    fresh: bool = False,
) -> Iterator[Row]:
    """Yield a row for each network and size.

    Raises:
        ConfigError: no lab on this machine, or a number out of range.
        WorkerError: a rank failed.
    """
    networks = [Network.parse(net) for net in nets]
    emulable(*networks)
    several(ranks)
    for size in sizes:
        if size < 4 or size % 4:
            raise ConfigError(f"--bytes {size}: give bytes of fp32 values, 4 or more")
        memory.check(f"--bytes {size} on {ranks} ranks", 2 * _COPIES * size * ranks)
    chosen = [codec_table.get(text) for text in codecs]
    known = measuring.measured([FULL, HALF, *chosen], threads=1, fresh=fresh)

    @cache
    def fitted(network: Network) -> Curves:
        return fitted_to_lab(known, ranks, network, max(sizes) // 4)

    def rows(network: Network, size: int) -> Iterator[Row]:
        where = in_lab(fitted(network), ranks, network, ((1, size // 4),))
        yield _row(where, str(network), size, chosen)

    yield from cells("{1} bytes on {0}", rows, networks, sizes)


def in_lab(known: Curves, ranks: int, network: Network, shapes: Shapes) -> Situation:
    """On the lab's nodes, which share this machine's cores; without a network, on its memory."""
    if network.shaped:
        known = replace(known, link=replace(known.link, stack=known.link.stack + SWITCH_S))
    net = Net(str(network), network.rate_bits_per_s, network.latency_s)
    cores = float(len(os.sched_getaffinity(0)))
    per_node = 1 if network.shaped else ranks
    return Situation(shapes, ranks, net, known, per_node, cores)


def fitted_to_lab(known: Curves, ranks: int, network: Network, most: int) -> Curves:
    """The costs, those of messages and bytes as averages of few and of many values, `most` at most,
    have them."""
    known = _fit(known, "message", _MESSAGE_S, ranks, network, min(_SMALL, most), TURNS)
    of = "stack" if network.shaped else "memory"
    costs = [getattr(known.link, of) * 1.1**n for n in range(-30, 31)]
    return _fit(known, of, costs, ranks, network, min(_LARGE, most), 1)


def _fit(
    known: Curves, what: str, costs: Sequence[float], ranks: int, network: Network, values: int,
    turns: int,
) -> Curves:  # fmt: skip
    """The costs, with the one by which averages of so many values by the algorithms `_FITTED` take
    what they are measured to."""
    settings = [Setting(FULL, Options(algorithm=name)) for name in _FITTED]
    took = _measured(ranks, str(network), values, settings, turns)

    def at(cost: float) -> Curves:
        return replace(known, link=replace(known.link, **{what: cost}))

    def error(cost: float) -> float:
        where = in_lab(at(cost), ranks, network, ((1, values),))
        return sum(math.log(simulate(where, s).seconds / took[s]) ** 2 for s in settings)

    return at(min(costs, key=error))


def _row(where: Situation, net: str, nbytes: int, codecs: Sequence[Codec]) -> Row:
    choice = choose(where, codecs)
    best, turns = choice.best.setting, TURNS if choice.best.seconds < _LONG_S else 1
    seconds_of = partial(_measured, where.ranks, net, nbytes // 4)
    once = seconds_of(_wanted(choice))
    ranked = sorted(once, key=once.__getitem__)
    finalists = [best]
    for kind in ((FULL, HALF), tuple(codecs)):
        finalists += [one for one in ranked if one.codec in kind][:FINALISTS]
    finalists += [one for one in ranked if _same(one, best) and one != best][:1]
    final = seconds_of(list(dict.fromkeys(finalists)), turns)
    seconds, fastest = final[best], min(final, key=final.__getitem__)
    plain = min(took for one, took in final.items() if one.codec in (FULL, HALF))
    same = [took for one, took in final.items() if _same(one, best) and one != best]
    return {
        "ranks": where.ranks, "net": net, "nbytes": nbytes,
        "method": name(best.codec), "algorithm": best.options.algorithm,
        "segments": best.options.segments, "coordinated": best.options.coordinated,
        "expected_seconds": choice.best.seconds,
        "seconds": seconds, "best_method": method_of(fastest), "best_seconds": final[fastest],
        "ratio": seconds / final[fastest], "compress": choice.compresses,
        "best_compresses": fastest.codec not in (FULL, HALF),
        "decline_ratio": plain / final[fastest],
        "partition_ratio": seconds / min(same) if same else None,
        "error": choice.best.seconds / seconds - 1, "settings": len(once),
        "message_seconds": where.curves.link.message,
    }  # fmt: skip


def _same(a: Setting, b: Setting) -> bool:
    """Whether they differ in segments alone."""
    of = replace(a.options, segments=None), replace(b.options, segments=None)
    return a.codec == b.codec and of[0] == of[1]


def _wanted(choice: Choice) -> list[Setting]:
    """The settings to measure: the choice, and all that might be as fast."""
    best = choice.best
    hopeful = [one for one in choice.every if one.seconds <= HOPELESS * best.seconds]
    wanted = [best.setting, choice.uncompressed.setting]
    seen = set()
    for one in [*hopeful, *choice.of_codec]:
        setting = one.setting
        if setting.coalesce_bytes or setting.least:  # nothing to choose, of one matrix
            continue
        kind = setting.codec, replace(setting.options, segments=None)
        if kind not in seen or setting.options.segments is None or _same(setting, best.setting):
            wanted.append(setting)
        seen.add(kind)
    return list(dict.fromkeys(replace(s, coalesce_bytes=0, least=0) for s in wanted))


def method_of(setting: Setting) -> str:
    """As `bench collectives` names it."""
    options = setting.options
    codec = registry.text(registry.get(setting.codec))
    text = f"gradwire:{codec}:algorithm={options.algorithm}"
    if options.segments is not None:
        text += f":segments={options.segments}"
    return text + (":coordinated=true" if options.coordinated else "")


def _measured(
    ranks: int, net: str, numel: int, settings: Sequence[Setting], turns: int = 1
) -> dict[Setting, float]:
    """Seconds of each, medians over `turns`; the first is in every run."""
    others = max(2, _TOGETHER_BYTES // (4 * numel * ranks * _COPIES)) - 1
    first, *rest = settings
    runs = [[first, *rest[i : i + others]] for i in range(0, len(rest), others)] or [[first]]
    times: dict[Setting, list[float]] = {}
    for together in runs * turns:
        methods = [*map(method_of, together)]
        rows = unwatched(collectives.run(ranks, net, methods, numel=numel, quick=True))
        for setting, row in zip(together, rows, strict=True):
            times.setdefault(setting, []).append(float(row["seconds"]))
    return {setting: statistics.median(found) for setting, found in times.items()}
