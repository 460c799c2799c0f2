"""`gradwire plan --model --net`: which gradients are worth compressing, and the fastest setting.

Rows, with the costs of this machine's kernels (or of a file of curves):

    part "layer"    numel, count, compress, partitions, seconds, uncompressed_seconds (bf16),
                    compressed_seconds: of each size of matrices, by itself (HIPRESS Eqs. 1 and 2),
                    in the algorithm of the best setting of the first codec
    part "setting"  method, algorithm, segments, coalesce_bytes, least, seconds, wire_bytes,
                    of_limit, saves (of the time of the best without a codec): the best setting of
                    each codec, simulated (gradwire_tools.sim.choice), the fastest first
    part "verdict"  compress, method, detail: what to use, in a sentence
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradwire import codecs as codec_table
from gradwire_tools.bench import workers
from gradwire_tools.bench.provenance import stamped
from gradwire_tools.lab import Network
from gradwire_tools.predict import simulate
from gradwire_tools.sim import Net, models
from gradwire_tools.sim.choice import FULL, HALF, Situation, choose, name
from gradwire_tools.sim.selective import decisions


@stamped
def run(
    model: str,
    net: str,
    codecs: Sequence[str] = ("qsgd:bits=4",),
    ranks: int = 4,
    per_node: int = 1,
    cores: float | None = None,
    backward: float = 0.0,
    threads: int = 1,
    file: Path | None = None,
    fresh: bool = False,
    shapes: models.Shapes | None = None,
    advance: workers.Advance | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the rows.

    Args:
        model, ranks, net, per_node, cores, backward: see gradwire_tools.sim.Scenario.
        codecs: NAME or NAME:OPTION=VALUE:..., from the most exact to the least.
        threads, file, fresh: as of gradwire_tools.predict.simulate.WantedCollectives.
        shapes: of the parameters, if `model` is only a name for them.
        advance: called before every codec whose kernels are measured.

    Raises:
        ConfigError: an unknown name or a number out of range; it is raised before anything is
            measured.
    """
    chosen = [codec_table.get(text) for text in codecs]
    network = Network.parse(net, emulated=False)
    where = Situation(
        models.shapes(model) if shapes is None else shapes, ranks,
        Net(net, network.rate_bits_per_s, network.latency_s), simulate.NO_CURVES, per_node,
        math.inf if cores is None else cores, backward,
    )  # fmt: skip
    needed = [FULL, HALF, *chosen]
    known = simulate.known_curves(needed, threads, file, fresh, advance)
    where = replace(where, curves=known)
    choice = choose(where, chosen)
    context = {"model": model, "ranks": ranks, "net": net}
    if chosen:
        best = choice.of(chosen[0]).setting
        for one in decisions(where, best.codec, best.options.algorithm):
            yield {
                "part": "layer", **context, "method": name(best.codec),
                "algorithm": best.options.algorithm, "numel": one.numel, "count": one.count,
                "compress": one.decision.compress, "partitions": one.decision.partitions,
                "seconds": one.decision.seconds,
                "uncompressed_seconds": one.decision.uncompressed_seconds,
                "compressed_seconds": one.decision.compressed_seconds,
            }  # fmt: skip
    for ranked in choice.of_codec:
        setting, limit = ranked.setting, ranked.limit_seconds
        yield {
            "part": "setting", **context,
            "method": name(setting.codec),
            "algorithm": setting.options.algorithm,
            "coordinated": setting.options.coordinated,
            "segments": setting.options.segments,
            "coalesce_bytes": setting.coalesce_bytes,
            "least": setting.least,
            "seconds": ranked.seconds,
            "wire_bytes": ranked.wire_bytes,
            "of_limit": None if limit is None else limit / ranked.seconds,
            "saves": 1 - ranked.seconds / choice.uncompressed.seconds,
        }  # fmt: skip
    yield {
        "part": "verdict", **context, "compress": choice.compresses,
        "method": name(choice.best.setting.codec), "detail": choice.verdict,
    }  # fmt: skip
