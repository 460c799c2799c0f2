"""Golden runs: the exact results of collectives and training, and the bytes they send.

A line of runs.txt is a case: its name, a digest of each rank's results (one if all ranks have the
same), a digest of each rank's residuals if the codec has error feedback, and each rank's bytes on
the wire. They do not depend on the machine: values are made of integers and powers of two, and
codecs define every rounding. Nor do they depend on threads, executors or targets.

`python -m golden.runs` in tests/, or `pytest tests/golden/test_runs.py --update-golden`, rewrites
the file; do so only if results or bytes are meant to change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fifo import FifoHub
from gradwire import Codec, Options, codecs
from gradwire.collectives import Item, Operation, prepare
from gradwire.engine import Communicator
from gradwire.lang import rng
from gradwire.partition import Spec
from ranks import WORLD_SIZES, as_threads

FILE = Path(__file__).parent / "runs.txt"

# Options of an all-reduce of n ranks.
WAYS: dict[str, Callable[[int], Options]] = {
    "sra": lambda n: Options(),
    "coordinated": lambda n: Options(coordinated=True),
    "ring": lambda n: Options(algorithm="ring"),
    "tree": lambda n: Options(algorithm="tree"),
    "parameter_server": lambda n: Options(algorithm="parameter_server"),
    "three_servers": lambda n: Options(algorithm="parameter_server", partitions=3),
    "coordinated_servers": lambda n: Options(
        algorithm="parameter_server", partitions=3, coordinated=True
    ),
    "all_gather": lambda n: Options(algorithm="all_gather"),
    "hierarchical_full": lambda n: Options(
        algorithm="hierarchical", nodes=tuple(r % 2 for r in range(n)), inside="full"
    ),
    "hierarchical_codec": lambda n: Options(
        algorithm="hierarchical", nodes=tuple(2 * r // n for r in range(n)), inside="codec"
    ),
}
HALVES = ("reduce_scatter", "all_gather")

CODECS: dict[str, Codec] = {
    "qsgd": codecs.get("qsgd", rounding="stochastic"),
    "qsgd2": codecs.get("qsgd", bits=2, rounding="stochastic"),
    "dithered": codecs.get("qsgd", rounding="dithered"),
    "topk": codecs.get("topk", density=0.05),
    "terngrad": codecs.get("terngrad"),
    "onebit": codecs.get("onebit"),
    "identity": codecs.get("identity"),
    "fp16": codecs.get("fp16"),
    "rotated": codecs.get("rotated", rounding="stochastic"),
    "randomk": codecs.get("randomk", density=0.1, unbiased=False),
}
FEEDBACK = {"qsgd2", "dithered", "topk", "onebit", "randomk"}
SEGMENTS = (1, 3)

# Number of values per tensor of a case; for reduce-scatter and all-gather, per shard.
TENSORS = [
    (1, torch.float32),
    (17, torch.bfloat16),
    (0, torch.float32),
    (129, torch.float32),
    (1000, torch.bfloat16),
    (70_000, torch.float32),
    (1000, torch.float32),
]
SHARDS = [(min(numel, 9000), dtype) for numel, dtype in TENSORS]


@dataclass(frozen=True)
class Case:
    """One line: `way` is one of WAYS, or "half:" and one of HALVES."""

    way: str
    codec: str
    ranks: int
    segments: int

    @property
    def name(self) -> str:
        return f"{self.way} {self.codec} ranks={self.ranks} segments={self.segments}"


CASES = [
    Case(way, codec, ranks, segments)
    for way in (*WAYS, *(f"half:{half}" for half in HALVES))
    for codec in CODECS
    for ranks in WORLD_SIZES
    for segments in SEGMENTS
]


def sampled(cases: Sequence[Case]) -> list[Case]:
    """One case per way and number of ranks; codecs and segments alternate."""
    ways, names = list(dict.fromkeys(case.way for case in CASES)), list(CODECS)

    def chosen(case: Case) -> bool:
        way, ranks = ways.index(case.way), WORLD_SIZES.index(case.ranks)
        turn = len(WORLD_SIZES) * way + ranks + way // 5
        return (
            case.codec == names[turn % len(names)]
            and case.segments == SEGMENTS[turn // len(names) % 2]
        )

    return [case for case in cases if chosen(case)]


# ---- values, the same on every machine


def values(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Values over six orders of magnitude, with exact zeros, of integers and powers of two."""
    bits = mixed(np.arange(numel, dtype=np.uint64) + np.uint64(seed << 32))
    mantissa = (bits >> np.uint64(40)).astype(np.int64) - (1 << 23)  # 24 bits, signed
    exponent = (bits & np.uint64(0xFFFFF)).astype(np.int64) % 20
    kept = (bits >> np.uint64(20)) % np.uint64(16) != 0
    return torch.from_numpy(np.where(kept, np.ldexp(mantissa, -23 - exponent), 0)).to(dtype)


def mixed(bits: np.ndarray) -> np.ndarray:
    """splitmix64."""
    bits = (bits + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


# ---- one case


@dataclass(frozen=True)
class Found:
    """The outcome of a case on one rank: digests, and the bytes of each step."""

    results: str
    residuals: str | None
    wire_bytes: list[int]


def run(case: Case, comm: Communicator, **options: object) -> Found:
    """Two steps on one rank: an average, then a sum, with the residuals of the first step.

    `options`, which results must not depend on, override those of the case.
    """
    kind = case.way.removeprefix("half:") if case.way.startswith("half:") else "all_reduce"
    way = WAYS["sra" if kind != "all_reduce" else case.way](case.ranks)
    chosen = Options(**{**vars(way), "segments": case.segments, **options})
    tensors = TENSORS if kind == "all_reduce" else [(n * case.ranks, t) for n, t in SHARDS]
    feedback = case.codec in FEEDBACK and kind != "all_gather"
    specs = [
        Spec(f"p{i}", numel, dtype, CODECS[case.codec], feedback, rotation=i)
        for i, (numel, dtype) in enumerate(tensors)
    ]
    results: list[torch.Tensor] = []
    residuals: list[torch.Tensor] = []
    if feedback:
        residuals = [
            values(numel, torch.float32, 1000 + 50 * comm.rank + i) / 8
            for i, (numel, _) in enumerate(tensors)
        ]
    wire_bytes = []
    for step, average in enumerate((True, False)):
        given = [
            values(numel, dtype, 100 * comm.rank + 10 * step + i)
            for i, (numel, dtype) in enumerate(tensors)
        ]
        homes = None
        if kind == "reduce_scatter":
            homes = [g.view(case.ranks, -1)[comm.rank].clone() for g in given]
        wire_bytes.append(
            collective(comm, kind, specs, chosen, given, residuals, homes, step, average)
        )
        results += given if homes is None else homes
    return Found(digest(results), digest(residuals) if feedback else None, wire_bytes)


def collective(
    comm: Communicator,
    kind: str,
    specs: Sequence[Spec],
    options: Options,
    given: Sequence[torch.Tensor],
    residuals: Sequence[torch.Tensor],
    homes: Sequence[torch.Tensor] | None,
    step: int,
    average: bool,
) -> int:
    """Run one fused collective in place; returns the bytes that this rank sent.

    The only place where golden runs depend on how collectives are called.
    """
    items = [
        Item(
            tensor,
            rng.parameter_keys(7, spec.name, comm.rank),
            step,
            residuals[i] if residuals else None,
            homes[i] if homes else None,
        )
        for i, (spec, tensor) in enumerate(zip(specs, given, strict=True))
    ]
    op = "" if kind == "all_gather" else "avg" if average else "sum"
    prepared = prepare(comm.calls, specs, options, Operation(kind, op))
    return prepared.start(items).result().wire_bytes


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """8 bytes of blake2b over the tensors' bits, in hexadecimal."""
    state = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        bits = {4: torch.int32, 2: torch.int16}[tensor.itemsize]
        state.update(tensor.detach().contiguous().view(bits).numpy().tobytes())
    return state.hexdigest()


def line(name: str, ranks: Sequence[Found]) -> str:
    """The line of a case."""
    results = [rank.results for rank in ranks]
    if len(set(results)) == 1:
        results = results[:1]
    text = [name, "results=" + ",".join(results)]
    if ranks[0].residuals is not None:
        text.append("residuals=" + ",".join(str(rank.residuals) for rank in ranks))
    sent = ["+".join(map(str, rank.wire_bytes)) for rank in ranks]
    text.append("bytes=" + ",".join(sent[:1] if len(set(sent)) == 1 else sent))
    return " ".join(text)


def lines(cases: Sequence[Case], in_order: bool = False, **options: object) -> dict[str, str]:
    """Run cases of one number of ranks, as threads, on one communicator: name -> line.

    With `in_order`, messages have no tags, and collectives run in the order of their calls.
    """
    (ranks,) = {case.ranks for case in cases}
    texts: dict[str, str] = {}

    def body(comm: Communicator) -> list[Found]:
        found = []
        for case in cases:
            try:
                found.append(run(case, comm, **options))
            except Exception as error:
                raise RuntimeError(f"{case.name}, rank {comm.rank}: {error}") from error
        return found

    found = as_threads(ranks, body, timeout=280, fifo=FifoHub(ranks) if in_order else None)
    for case, *of_ranks in zip(cases, *found, strict=True):
        texts[case.name] = line(case.name, of_ranks)
    return texts


# ---- the file


def stored() -> dict[str, str]:
    """name -> line."""
    return dict(_named(FILE.read_text("utf-8").splitlines()))


def _named(texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    for text in texts:
        yield text.split(" results=")[0], text


def record() -> None:
    """Run everything and write the file."""
    from golden import training_runs

    found = training_runs.lines()
    for ranks in WORLD_SIZES:
        found |= lines([case for case in CASES if case.ranks == ranks])
        print(f"{ranks} ranks: done", flush=True)
    FILE.write_text("".join(f"{text}\n" for text in sorted(found.values())), "utf-8")


if __name__ == "__main__":
    record()
