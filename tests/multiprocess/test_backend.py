"""The backend "gradwire" under real DDP and FSDP2 modules. One start of processes, many scenarios.

The training code is what it would be over gloo. A gloo group of the same ranks stands beside, to
compare with.
"""

from __future__ import annotations

import contextlib
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import gradwire as gw
from products import EXHAUSTIVE
from ranks import as_processes, caught

pytestmark = pytest.mark.multiprocess

ENVIRONMENT = {"GRADWIRE_MIN_BYTES": "4000"}


def mlp(width: int = 60) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.LayerNorm(width), nn.Linear(width, 30))


def batch(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * 100 + dist.get_rank())
    return torch.randn(8, 20, generator=generator).to(dtype)


def train(
    model: nn.Module, steps: range, clip: float | None = None, dtype: torch.dtype = torch.float32
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        model(batch(step, dtype)).float().square().mean().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Of a shard, the tensor."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([whole(p.detach()).float().reshape(-1) for p in model.parameters()])


def strayed(model: nn.Module, reference: nn.Module, start: nn.Module) -> float:
    """How far training has led away from the reference, as a part of the way."""
    way = (flat(reference) - flat(start)).norm()
    return float((flat(model) - flat(reference)).norm() / way)


def same_everywhere(tensor: torch.Tensor) -> bool:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, tensor)
    return all(torch.equal(gathered[0], other) for other in gathered)


def gloo() -> Any:
    """A gloo group of all ranks."""
    return dist.new_group(backend="gloo")


def group() -> Any:
    """The default group: the backend's."""
    return dist.group.WORLD


class Sent:
    """How much was compressed since: calls and bytes of a group's blobs."""

    def __init__(self, of: Any = None) -> None:
        self.group = of or group()
        self.before = self.group.stats()

    def __getattr__(self, name: str) -> int:
        return int(self.group.stats()[name] - self.before[name])

    @property
    def ratio(self) -> float:
        return self.raw_bytes / self.wire_bytes


@contextlib.contextmanager
def setting(**changes: Any) -> Iterator[Any]:
    """A group whose environment says otherwise."""
    old = dict(os.environ)
    os.environ.update(changes)
    made = dist.new_group(backend="gradwire")
    os.environ.clear()
    os.environ.update(old)
    yield made
    dist.destroy_process_group(made)


# ---- DDP in blob mode


def ddp_buckets_are_compressed() -> None:
    sent = Sent()
    model = DDP(mlp())
    train(model, range(4))
    assert sent.calls == 4
    assert sent.ratio > 6
    assert same_everywhere(flat(model))
    reference = DDP(mlp(), process_group=gloo())
    train(reference, range(4))
    assert 0 < strayed(model, reference, mlp()) < 0.25


def eight_bits_are_nearer_than_two() -> None:
    reference = DDP(mlp(), process_group=gloo())
    train(reference, range(4))
    errors = []
    for bits in (2, 8):
        with setting(GRADWIRE_CODEC=f"qsgd:bits={bits}") as chosen:
            model = DDP(mlp(), process_group=chosen)
            train(model, range(4))
            errors.append(float((flat(model) - flat(reference)).norm()))
    assert errors[1] < errors[0] / 10


def codec_none_leaves_ddp_as_it_is() -> None:
    with setting(GRADWIRE_CODEC="none") as chosen:
        model = DDP(mlp(), process_group=chosen)
        train(model, range(3))
        reference = DDP(mlp(), process_group=gloo())
        train(reference, range(3))
        assert torch.equal(flat(model), flat(reference))
        assert chosen.stats()["calls"] == 0
        assert chosen.stats()["ratio"] is None


def small_models_go_as_they_are() -> None:
    with setting(GRADWIRE_MIN_BYTES="1000000") as chosen:
        model = DDP(mlp(), process_group=chosen)
        train(model, range(3))
        reference = DDP(mlp(), process_group=gloo())
        train(reference, range(3))
        assert torch.equal(flat(model), flat(reference))
        assert chosen.stats()["calls"] == 0


def metrics_stay_exact() -> None:
    """Large float sums outside of a backward pass, and those of a forward that it repeats."""
    sent = Sent()
    metric = torch.randn(5_000, generator=torch.Generator().manual_seed(dist.get_rank()))
    expected = metric.clone()
    dist.all_reduce(expected, group=gloo())
    forwards = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        seen = metric.clone()
        dist.all_reduce(seen)
        assert torch.equal(seen, expected)
        forwards.append(torch._C._current_graph_task_id())
        return x.sin().sin()

    for reentrant in (False, True):
        x = torch.ones(3, requires_grad=True)
        checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    assert [task == -1 for task in forwards] == [True, False] * 2
    assert sent.calls == 0


def no_sync_accumulates() -> None:
    model, reference = DDP(mlp()), DDP(mlp(), process_group=gloo())
    for wrapped in (model, reference):
        sent = Sent()
        with wrapped.no_sync():
            wrapped(batch(0)).square().mean().backward()
        assert sent.calls == 0
        wrapped(batch(1)).square().mean().backward()
    gradients = [
        torch.cat([p.grad.reshape(-1) for p in m.parameters()]) for m in (model, reference)
    ]
    assert 0 < (gradients[0] - gradients[1]).norm() < 0.25 * gradients[1].norm()
    assert same_everywhere(gradients[0])


class Branches(nn.Module):
    """Uses one of two layers, by the step: the other has no gradient then."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.head = nn.Linear(20, 60), nn.Linear(20, 60), nn.Linear(60, 30)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return self.head(self.left(x) if left else self.right(x))


def unused_parameters_are_fine() -> None:
    model = DDP(Branches(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        model(batch(step), step % 2 == 0).square().mean().backward()
        optimizer.step()
    assert same_everywhere(flat(model))


def other_ways_of_ddp() -> None:
    """static_graph, gradients as views, many buckets, clipping, half precision, compiled."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for options in ({"static_graph": True}, {"gradient_as_bucket_view": True}):
            sent = Sent()
            model = DDP(mlp().to(dtype), bucket_cap_mb=0.005, **options)
            train(model, range(4), clip=1.0, dtype=dtype)
            assert same_everywhere(flat(model))
            assert torch.isfinite(flat(model)).all()
            assert sent.calls > 4 or dtype != torch.float32
            assert sent.calls >= 1
    sent = Sent()
    model = DDP(mlp())
    train(torch.compile(model, backend="eager"), range(3))
    assert same_everywhere(flat(model))
    assert sent.calls == 3


def hooks_of_ddp_are_compressed_too() -> None:
    """A hook's all-reduce, in half precision and with a callback, is a blob as well."""
    sent = Sent()
    model = DDP(mlp())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(model, range(3))
    assert sent.calls == 3
    assert same_everywhere(flat(model))


def uneven_inputs_join() -> None:
    """A rank that ran out of data mirrors the others' buckets, outside of any backward."""
    sent = Sent()
    model = DDP(mlp())
    rank, size = dist.get_rank(), dist.get_world_size()
    with model.join():
        train(model, range(2 + 2 * rank))
    assert same_everywhere(flat(model))
    assert sent.calls == 2 * size  # all take part in all, some without data


def several_groups_at_once() -> None:
    """Two modules over overlapping groups, in one backward."""
    size = dist.get_world_size()
    other = dist.new_group(list(range(size)), backend="gradwire")
    pair = dist.new_group([0, 1], backend="gradwire")
    wide = DDP(mlp(), process_group=other)
    loss = wide(batch(0)).square().mean()
    if dist.get_rank() < 2:
        narrow = DDP(mlp(), process_group=pair)
        loss = loss + narrow(batch(1)).square().mean()
    sent = Sent(other)
    loss.backward()
    assert sent.calls == 1
    assert same_everywhere(torch.cat([p.grad.reshape(-1) for p in wide.parameters()]))
    if dist.get_rank() < 2:
        assert pair.stats()["calls"] == 1
    dist.barrier()


def non_finite_gradients_reach_every_rank() -> None:
    model = DDP(mlp())
    x = batch(0)
    if dist.get_rank() == 1:
        x[0, 0] = float("inf")
    model(x).square().mean().backward()
    assert not all(torch.isfinite(p.grad).all() for p in model.parameters())


def any_layout_is_reduced_in_place() -> None:
    """An all-reduce of one's own in a hook of autograd: averages, sums, and transposed tensors."""
    rank, size = dist.get_rank(), dist.get_world_size()
    seen = {}

    def average(gradient: torch.Tensor) -> torch.Tensor:
        assert not gradient.is_contiguous()
        for name, op in (("sum", dist.ReduceOp.SUM), ("avg", dist.ReduceOp.AVG)):
            reduced = gradient.clone(memory_format=torch.preserve_format)
            work = dist.all_reduce(reduced, op, async_op=True)
            work.wait()
            assert work.is_completed()
            assert work.is_success()
            assert work.exception() is None
            assert work.result()[0].data_ptr() == reduced.data_ptr()
            seen[name] = reduced
        return seen["avg"]

    x = torch.zeros(50, 60, requires_grad=True)
    y = x * 1.0
    y.register_hook(average)
    y.backward(torch.full((60, 50), float(rank)).t())
    assert torch.equal(x.grad, torch.full((50, 60), (size - 1) / 2))
    assert torch.equal(seen["sum"], torch.full((50, 60), size * (size - 1) / 2))


# ---- FSDP2 in blob mode


def sharded(model: nn.Module, of: Any = None, **options: Any) -> nn.Module:
    """`model` under FSDP2, its layers one by one."""
    mesh = dist.DeviceMesh.from_group(of or group(), "cpu")
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp_scatters_compressed() -> None:
    sent = Sent()
    model = sharded(mlp())
    start = flat(model)
    assert torch.equal(start, flat(mlp()))  # weights are gathered as they are
    train(model, range(4))
    assert sent.calls == 8  # two layers are large enough
    assert sent.ratio > 5.5
    reference = sharded(mlp(), gloo())
    train(reference, range(4))
    assert 0 < strayed(model, reference, mlp()) < 0.25


def fsdp_in_half_precision() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    sent = Sent()
    model = sharded(mlp(80), mp_policy=policy)
    train(model, range(3), clip=1.0)
    assert sent.calls >= 3
    assert torch.isfinite(flat(model)).all()


def hybrid_sharding_compresses_both_hops() -> None:
    if dist.get_world_size() != 4:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model, reference = fully_shard(mlp(200), mesh=mesh), sharded(mlp(200), gloo())
    train(model, range(3))
    train(reference, range(3))
    for name in ("replicas", "shards"):
        assert mesh[name].get_group().stats()["calls"] == 3
    assert 0 < strayed(model, reference, mlp(200)) < 0.25


# ---- registered


def a_registered_ddp_module_goes_by_parameter() -> None:
    reference = DDP(mlp(), process_group=gloo())
    for wrapped_first in (False, True):
        sent = Sent()
        bare = mlp()
        if wrapped_first:
            model = DDP(bare)
            registration = gw.register(model, bits=8, exclude=["3.weight"])
            assert registration.settled
        else:
            registration = gw.register(bare, bits=8, exclude=["3.weight"])
            assert not registration.settled
            model = DDP(bare)
        train(model, range(3))
        assert registration.handle is not None
        stats = registration.handle.stats()
        assert stats["steps"] == 3
        codecs = {name: p["codec"] for name, p in stats["parameters"].items()}
        assert "bits=8" in codecs.pop("0.weight")
        assert set(codecs.values()) == {"dense"}
        assert sent.calls == 0  # its buckets never come as blobs
        assert same_everywhere(flat(model))
        registration.withdraw()
        train(model, range(3, 4))
        assert registration.handle.stats()["steps"] == 3
        assert sent.calls == 1
    train(reference, range(4))
    assert strayed(model, reference, mlp()) < 0.25


class Trainer(nn.Module):
    """A framework's module around the user's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.ones(30, 30))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) @ self.scale


def a_registered_part_of_what_ddp_wraps() -> None:
    bare = mlp()
    registration = gw.register(bare, codecs={"3.weight": "terngrad"})
    model = DDP(Trainer(bare))
    train(model, range(2))
    assert registration.handle is not None
    stats = registration.handle.stats()["parameters"]
    codecs = {name: p["codec"].split("(")[0] for name, p in stats.items() if p["codec"] != "dense"}
    assert codecs == {"inner.0.weight": "QSGD", "inner.3.weight": "TernGrad"}


def a_registered_module_compiles() -> None:
    bare = mlp()
    registration = gw.register(bare)
    train(torch.compile(DDP(bare), backend="eager"), range(2))
    assert registration.handle is not None
    assert registration.handle.stats()["steps"] == 2


def error_feedback_when_registered() -> None:
    model = DDP(mlp())
    registration = gw.register(model, bits=2, error_feedback=True, coalesce_bytes=0)
    train(model, range(3))
    assert registration.handle is not None
    assert registration.handle.stats()["residual_bytes"] == 4 * (20 * 60 + 60 * 30)


def a_registered_fsdp_module_goes_by_parameter() -> None:
    """Biases and norms travel uncompressed; each weight has blocks of its own."""
    size = dist.get_world_size()
    for before in (True, False):
        own = dist.new_group(backend="gradwire")
        bare = mlp()
        if before:
            registration = gw.register(bare, bits=4, block=64, exclude=["3.*"])
            model = sharded(bare, own)
        else:
            model = sharded(bare, own)
            registration = gw.register(model, bits=4, block=64, exclude=["3.*"])
            assert registration.settled
        reference = sharded(mlp(), gloo())
        sent = Sent(own)
        for wrapped in (model, reference):
            wrapped(batch(0)).square().mean().backward()
        assert registration.settled
        assert sent.calls == 3  # the norm too, though it is small
        for (name, one), other in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            difference = (whole(one.grad) - whole(other.grad)).abs().max()
            assert (difference > 1e-6) == (name == "0.weight"), (name, difference)
            assert difference < 0.05

        # To each peer: three messages of a 48-byte header and rows that end at multiples of 16.
        def padded(nbytes: int) -> int:
            return -(-nbytes // 16) * 16

        def rows(width: int) -> int:
            return -(-width // size)

        quantised = rows(60) * 20
        payload = padded(quantised // 2 + 4 * -(-quantised // 64))
        dense = [rows(60), rows(60), rows(60), rows(30) * 60, rows(30)]
        expected = payload + sum(padded(4 * n) for n in dense) + 3 * 48
        assert sent.wire_bytes <= (size - 1) * (expected + 16)
        assert sent.wire_bytes >= (size - 1) * (expected - 16)


def hybrid_sharding_registered() -> None:
    if dist.get_world_size() != 4:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model, reference = fully_shard(mlp(200), mesh=mesh), sharded(mlp(200), gloo())
    gw.register(model)
    for wrapped in (model, reference):
        wrapped(batch(0)).square().mean().backward()
    for (name, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        difference = (whole(one.grad) - whole(other.grad)).abs().max()
        assert (difference > 1e-6) == (name in ("0.weight", "3.weight")), (name, difference)


def wrong_use_is_named() -> None:
    plain = DDP(mlp(), process_group=gloo())
    error = caught(lambda: gw.register(plain))
    assert isinstance(error, gw.ConfigError)
    assert "gloo" in str(error)
    error = caught(lambda: gw.register(sharded(mlp(), gloo())))
    assert isinstance(error, gw.ConfigError)
    assert "gloo" in str(error)
    error = caught(lambda: gw.register(sharded(mlp()), error_feedback=True))
    assert isinstance(error, gw.ConfigError)
    assert "error_feedback" in str(error)
    error = caught(lambda: gw.register(sharded(mlp()), coalesce_bytes=0))
    assert isinstance(error, gw.ConfigError)
    error = caught(lambda: gw.register(mlp(), exclude=["nobody"]))
    assert isinstance(error, gw.ConfigError)
    assert "nobody" in str(error)
    error = caught(lambda: gw.register(mlp(), "nothing"))
    assert isinstance(error, gw.ConfigError)
    assert "nothing" in str(error)
    error = caught(lambda: gw.register(DDP(mlp()), bits=4 + dist.get_rank() % 2))
    assert isinstance(error, gw.ConfigError)
    assert "0.weight" in str(error)
    error = caught(lambda: gw.register(sharded(mlp()), bits=4 + dist.get_rank() % 2))
    assert isinstance(error, gw.ConfigError)
    assert "0.weight" in str(error)


def environments_that_differ_are_named() -> None:
    rank = dist.get_rank()
    for wrong in (1, 0):  # who has a value that is none: then, too, every rank is told
        os.environ["GRADWIRE_MIN_BYTES"] = "many" if rank == wrong else "4000"
        error = caught(lambda: dist.new_group(backend="gradwire"))
        assert isinstance(error, gw.ConfigError)
        assert "GRADWIRE_MIN_BYTES='many'" in str(error)
    os.environ["GRADWIRE_MIN_BYTES"] = str(4000 + rank)
    error = caught(lambda: dist.new_group(backend="gradwire"))
    os.environ.update(ENVIRONMENT)
    assert isinstance(error, gw.ConfigError)
    assert "GRADWIRE_MIN_BYTES 4001" in str(error)
    assert "rank 1" in str(error)


def split_groups_are_of_the_backend() -> None:
    """torch splits groups of accelerators alone; the group's own method needs none."""
    child = group().split_group([0, 1], group_name="a pair", group_desc="split")
    assert (child is None) == (dist.get_rank() > 1)
    if child is not None:
        assert (type(child), child.size(), child.group_name) == (type(group()), 2, "a pair")
        assert child.blobs.settings == group().blobs.settings
        tensor = torch.full((3,), float(dist.get_rank() + 1))
        child.allreduce([tensor]).wait()
        assert tensor.tolist() == [3.0] * 3
        gw.all_reduce(tensor, "identity", group=child)
    gw.all_reduce(torch.ones(3), "identity")  # first use of another group's engine, perhaps
    if child is not None:
        gw.all_reduce(tensor, "identity", group=child)
        assert tensor.tolist() == [12.0] * 3
        child.shutdown()
    dist.barrier()


SCENARIOS: list[Callable[[], None]] = [
    ddp_buckets_are_compressed,
    eight_bits_are_nearer_than_two,
    codec_none_leaves_ddp_as_it_is,
    small_models_go_as_they_are,
    metrics_stay_exact,
    no_sync_accumulates,
    unused_parameters_are_fine,
    other_ways_of_ddp,
    hooks_of_ddp_are_compressed_too,
    uneven_inputs_join,
    several_groups_at_once,
    non_finite_gradients_reach_every_rank,
    any_layout_is_reduced_in_place,
    fsdp_scatters_compressed,
    fsdp_in_half_precision,
    hybrid_sharding_compresses_both_hops,
    a_registered_ddp_module_goes_by_parameter,
    a_registered_part_of_what_ddp_wraps,
    a_registered_module_compiles,
    error_feedback_when_registered,
    a_registered_fsdp_module_goes_by_parameter,
    hybrid_sharding_registered,
    wrong_use_is_named,
    environments_that_differ_are_named,
    split_groups_are_of_the_backend,
]


def run_all(rank: int) -> dict[str, str]:
    """Every scenario's verdict; one that fails does not keep the others from running."""
    warnings.simplefilter("ignore")
    assert dist.get_backend() == "gradwire"
    verdicts = {}
    for scenario in SCENARIOS:
        try:
            scenario()
            verdicts[scenario.__name__] = "passed"
        except BaseException:
            verdicts[scenario.__name__] = traceback.format_exc()
    return verdicts


_verdicts: dict[int, list[dict[str, str]]] = {}


@pytest.mark.timeout(280)
@pytest.mark.parametrize("scenario", [s.__name__ for s in SCENARIOS])
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=EXHAUSTIVE), 4])
def test_backend(world_size: int, scenario: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if world_size not in _verdicts:
        for name, value in ENVIRONMENT.items():
            monkeypatch.setenv(name, value)
        _verdicts[world_size] = as_processes(
            world_size, run_all, timeout=30, deadline=240, backend="gradwire"
        )
    for rank, verdict in enumerate(_verdicts[world_size]):
        assert verdict[scenario] == "passed", f"rank {rank}:\n{verdict[scenario]}"


def alone(rank: int) -> None:
    """World size 1: nothing is sent, so nothing is compressed."""
    for wrap in (DDP, sharded):
        model, reference = wrap(mlp()), mlp()
        train(model, range(3))
        train(reference, range(3))
        torch.testing.assert_close(flat(model), flat(reference))
    assert group().stats()["calls"] == 0


@pytest.mark.timeout(100)
def test_backend_alone() -> None:
    as_processes(1, alone, timeout=30, deadline=90, backend="gradwire")


def one_dimension_of_a_mesh(rank: int) -> float:
    """gloo inside a machine, gradwire between machines: HSDP's slow hop alone is compressed."""
    warnings.simplefilter("ignore")
    assert dist.get_backend() == "gloo"
    mesh = init_device_mesh(
        "cpu",
        (2, 2),
        mesh_dim_names=("replicas", "shards"),
        backend_override={"replicas": "gradwire"},
    )
    model, reference = fully_shard(mlp(200), mesh=mesh), sharded(mlp(200))
    train(model, range(3))
    train(reference, range(3))
    assert dist.get_backend(mesh["shards"].get_group()) == "gloo"
    assert mesh["replicas"].get_group().stats()["calls"] == 3
    return strayed(model, reference, mlp(200))


def test_one_dimension_of_a_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    for astray in as_processes(4, one_dimension_of_a_mesh, timeout=30):
        assert 0 < astray < 0.25
