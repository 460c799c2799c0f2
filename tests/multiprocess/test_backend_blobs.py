"""Blob mode: tensors that a backward pass reduces, compressed without knowledge of parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from small_models import (
    Sent,
    batch,
    flat,
    gloo,
    mlp,
    same_everywhere,
    setting,
    sharded,
    strayed,
    train,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from products import EXHAUSTIVE
from ranks import all_pass

pytestmark = pytest.mark.multiprocess

ENVIRONMENT = {"GRADWIRE_MIN_BYTES": "4000", "GRADWIRE_BLOB": "1"}


def ddp_buckets_are_compressed() -> None:
    warnings.simplefilter("ignore")  # from now on
    assert dist.get_backend() == "gradwire"
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
        assert chosen.stats()["ratio"] == 1


def small_models_go_as_they_are() -> None:
    with setting(GRADWIRE_MIN_BYTES="1000000") as chosen:
        model = DDP(mlp(), process_group=chosen)
        train(model, range(3))
        reference = DDP(mlp(), process_group=gloo())
        train(reference, range(3))
        assert torch.equal(flat(model), flat(reference))
        assert chosen.stats()["calls"] == 0


def metrics_stay_exact() -> None:
    """Large float sums outside of a backward pass, and in a recomputed forward."""
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
    """Uses one of two layers per step, so that the other has no gradient."""

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
    """static_graph, gradients as views, many buckets, clipping, half precision."""
    for dtype, option in (
        (torch.float32, "gradient_as_bucket_view"), (torch.bfloat16, "static_graph")
    ):  # fmt: skip
        sent = Sent()
        model = DDP(mlp().to(dtype), bucket_cap_mb=0.005, **{option: True})
        train(model, range(4), clip=1.0, dtype=dtype)
        assert same_everywhere(flat(model))
        assert torch.isfinite(flat(model)).all()
        assert sent.calls > 4 or dtype != torch.float32
        assert sent.calls >= 1


def a_compiled_module_is_compressed() -> None:
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
    assert sent.calls == 2 * size  # all ranks take part in all, some without data


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
    """A script's all-reduce in an autograd hook: averages, sums, and transposed tensors."""
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


def fsdp_scatters_compressed() -> None:
    sent = Sent()
    model = sharded(mlp())
    start = flat(model)
    assert torch.equal(start, flat(mlp()))  # weights are gathered uncompressed
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
]


@pytest.mark.timeout(280)
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=EXHAUSTIVE)])
def test_blobs(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    more = [a_compiled_module_is_compressed] if world_size > 2 else []
    all_pass(world_size, [*SCENARIOS, *more], timeout=30, deadline=240, backend="gradwire")
