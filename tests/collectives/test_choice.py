"""The choice of an algorithm: its options, the machines, and codecs that it excludes."""

from __future__ import annotations

import pytest
import torch

import gradwire
from gradwire import ConfigError, Options, all_reduce
from gradwire.algorithms import REGISTRY
from gradwire.codecs import REGISTRY as CODECS
from gradwire.codecs import TBQ, Codec, RandomK
from gradwire.codecs import get as get_codec
from gradwire.collectives import check_defined, check_feedback
from gradwire.engine import Communicator
from gradwire.engine.topology import numbered
from ranks import as_processes, as_threads, caught

A, B, C = b"a", b"b", b"c"


def test_machines_are_host_names() -> None:
    assert numbered([(A, 0), (B, 0), (A, 0), (C, 0)]) == (0, 1, 0, 2)
    assert numbered([(B, 2), (B, 2), (A, 4), (A, 4), (A, 4), (A, 4)]) == (0, 0, 1, 1, 1, 1)
    # a process group of some of a machine's ranks
    assert numbered([(A, 8), (A, 8), (B, 8)]) == (0, 0, 1)


def test_machines_of_one_name_are_told_apart_by_their_size() -> None:
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
        return int(collective.prepared.wire_bytes)  # type: ignore[attr-defined]

    part = 1024 // 128 * 68 + 48
    given = 2 * part if inside == "codec" else 2 * (1024 * 4 + 48)
    assert as_threads(4, body) == [given + 2 * part + 2 * part] * 4


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"algorithm": "rings"}, "unknown algorithm 'rings'; known: all_gather, hierarchical"),
        ({"partitions": 2}, "an option of the algorithm parameter_server, not of sra"),
        ({"algorithm": "parameter_server", "partitions": 0}, "partitions=0"),
        ({"algorithm": "ring", "nodes": (0, 0)}, "an option of the algorithm hierarchical"),
        (
            {"algorithm": "hierarchical", "nodes": [0, 0]},
            "give a tuple of the machine of each rank",
        ),
        ({"algorithm": "hierarchical", "between": "ring"}, "between='ring': use one of auto, sra"),
        ({"algorithm": "hierarchical", "inside": "half"}, "use one of codec, full"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=r".*") as caught_error:
        Options(**options)  # type: ignore[arg-type]
    assert says in str(caught_error.value)


@pytest.mark.parametrize("options", ["ring", {"algorithm": "ring"}], ids=["str", "dict"])
def test_options_of_another_type_are_refused(options: object) -> None:
    def body(comm: Communicator) -> BaseException | None:
        return caught(lambda: all_reduce(torch.ones(9), group=comm, options=options))  # type: ignore[arg-type]

    for error in as_threads(2, body):
        assert isinstance(error, ConfigError)
        assert f"options={options!r}: give a gradwire.Options" in str(error)


def test_a_machine_is_given_for_each_rank() -> None:
    def body(comm: Communicator) -> BaseException | None:
        options = Options(algorithm="hierarchical", nodes=(0, 0))
        return caught(lambda: all_reduce(torch.ones(9), group=comm, options=options))

    for error in as_threads(3, body):
        assert isinstance(error, ConfigError)
        assert "a machine for each of the 3 ranks" in str(error)


def test_ranks_must_choose_alike() -> None:
    def body(comm: Communicator) -> BaseException | None:
        name = "ring" if comm.rank else "hierarchical"
        options = Options(algorithm=name)
        return caught(lambda: all_reduce(torch.ones(9), group=comm, options=options))

    for error in as_threads(2, body):
        assert isinstance(error, ConfigError)
        assert "algorithm ring" in str(error)
        assert "algorithm hierarchical" in str(error)


RESTRICTIONS: dict[str, tuple[Codec, set[str]]] = {
    "randomk, unbiased": (RandomK(density=0.1, unbiased=True), {"all_gather"}),
    "tbq": (TBQ(), {"sra", "parameter_server", "all_gather"}),
}


@pytest.mark.parametrize(("codec", "allowed"), RESTRICTIONS.values(), ids=RESTRICTIONS)
def test_what_is_not_defined_says_what_to_use(codec: Codec, allowed: set[str]) -> None:
    for name in REGISTRY:
        if name in allowed:
            check_defined(name, codec)
            continue
        with pytest.raises(ConfigError) as error:
            check_defined(name, codec)
        assert str(codec) in str(error.value)
        assert all(repr(other) in str(error.value) for other in allowed)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("algorithm", REGISTRY)
def test_every_other_codec_runs_in_every_algorithm(algorithm: str, name: str) -> None:
    codec = get_codec(name)
    try:
        check_defined(algorithm, codec)
    except ConfigError:
        assert name == "tbq"
        return
    made = torch.Generator().manual_seed(0)
    data = [torch.randn(3000, generator=made) for _ in range(3)]

    def body(comm: Communicator) -> torch.Tensor:
        x, residual = data[comm.rank].clone(), torch.zeros(3000)
        options = Options(algorithm=algorithm, target="eager")
        all_reduce(x, codec, op="avg", group=comm, residual=residual, options=options)
        return x

    found = as_threads(3, body)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert torch.isfinite(found[0]).all()
    assert float(found[0].abs().sum()) > 0


def test_unbiased_randomk_is_unbiased_in_all_gather_and_refused_in_sra() -> None:
    codec = RandomK(density=0.25, values="fp32", unbiased=True)

    def body(comm: Communicator) -> float:
        error = caught(lambda: all_reduce(torch.ones(8), codec, group=comm))
        assert isinstance(error, ConfigError)
        mean = 0.0
        for step in range(20):
            x = torch.ones(4000)
            options = Options(algorithm="all_gather")
            all_reduce(x, codec, op="avg", group=comm, step=step, options=options)
            mean += float(x.mean()) / 20
        return mean

    # every block of four holds one 4, wherever it is
    assert as_threads(2, body) == [pytest.approx(1.0)] * 2


def test_error_feedback_wants_the_biased_randomk() -> None:
    check_feedback(RandomK(density=0.1))
    check_feedback(RandomK(density=1.0, unbiased=True))  # it scales by 1
    with pytest.raises(ConfigError, match=r"sends 10 times .* Use unbiased=False with error feed"):
        check_feedback(RandomK(density=0.1, unbiased=True))
    for name in CODECS:
        check_feedback(get_codec(name))


def train(rank: int, algorithm: str, **options: object) -> list[float]:
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(64, 32))
    handle = gradwire.attach(model, bits=8, algorithm=algorithm, **options)
    model(torch.full((4, 64), float(rank + 1))).square().mean().backward()
    assert handle.stats()["wire_bytes"] > 0
    return [float(p.grad.double().sum()) for p in model.parameters() if p.grad is not None]


def train_with_all(rank: int) -> dict[str, list[float]]:
    wrong = caught(lambda: train(rank, "rings"))
    assert isinstance(wrong, ConfigError)
    refused = caught(lambda: gradwire.attach(_ddp(), "tbq", algorithm="ring", error_feedback=True))
    assert isinstance(refused, ConfigError)
    assert "not defined in the algorithm 'ring'" in str(refused)
    scaled = RandomK(density=0.1, unbiased=True)
    for options in ({"codec": scaled}, {"codec": None, "codecs": {"weight": scaled}}):
        grows = caught(
            lambda options=options: gradwire.attach(
                _ddp(), algorithm="all_gather", error_feedback=True, **options
            )
        )
        assert isinstance(grows, ConfigError)
        assert "unbiased=True without" in str(grows)
    gradwire.attach(_ddp(), scaled, algorithm="all_gather")
    return {name: train(rank, name) for name in REGISTRY}


def _ddp() -> torch.nn.parallel.DistributedDataParallel:
    return torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))


def test_attach_takes_every_algorithm() -> None:
    first, second = as_processes(2, train_with_all)
    assert first == second
    for sums in first.values():
        assert sums == pytest.approx(first["all_gather"], rel=0.02)


@pytest.mark.parametrize(
    ("algorithm", "average"),
    [("sra", 40000.0), ("parameter_server", 40000.0), ("all_gather", 40000.0), ("ring", 26368.0)],
)
def test_where_partial_sums_of_fp16_saturate(algorithm: str, average: float) -> None:
    """docs/algorithms.md: finite everywhere, and exact where no partial sum travels in fp16."""

    def body(comm: Communicator) -> tuple[float, float]:
        x, residual = torch.full((9,), 40000.0).half(), torch.zeros(9)
        options = Options(algorithm=algorithm)
        all_reduce(x, "identity", op="avg", group=comm, residual=residual, options=options)
        return float(x[0]), float(residual[0])

    results = as_threads(4, body)
    assert all(found == average for found, _ in results)
    assert average + sum(residual for _, residual in results) / 4 == 40000.0
