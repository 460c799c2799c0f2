"""`gradwire bench collectives`: the cost of one all-reduce on an emulated network, per method.

Each method is a communication hook of a DDP module, as in training; the module is one matrix with a
given gradient. A barrier inside the hook starts the clock; it stops when the average is in place.
Methods are interleaved (A B A B), so that noise on the machine affects all of them equally. Each
turn begins with an untimed all-reduce: after a pause, TCP connections restart slowly, and training
has no such pauses.

A row: method, algorithm, transport, ranks, per_node, net, numel, seconds (of the slowest rank,
median over rounds), seconds_quartiles (over rounds), wire_bytes (sent by rank 0, including to ranks
of its own node), link_bytes (sent by all ranks of rank 0's node to other nodes; equal to wire_bytes
with one rank per node), limit_seconds (link_bytes / rate + rounds * latency; None without an
emulated network), of_limit (limit_seconds / seconds), nmse (against the average in float64). With
several ranks per node, link_bytes is the count of the node's network interface, which includes TCP
and Ethernet headers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire.bench import memory, workers
from gradwire.bench import methods as method_table
from gradwire.bench.provenance import stamped
from gradwire.errors import ConfigError
from gradwire.lab import Network, available

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
    """The arguments of every rank's worker."""

    methods: tuple[str, ...]
    numel: int
    rounds: int
    per_node: int


@stamped
def run(
    ranks: int = 4,
    net: str = "1gbit,1ms",
    methods: Sequence[str] | None = None,
    codecs: Sequence[str] | None = None,
    numel: int | None = None,
    quick: bool = False,
    per_node: int = 1,
    advance: workers.Advance | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the rows.

    Args:
        ranks: number of ranks.
        net: RATE,LATENCY or none.
        methods: names as in `bench train`; by default torch's four and gradwire's 4 bits.
        codecs: instead of methods, these codecs of gradwire at their defaults.
        numel: values of the gradient; 25 million, or 2.5 million if `quick`.
        quick: end within 45 seconds on two idle cores, unless the network is slow.
        per_node: ranks per node; they share its link and communicate through memory.
        advance: called with every turn.

    Raises:
        ConfigError: an unknown method, codec or option, a number out of range, an impossible
            network, or no lab on this machine.
        WorkerError: a rank failed.
    """
    network = Network.parse(net)
    names = list(methods or [])
    names += [f"gradwire:{codec}" for codec in codecs or []]
    for name in names:
        method_table.parse(name).check()
    if numel is not None and numel < 1:
        raise ConfigError(f"--numel {numel}: a gradient has 1 value or more")
    if ranks < 2:
        raise ConfigError(f"--ranks {ranks}: one rank sends nothing; use 2 ranks or more")
    if per_node < 1 or ranks % per_node:
        raise ConfigError(f"--per-node {per_node}: give a number that divides the {ranks} ranks")
    if network.shaped and ranks == per_node:
        raise ConfigError(
            f"--per-node {per_node}: all ranks share one machine, so nothing crosses --net {net}; "
            "use --net none, or more ranks"
        )
    if numel is not None:
        memory.check(f"--numel {numel} of {ranks} ranks", 4 * numel * ranks * 3)
    if network.shaped and (reason := available()) is not None:
        raise ConfigError(f"this machine cannot emulate a network ({reason}); use --net none")
    config = Config(
        methods=tuple(names) or DEFAULT_METHODS,
        numel=numel or (2_500_000 if quick else 25_000_000),
        rounds=5 if quick else 9,
        per_node=per_node,
    )
    worker = "gradwire.bench.collectives_worker"
    measured = workers.rows(
        worker, config, ranks // per_node, network, _TIMEOUT_S, advance, per_node
    )
    for row in measured:
        rounds = row.pop("rounds")
        limit = None
        if network.shaped:
            seconds_of_bytes = row["link_bytes"] * 8 / network.rate_bits_per_s
            limit = seconds_of_bytes + rounds * network.latency_s
        yield {
            **row,
            "ranks": ranks,
            "per_node": per_node,
            "net": str(network),
            "limit_seconds": limit,
            "of_limit": None if limit is None else limit / row["seconds"],
        }
