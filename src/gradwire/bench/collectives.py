"""`gradwire bench collectives`: what one all-reduce costs on an emulated network, method by method.

Each method works as users meet it, as a communication hook of a DDP module, here with a single
matrix whose gradient is given. The ranks meet at a barrier inside the hook; the time runs from
there until the average is in place. Methods take turns (A B A B), so that a noisy machine is
unfair to all alike. A turn begins with an average that is not timed: TCP's connections start slowly
after the pause that the others' turns are, and training makes no such pauses.

A row: method, algorithm, transport, ranks, net, numel, seconds (median over rounds of the
slowest rank), wire_bytes (a rank sends), limit_seconds (wire_bytes / rate + rounds * latency;
None without an emulated network), of_limit (limit_seconds / seconds), nmse (against the average
in float64).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradwire.bench import methods as method_table
from gradwire.errors import ConfigError
from gradwire.lab import Network, available, launch

DEFAULT_METHODS = (
    "torch-fp32",
    "torch-fp16-hook",
    "torch-bf16-hook",
    "torch-powersgd",
    "gradwire-qsgd4",
)
_TIMEOUT_S = 1200.0


@dataclass(frozen=True)
class Config:
    """What every rank's worker is told."""

    methods: tuple[str, ...]
    numel: int
    rounds: int
    output: str


def run(
    ranks: int = 4,
    net: str = "1gbit,1ms",
    methods: Sequence[str] | None = None,
    codecs: Sequence[str] | None = None,
    numel: int | None = None,
    quick: bool = False,
) -> Iterator[dict[str, Any]]:
    """Yield the rows.

    Args:
        ranks: emulated machines, one rank each.
        net: RATE,LATENCY or none.
        methods: names as in `bench train`; by default torch's four and gradwire's 4 bits.
        codecs: instead of methods, these codecs of gradwire at their defaults.
        numel: values of the gradient; 25 million, or 2.5 million if `quick`.
        quick: end within 45 seconds on two cores.

    Raises:
        ConfigError: unknown method, codec or option, no values, an impossible network, or no lab on
            this machine.
    """
    network = Network.parse(net)
    names = list(methods or [])
    names += [f"gradwire:{codec}" for codec in codecs or []]
    for name in names:
        method_table.parse(name).check()
    if numel is not None and numel < 1:
        raise ConfigError(f"--numel {numel}: a gradient has 1 value or more")
    if ranks < 1:
        raise ConfigError(f"--ranks {ranks}: at least one rank is needed")
    if network.shaped and (reason := available()) is not None:
        raise ConfigError(f"no emulated network here ({reason}); use --net none")
    with tempfile.TemporaryDirectory(prefix="gradwire-") as folder:
        config = Config(
            methods=tuple(names) or DEFAULT_METHODS,
            numel=numel or (2_500_000 if quick else 25_000_000),
            rounds=5 if quick else 9,
            output=str(Path(folder) / "rows.json"),
        )
        command = [sys.executable, "-m", "gradwire.bench.collectives_worker"]
        command.append(json.dumps(asdict(config)))
        # The workers' remarks are for people, so they go where remarks go.
        codes = launch(command, ranks, network, timeout=_TIMEOUT_S, stdout=sys.stderr)
        if any(codes):
            raise ConfigError(f"workers ended with exit codes {codes}; their output is above")
        measured = json.loads(Path(config.output).read_text())
    for row in measured:
        rounds = row.pop("rounds")
        limit = None
        if network.shaped:
            seconds_of_bytes = row["wire_bytes"] * 8 / network.rate_bits_per_s
            limit = seconds_of_bytes + rounds * network.latency_s
        yield {
            **row,
            "ranks": ranks,
            "net": str(network),
            "limit_seconds": limit,
            "of_limit": None if limit is None else limit / row["seconds"],
        }
