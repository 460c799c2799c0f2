"""Payloads whose length depends on data travel at that length: over algorithm x codec x world size.

The hub shows every message on its way. `account` reads them as docs/internals/wire-format.md says,
with no help from the code that made them.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch

from fifo import FifoHub
from golden.runs import WAYS
from gradwire import Codec, Options, algorithms, codecs
from gradwire.collectives import prepare
from gradwire.engine import HEADER_BYTES, Communicator
from gradwire.lang import encode, layout
from gradwire.partition import Spec, partition
from gradwire.transport import Hub
from laws.travelling import Machine
from products import exhaustive, one_in
from ranks import WORLD_SIZES, as_threads
from rooms.collectives import job, packing, placement, prepared
from transport.shm_ends import ends
from typed_values import items_of

SIZES = [1, 17, 0, 129, 1000, 20_000, 5, 1025]
CODECS: dict[str, Codec] = {
    "dgc": codecs.get("dgc", density=0.02),
    "graddrop": codecs.get("graddrop", density=0.02, values="fp32"),
    "hardthreshold": codecs.get("hardthreshold", threshold=2.0, density=0.1),
    "all of it": codecs.get("hardthreshold", threshold=1e-30, density=1.0),
    "adacomp": codecs.get("adacomp", block=64),
    "threelc": codecs.get("threelc", sparsity=1.75),
    "mstopk": codecs.get("mstopk", density=0.05),
}
DATA = ("zeros", "one value", "gaussian", "heavy")


def values(data: str, numel: int, seed: int) -> torch.Tensor:
    """Values of which a threshold selects none, almost none, some, or a few of different sizes."""
    made = torch.Generator().manual_seed(seed)
    drawn = torch.randn(numel, generator=made)
    if data == "zeros":
        return torch.zeros(numel)
    if data == "one value":
        return torch.where(torch.arange(numel) == numel // 2, 100.0, 0.0)
    return drawn**5 if data == "heavy" else drawn


class Spy:
    """Records all messages: per link and tag, in order."""

    def __init__(self) -> None:
        self.seen: defaultdict[tuple[int, int, int], list[torch.Tensor]] = defaultdict(list)
        self.lock = threading.Lock()

    def __call__(self, source: int, peer: int, tag: int, message: torch.Tensor) -> None:
        with self.lock:
            self.seen[source, peer, tag].append(message.clone())

    def sent(self, rank: int) -> int:
        """Bytes of all messages that a rank has sent."""
        return sum(m.numel() for key, all_of in self.seen.items() for m in all_of if key[0] == rank)


@dataclass
class Found:
    """One rank's results and residuals, and the bytes of each step."""

    tensors: list[torch.Tensor]
    counted: list[int]
    formula: int
    capacity: int
    left: int  # bytes of pools that were not given back


def reduce_all(
    comm: Communicator, codec: Codec | Sequence[Codec], options: Options, data: str, steps: int = 2
) -> Found:
    """Fused all-reduces of all tensors, with residuals; of one codec, or one per tensor."""
    used = [codec] * len(SIZES) if isinstance(codec, Codec) else codec
    pairs = enumerate(zip(SIZES, used, strict=True))
    specs = [Spec(f"p{i}", n, torch.float32, c, True, i) for i, (n, c) in pairs]
    tensors: list[torch.Tensor] = []
    counted = []
    collective = prepare(comm.calls, specs, options)
    for step in range(steps):
        given = [values(data, n, 100 * comm.rank + 10 * step + i) for i, n in enumerate(SIZES)]
        residuals = [torch.zeros(n) for n in SIZES]
        items = items_of(comm, specs, given, residuals, step)
        counted.append(collective.start(items).result().wire_bytes)
        tensors += given + residuals
    prepared, pool = collective.prepared[0][0], comm.pools.of(torch.device("cpu"), staging=True)
    capacity = sum(prepared.program.nbytes[b] for b in prepared.program.graph.sent())
    left = pool.owned - sum(arena.numel() for arena in pool._free)
    return Found(tensors, counted, prepared.wire_bytes, capacity, left)


def account(messages: list[torch.Tensor]) -> int:
    """Bytes in use of the messages of one link and tag: tables and bodies."""
    total = 0
    for message in messages:
        assert message.numel() % 16 == 0
        for each in message.numpy().tobytes().split(b"GWIR")[1:]:  # one for each chunk
            (length,) = struct.unpack_from("<Q", each, 20)
            used = np.frombuffer(each[44 : len(each) - length], "<u4")
            assert length == sum(-(-int(n) // 16) * 16 for n in used)
            total += int(used.sum())
    return total


EXACTLY = [
    ("sra", "dgc", 3, "gaussian"),
    ("ring", "graddrop", 5, "heavy"),
    ("tree", "hardthreshold", 5, "one value"),
    ("parameter_server", "all of it", 2, "zeros"),
    ("three_servers", "adacomp", 5, "gaussian"),
    ("coordinated", "threelc", 3, "zeros"),
    ("all_gather", "mstopk", 3, "heavy"),
    ("hierarchical_full", "dgc", 5, "one value"),
    ("hierarchical_codec", "threelc", 4, "gaussian"),
    ("sra", "hardthreshold", 1, "gaussian"),
]
OFTEN = EXACTLY[:7]
EVERY = product(WAYS, CODECS, WORLD_SIZES, DATA)


@pytest.mark.parametrize(
    ("way", "name", "n", "data"),
    [*OFTEN, *exhaustive(*(case for case in [*EXACTLY, *EVERY] if case not in OFTEN))],
    ids=str,
)
def test_law_5_what_is_in_use_is_sent_and_no_bit_changes(
    way: str, name: str, n: int, data: str
) -> None:
    """Every rank has the same results; laws/test_collective_laws.py, and the test of borrowed
    messages, compare them with those of messages of the greatest size."""
    codec, options = CODECS[name], WAYS[way](n)
    spy = Spy()
    hub = Hub(n, corrupt=spy)
    packed = as_threads(n, lambda comm: reduce_all(comm, codec, options, data), hub)
    for rank, found in enumerate(packed):
        assert all(map(torch.equal, found.tensors[: len(SIZES)], packed[0].tensors))
        assert sum(found.counted) == spy.sent(rank)
        assert found.left == 0
    if "full" not in way:  # "full" also sends uncompressed messages, which are not packed
        assert all(account(messages) for messages in spy.seen.values())
    assert n == 1 or spy.seen


@pytest.mark.parametrize("way", ["hierarchical_codec", "hierarchical_full"])
def test_buffers_of_fixed_length_travel_beside_packed_ones(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few chunks have rows whose length depends on data; messages of several chunks have both."""
    used = [CODECS["hardthreshold"] if n < 10 else codecs.get("qsgd") for n in SIZES]
    options = Options(**{**vars(WAYS[way](5)), "checksum": True, "segments": 2})

    def body(comm: Communicator) -> Found:
        return reduce_all(comm, used, options, "gaussian")

    spy = Spy()
    found = as_threads(5, body, Hub(5, corrupt=spy))
    monkeypatch.setattr(placement, "BORROWED_BYTES", 0)
    in_memory = as_threads(5, body, Hub(5, lends=True))
    for rank, (one, other) in enumerate(zip(found, in_memory, strict=True)):
        assert all(map(torch.equal, one.tensors, other.tensors))
        assert sum(one.counted) == spy.sent(rank)
        assert one.left == 0
    assert sum(sum(one.counted) for one in in_memory) < sum(sum(one.counted) for one in found)


def test_law_5_the_formula_counts_what_is_expected() -> None:
    """In each row, the selection has its expected size: so the formula is exact."""
    codec = codecs.get("dgc", density=0.05)
    ways = [way for way in WAYS if "hierarchical" not in way]

    def body(comm: Communicator) -> list[Found]:
        return [reduce_all(comm, codec, WAYS[way](3), "gaussian", steps=1) for way in ways]

    for rank in as_threads(3, body):
        for way, found in zip(ways, rank, strict=True):
            assert found.counted == [found.formula], way


@pytest.mark.parametrize("name", one_in(2, CODECS))
def test_staged_and_borrowed_messages_change_no_bit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With separate memory for the kernels, as on a GPU, the host's copies are packed. Borrowed
    messages stay where they are: over a hub that overwrites what is given back, and in shared
    memory, with checksums."""
    at = [*CODECS].index(name)
    data, way = DATA[at % len(DATA)], ("ring", "sra", "tree")[at % 3]
    options = Options(**{**vars(WAYS[way](3)), "checksum": True})

    def body(comm: Communicator) -> Found:
        return reduce_all(comm, CODECS[name], options, data)

    plain = as_threads(3, body)
    with monkeypatch.context() as changed:
        changed.setattr(job, "is_staged", lambda device: True)
        for staged, expected in zip(as_threads(3, body), plain, strict=True):
            assert all(map(torch.equal, staged.tensors, expected.tensors))
            assert staged.counted == expected.counted
            assert staged.left == 0
    monkeypatch.setattr(placement, "BORROWED_BYTES", 0)
    hub = Hub(3, lends=True)
    spy = hub.corrupt = Spy()
    over_hub = as_threads(3, body, hub)
    with ends(3) as machine:
        in_memory = as_threads(3, body, Machine(machine))  # type: ignore[arg-type]
        lent = [end.lent_bytes for end in machine]
    # Forwarded messages are not borrowed; the others count their bytes in use.
    sent = [sum(found.counted) for found in in_memory]
    assert lent == sent if way == "sra" else all(map(int.__le__, lent, sent))
    for one, other, expected in zip(over_hub, in_memory, plain, strict=True):
        assert all(map(torch.equal, one.tensors, expected.tensors))
        assert all(map(torch.equal, other.tensors, expected.tensors))
        assert one.counted == other.counted  # the same bytes in use, without the tables
        assert all(a <= b for a, b in zip(one.counted, expected.counted, strict=True))
    # One message each, and its header says how much of it counts.
    lengths = [
        HEADER_BYTES + struct.unpack_from("<Q", message.numpy(), 24)[0]
        for messages in spy.seen.values()
        for message in messages
    ]
    assert sum(lengths) == sum(sum(found.counted) for found in over_hub)


# ---- expected sizes, and the warning


@pytest.mark.parametrize("name", [n for n in CODECS if n != "mstopk"] + exhaustive("mstopk"))
def test_counts_say_how_much_is_in_use(name: str) -> None:
    """Zeros follow the bytes in use; the last byte in use belongs to a field of the payload."""
    codec = CODECS[name]
    lay = layout(codec)
    for numel, data in product((1, 79, 1000, 30_011), DATA):
        spec = Spec("p", numel, torch.float32, codec)
        payload, found = in_use(spec, values(data, numel, 5))
        assert lay.offsets(numel)[-1] <= found <= lay.nbytes(numel) == len(payload)
        assert not payload[found:].any()
        if data == "gaussian" and name == "all of it":
            assert found == lay.nbytes(numel)
        if data == "zeros" and name in ("hardthreshold", "all of it", "adacomp", "threelc"):
            assert found == lay.offsets(numel)[-1]


def in_use(spec: Spec, given: torch.Tensor) -> tuple[np.ndarray, int]:
    """The payload of a collective's only message, and how much of it is in use."""
    payload = encode(spec.codec, given, key=3).numpy()
    parts = partition([spec], chunks=1, segments=1)
    graph = algorithms.get("all_gather").build(0, 2, parts.sizes)
    message = np.concatenate([np.zeros(HEADER_BYTES, dtype="u1"), payload])
    return payload, int(packing.packings(graph, parts)[0].used(message)[0])


def test_codecs_expect_about_what_gaussian_values_give() -> None:
    for name, options, numel, within in (
        ("graddrop", {}, 300_000, 0.15),
        ("graddrop", {"density": 0.001}, 100_000, 0.3),
        ("threelc", {}, 300_000, 0.15),
        ("dgc", {"density": 0.01}, 100_000, 0.001),
        ("mstopk", {}, 100_000, 0.02),
    ):
        codec = codecs.get(name, **options)
        spec = Spec("p", numel, torch.float32, codec)
        sizes = [in_use(spec, values("gaussian", numel, seed))[1] for seed in range(4)]
        mean = pytest.approx(np.mean(sizes), rel=within)
        assert layout(codec).expected_nbytes(numel) == mean, codec


def test_what_always_has_one_length_travels_in_one() -> None:
    for name in ("topk", "qsgd", "randomk", "lowrank"):
        lay = layout(codecs.get(name))
        assert not lay.data_dependent
        assert lay.expected_nbytes(1000) == lay.nbytes(1000)
    assert layout(codecs.get("topk")).variable


def test_in_stream_order_the_greatest_size_is_announced_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    codec = codecs.get("graddrop", density=0.03)  # not used by another test
    prepared._announced.discard(codec)

    def body(comm: Communicator) -> list[Found]:
        return [reduce_all(comm, codec, Options(segments=s), "gaussian") for s in (1, 2)]

    caplog.set_level(logging.WARNING, "gradwire")
    found = as_threads(2, body, fifo=FifoHub(2))
    (said,) = [text for r in caplog.records if "compiling" not in (text := r.getMessage())]
    sizes = layout(codec).nbytes(10**6), layout(codec).expected_nbytes(10**6)
    assert said.startswith(str(codec))
    assert all(str(size) in said for size in sizes)
    for rank in found:
        for ways in rank:
            assert ways.counted == [ways.capacity] * 2 == [ways.formula] * 2
