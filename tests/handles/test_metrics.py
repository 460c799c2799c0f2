"""`handle.metrics()`: its values against references, and that training does not change by it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from gradwire.aggregators import Aggregator, Context, Observation, Steps
from gradwire.collectives import AllReduce
from gradwire.errors import ConfigError
from gradwire.planner import Rules, make_plan
from products import EXHAUSTIVE
from ranks import as_processes
from rooms.handles import Metrics, Sampler
from rooms.state import Saved, members_of

pytestmark = pytest.mark.multiprocess


METHODS: list[dict[str, Any]] = [
    {"codec": "qsgd", "bits": 4, "error_feedback": True},
    {"codec": "qsgd", "bits": 4},
    {"codec": "topk", "density": 0.05, "error_feedback": True},
    {"codec": "powersgd", "rank": 2},
    {"codec": "artopk", "density": 0.05},
]
CASES = [(False, method) for method in METHODS] + [(True, method) for method in METHODS[:3]]
SAMPLED = {"nmse", "compression_gain", "residual_norm", "sampled_step"}
COUNTED = {"ratio", "bits_per_value", "exposed_seconds"}


def attached(sharded: bool = False, **arguments: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(40, 300), nn.ReLU(), nn.Linear(300, 50))
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    else:
        model = DDP(model, bucket_cap_mb=0.01)
    return model, gw.attach(model, **arguments)


def trains(model: nn.Module, steps: int, optimizer: Any = None) -> Any:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    draw = torch.Generator().manual_seed(5 + dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 40, generator=draw)).square().mean().backward()
        optimizer.step()
    return optimizer


def weights(rank: int, measured: bool, every: bool) -> list[list[bytes]]:
    """Of methods after some steps, with metrics in each or without."""
    found = []
    for sharded, method in CASES if every else CASES[::6]:
        model, handle = attached(sharded, **method)
        optimizer = None
        for _ in range(3):
            if measured:
                handle.metrics(layers=True, every=1)
            optimizer = trains(model, 1, optimizer)
        if measured:
            assert handle.metrics()["sampled_step"] >= 2
        found.append(
            [
                (p.to_local() if sharded else p).detach().numpy().tobytes()  # type: ignore[attr-defined]
                for p in model.parameters()
            ]
        )
        handle.detach()
    return found


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=EXHAUSTIVE)])
def test_training_is_bit_identical_with_metrics(every: bool) -> None:
    """In processes of their own: each handle of a process draws other numbers."""
    with_metrics, without = (
        as_processes(2, weights, measured, every) for measured in (True, False)
    )
    assert with_metrics == without


def test_values_are_those_of_a_reference(rank: int) -> None:
    """Of a sampled third pass."""
    for method in METHODS:
        model, handle = attached(**method)
        assert handle.metrics(every=1) == {}
        optimizer = trains(model, 2)
        seen: dict[str, Any] = {}

        def copied(o: Observation, seen: Any = seen) -> None:
            seen[o.name] = [t if t is None else t.double().view(-1) for t in (o.gradient, o.sent)]

        handle.observe(copied)
        before = handle.state_dict()["aggregators"]
        trains(model, 1, optimizer)
        found, layers = handle.metrics(), handle.metrics(layers=True)
        after, stats = handle.state_dict()["aggregators"], handle.stats()
        reference = {}
        for name, (gradient, sent) in seen.items():
            fed = gradient + before.get(name, {}).get("residual", torch.zeros(1)).double()
            left = after.get(name, {}).get("residual", torch.zeros(1)).double()
            terms = [fed, left] if sent is None else [fed, left, sent, fed - sent]
            reference[name] = [float(t.square().sum()) for t in terms]
        assert found.keys() == SAMPLED | COUNTED
        assert all(isinstance(value, (int, float)) for value in found.values())
        assert found["sampled_step"] == stats["steps"] == 3
        assert found["ratio"] == pytest.approx(stats["ratio"])
        assert found["bits_per_value"] == pytest.approx(32 / stats["ratio"])
        assert 0 < found["exposed_seconds"] * 3 == pytest.approx(stats["exposed_seconds"])
        names = [name for name in reference if name.endswith("weight")]  # biases: uncompressed
        rows = [reference[name] for name in names]
        totals = [sum(column) for column in zip(*rows, strict=True)]
        assert found["residual_norm"] == pytest.approx(math.sqrt(totals[1]), rel=1e-5)
        if len(rows[0]) == 2:  # without error feedback: drawn anew
            assert 0.001 < found["nmse"] < 0.05
            assert found["compression_gain"] == pytest.approx(1, abs=0.1)
        else:
            assert found["nmse"] == pytest.approx(totals[3] / totals[0], rel=1e-4)
            assert found["compression_gain"] == pytest.approx(totals[2] / totals[0], rel=1e-4)
            for name in names:
                assert layers[f"{name}/nmse"] == pytest.approx(
                    reference[name][3] / reference[name][0], rel=1e-4
                )
                kept = math.sqrt(reference[name][1])
                assert layers[f"{name}/residual_norm"] == pytest.approx(kept, rel=1e-5)
        own = stats["parameters"]["0.weight"]
        bits = 8 * own["payload_bytes"] / own["numel"]
        assert layers["0.weight/bits_per_value"] == pytest.approx(bits)
        assert layers["0.bias/bits_per_value"] == 32
        assert "0.bias/nmse" not in layers
        assert found.items() <= layers.items()


def test_values_under_fsdp2(rank: int) -> None:
    for method in METHODS[:3]:
        model, handle = attached(True, **method)
        handle.metrics(every=1)
        optimizer = trains(model, 3)
        residuals = [of["residual"] for of in handle.state_dict()["aggregators"].values() if of]
        norm = math.sqrt(sum(float(r.double().square().sum()) for r in residuals))
        trains(model, 1, optimizer)  # as it begins, the sample of the third pass is there
        found, stats = handle.metrics(), handle.stats()
        assert found.keys() == SAMPLED | COUNTED
        assert found["sampled_step"] == 3
        assert found["ratio"] == pytest.approx(stats["ratio"])
        assert found["residual_norm"] == pytest.approx(norm, rel=1e-5)
        if method["codec"] == "qsgd":
            # half of it is the own shard, which is exact
            assert 0.0005 < found["nmse"] < 0.05
            assert found["compression_gain"] == pytest.approx(1, abs=0.1)
        else:
            assert 0.1 < found["nmse"] < 0.8
            assert found["compression_gain"] + found["nmse"] == pytest.approx(1, rel=1e-3)


@dataclass(frozen=True)
class Telling(Aggregator):
    """Tells the number of rows of each parameter as its metric."""

    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        for c in contexts:
            c.metrics["saturated"] = torch.tensor(float(c.shape[0]))
        return (yield [AllReduce(c.gradient, of=c) for c in contexts])

    def payload_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return math.prod(shape) * dtype.itemsize


def test_what_aggregators_tell_is_weighted_by_values(rank: int) -> None:
    model, handle = attached(codec=Telling())
    trains(model, 1)
    told = handle.metrics(layers=True)
    update = handle.update("qsgd")
    update.wait()
    while not update.in_force:
        trains(model, 1)
    mean = (300 * 12000 + 50 * 15000) / (12000 + 15000)
    assert told["saturated"] == pytest.approx(mean)
    assert told["0.weight/saturated"] == 300
    assert "nmse" not in told
    assert "saturated" not in handle.metrics()


def test_one_pass_in_some_is_sampled(rank: int) -> None:
    model, handle = attached(codec="qsgd", error_feedback=True)
    optimizer = trains(model, 2)
    unasked = handle.metrics(every=3)
    assert not SAMPLED & unasked.keys()
    seen = []
    for _ in range(8):
        trains(model, 1, optimizer)
        seen.append(int(handle.metrics(every=3)["sampled_step"]))
    assert seen == [3, 3, 3, 6, 6, 6, 9, 9]
    assert handle.metrics(every=3) == (last := handle.metrics(every=3))
    prefixed = handle.metrics(every=3, prefix="gradwire/")
    assert prefixed == {f"gradwire/{key}": value for key, value in last.items()}
    with pytest.raises(ConfigError, match="every=0"):
        handle.metrics(every=0)


def test_every_reading_is_of_whole_collectives(rank: int) -> None:
    """After each change of the counters of gradients, as another thread may read."""
    for sharded in (False, True):
        model, handle = attached(sharded, codec="qsgd")
        seen = read_at_every_count(handle)
        trains(model, 2)
        assert {(bool(raw), bool(wire)) for raw, wire, _ in seen} == {(False, False), (True, True)}
        assert {ratio is None or ratio > 4 for *_, ratio in seen} == {True}


def read_at_every_count(handle: Any) -> list[tuple[int, int, float | None]]:
    """raw_bytes, wire_bytes and the ratio of metrics."""
    count, seen = handle._reductions.count, []

    def counted(*given: Any, **more: Any) -> None:
        count(*given, **more)
        stats = handle.stats()
        seen.append((stats["raw_bytes"], stats["wire_bytes"], handle.metrics().get("ratio")))

    handle._reductions.count = counted
    return seen


def test_what_was_not_sent_has_no_key() -> None:
    """Totals as another thread reads them, in the middle of a pass."""
    plan = make_plan([("w", torch.zeros(100, 100))], Rules(), 2)
    metrics, members = Metrics(2), members_of(plan, 0, 0, 0)
    names = ("steps", "raw_bytes", "wire_bytes", "weights_raw_bytes", "weights_wire_bytes")
    seconds = {"exposed_seconds": 0.0, "weights_exposed_seconds": 0.0}

    def read(*numbers: int) -> set[str]:
        totals = dict(zip(names, numbers, strict=True)) | seconds
        found = metrics.read(totals, plan, members, False, 1)
        assert found.get("ratio", 8) == found.get("weights_ratio", 4) * 2 == 8
        assert found.get("bits_per_value", 4) == 4
        return set(found)

    exposed, of_weights = {"exposed_seconds"}, {"weights_exposed_seconds"}
    assert read(0, 0, 0, 0, 0) == set()
    assert read(1, 0, 0, 0, 0) == exposed
    assert read(2, 0, 10, 0, 10) == exposed | of_weights  # plan versions, whether weights changed
    assert read(3, 80, 20, 0, 10) == exposed | {"ratio", "bits_per_value"}
    assert read(3, 160, 30, 0, 10) == exposed | {"ratio", "bits_per_value"}  # the same pass
    assert read(2, 80, 10, 0, 10) == exposed | {"ratio", "bits_per_value"}  # before it, read late
    assert read(5, 160, 30, 40, 20) == exposed | of_weights | {
        "ratio", "bits_per_value", "weights_ratio"
    }  # fmt: skip


def test_a_reading_keeps_to_what_it_began_with() -> None:
    sampler, one = Sampler(2), torch.ones(1)

    def member(name: str, **state: torch.Tensor) -> Any:
        return SimpleNamespace(name=name, aggregator=None, state=state)

    class Replaced(dict[str, Any]):
        """Which a pass that ends replaces, or adds to, while it is read."""

        def values(self) -> Any:
            sampler.begin(2)
            return super().values()

    sampler.ask(1)
    sampler.begin(1)
    sampler.observe(member("a"), Observation("a", 0, one, one, one, 0.0))
    sampler.end()
    sampler._norms = Replaced(sampler._norms)
    sampler.running = True
    sampler.observe(member("b", residual=one), Observation("b", 0, one, one, one, 0.0))
    assert sampler.squares() == {"a": [1, 1, 0, 0]}
    assert sampler.squares() == {"b": [4, 1, 1, 1]}

    class Grows:
        """A state to which a pass adds another while it is counted."""

        def numel(self) -> int:
            state["more"] = one
            return 3

        def element_size(self) -> int:
            return 4

    state: dict[str, Any] = {"residual": Grows()}
    handle = Saved({"w": SimpleNamespace(state=state)}, 0, 0, 2, None)  # type: ignore[dict-item,arg-type]
    assert handle._state_bytes() == 12
