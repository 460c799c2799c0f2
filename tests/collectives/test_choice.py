"""The choice of an algorithm: its options, the machines, and codecs that it excludes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradwire import ConfigError, Options, all_reduce
from gradwire.algorithms import REGISTRY
from gradwire.codecs import REGISTRY as CODECS
from gradwire.codecs import TBQ, Codec, RandomK
from gradwire.codecs import get as get_codec
from gradwire.collectives import check_defined, check_feedback
from gradwire.engine import Communicator
from ranks import as_threads, caught, raises
from rooms.engine import numbered

A, B, C = b"a", b"b", b"c"


def test_machines_are_host_names() -> None:
    assert numbered([(A, 0), (B, 0), (A, 0), (C, 0)]) == (0, 1, 0, 2)
    assert numbered([(B, 2), (B, 2), (A, 4), (A, 4), (A, 4), (A, 4)]) == (0, 0, 1, 1, 1, 1)
    # a process group of some of a machine's ranks
    assert numbered([(A, 8), (A, 8), (B, 8)]) == (0, 0, 1)
    # of one name they are told apart by their size
    assert numbered([(A, 2)] * 5) == (0, 0, 1, 1, 2)
    assert numbered([(A, 1)] * 3) == (0, 1, 2)


def test_machines_are_found_by_all_ranks_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert as_threads(5, lambda comm: comm.topology.machines) == [(0, 0, 1, 1, 2)] * 5
    for nothing in ("", "many"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", nothing)
        assert as_threads(3, lambda comm: comm.topology.machines) == [(0, 0, 0)] * 3


@pytest.mark.parametrize("inside", ["codec", "full"])
def test_hierarchical_finds_its_machines(inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines of two ranks: each rank sends half of its values to the other rank of its
    machine, and half of the remaining half, contribution and result, to the other machine."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def body(comm: Communicator) -> int:
        options = Options(algorithm="hierarchical", inside=inside)
        future = all_reduce(torch.randn(4096), group=comm, async_op=True, options=options)
        assert future is not None
        future.wait()
        (collective,) = comm.calls.kept.values()  # type: ignore[index]
        return int(collective.prepared[0][0].wire_bytes)  # type: ignore[attr-defined]

    part = 1024 // 128 * 68 + 48
    given = 2 * part if inside == "codec" else 2 * (1024 * 4 + 48)
    assert as_threads(4, body) == [given + 2 * part + 2 * part] * 4


RESTRICTIONS: dict[str, tuple[Codec, set[str]]] = {
    "randomk, unbiased": (RandomK(density=0.1, unbiased=True), {"all_gather"}),
    "tbq": (TBQ(), {"sra", "parameter_server", "all_gather"}),
}


def test_what_is_not_defined_says_what_to_use() -> None:
    for codec, allowed in RESTRICTIONS.values():
        for name in REGISTRY:
            error = caught(lambda name=name, codec=codec: check_defined(name, codec))
            if name in allowed:
                assert error is None
                continue
            assert isinstance(error, ConfigError)
            assert str(codec) in str(error)
            assert all(repr(other) in str(error) for other in allowed)


@pytest.mark.parametrize("algorithm", REGISTRY)
def test_every_other_codec_runs_in_every_algorithm(
    algorithm: str, pytestconfig: pytest.Config
) -> None:
    """With a residual, which keeps what is lost; law 1. `make test` has each codec in two."""
    made, turn = torch.Generator().manual_seed(0), [*REGISTRY].index(algorithm)
    data = [torch.randn(3000, generator=made) for _ in range(3)]
    allowed = [name for name in CODECS if name != "tbq" or algorithm in RESTRICTIONS["tbq"][1]]
    if not pytestconfig.getoption("exhaustive"):
        allowed = [name for name in allowed if ([*CODECS].index(name) - turn) % 3 == 0]

    def body(comm: Communicator) -> list[tuple[torch.Tensor, torch.Tensor]]:
        found = []
        for name in allowed:
            x, residual = data[comm.rank].clone(), torch.zeros(3000)
            how: dict[str, Any] = {"residual": residual, "algorithm": algorithm}
            all_reduce(x, get_codec(name), op="avg", group=comm, **how)
            found.append((x, residual))
        return found

    found, faults = as_threads(3, body), []
    for name, *ranks in zip(allowed, *found, strict=True):
        average, left = ranks[0][0], sum(residual.double() for _, residual in ranks)
        if not all(torch.equal(x, average) for x, _ in ranks):
            faults.append(f"{name}: replicas differ")
        off = (3 * average.double() + left - sum(x.double() for x in data)).abs().max()
        if not float(average.abs().sum()) > 0 or not off < 1e-4:
            faults.append(f"{name}: {off} is lost")
    assert not faults, faults


def test_error_feedback_wants_the_biased_randomk() -> None:
    check_feedback(RandomK(density=0.1))
    check_feedback(RandomK(density=1.0, unbiased=True))  # it scales by 1
    said = "sends 10 times", "Use unbiased=False with error feed"
    raises(ConfigError, lambda: check_feedback(RandomK(density=0.1, unbiased=True)), *said)
    for name in CODECS:
        check_feedback(get_codec(name))


def test_where_partial_sums_of_fp16_overflow_or_saturate() -> None:
    """docs/reference/algorithms.md: they overflow as torch's; with a residual they are finite
    everywhere, and exact where no partial sum travels in fp16."""
    ways = [
        ("sum", "sra", False, torch.inf),
        ("sum", "ring", False, torch.inf),
        ("avg", "sra", False, 40000.0),
        ("avg", "ring", False, torch.inf),
        ("avg", "sra", True, 40000.0),
        ("avg", "parameter_server", True, 40000.0),
        ("avg", "all_gather", True, 40000.0),
        ("avg", "ring", True, 26368.0),
    ]

    def body(comm: Communicator) -> list[tuple[float, float]]:
        found = []
        for op, algorithm, fed, _ in ways:
            x, residual = torch.full((9,), 40000.0).half(), torch.zeros(9)
            how: dict[str, Any] = {"residual": residual if fed else None, "algorithm": algorithm}
            all_reduce(x, "identity", op=op, group=comm, **how)
            found.append((float(x[0]), float(residual[0])))
        return found

    for way, *ranks in zip(ways, *as_threads(4, body), strict=True):
        _, _, fed, expected = way
        assert all(result == expected for result, _ in ranks), way
        assert not fed or expected + sum(left for _, left in ranks) / 4 == 40000.0, way
