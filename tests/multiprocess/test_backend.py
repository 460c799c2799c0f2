"""The backend "gradwire" under real DDP and FSDP2 modules: by parameter, and in blob mode, where
tensors that a backward pass reduces are compressed without knowledge of parameters.

The training code is what it would be over gloo; a twin over a gloo group of the same ranks stands
beside.
"""

from __future__ import annotations

import copy
import logging
import warnings
from typing import Any

import torch
import torch.distributed as dist
from over_backend import (
    BLOBS,
    ENVIRONMENT,
    Sent,
    beside,
    by_parameter,
    gloo,
    group,
    in_blobs,
    in_ddp,
    is_blob,
    mlp,
    over,
    setting,
    sharded,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import gradwire as gw
from ranks import on, refuses
from training import Branches, batch, flat, gradients, same_everywhere, train

# ---- what is found, and compressed


@by_parameter
@in_blobs
def test_ddp_modules_are_compressed(rank: int) -> None:
    model, again = DDP(mlp()), copy.deepcopy(DDP(mlp()))
    sent, strayed = beside(model, in_ddp(mlp(), gloo()), 4)
    assert 0 < strayed < 0.25
    assert sent.calls == 4
    assert sent.ratio > (6 if is_blob() else 2)  # small, since biases and norms are uncompressed
    assert same_everywhere(flat(model))
    if is_blob():
        return
    told = group().models.handles[model].stats()["parameters"]
    compressed = {name for name, facts in told.items() if facts["codec"] != "none"}
    assert compressed == {"0.weight", "3.weight"}
    assert "_before_forward" not in str(model._forward_pre_hooks)  # the backend's own
    train(again, range(4))
    assert torch.equal(flat(again), flat(model))


@by_parameter
@in_blobs
def test_other_ways_of_ddp(rank: int) -> None:
    """static_graph, gradients as views, many buckets, clipping, half precision, unused parameters,
    uneven inputs, compiled."""
    options = ("gradient_as_bucket_view", "static_graph")
    for dtype, option in zip(
        (torch.float32, torch.bfloat16), options if is_blob() else options[::-1], strict=True
    ):
        sent = Sent()
        model = DDP(mlp().to(dtype), bucket_cap_mb=0.005, **{option: True})
        train(model, range(4), clip=1.0, dtype=dtype)
        assert same_everywhere(flat(model))
        assert torch.isfinite(flat(model)).all()
        if is_blob():
            assert sent.calls > (4 if dtype == torch.float32 else 0)
        else:
            assert sent.calls == 4
    branches = DDP(Branches(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(branches.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        branches(batch(step), step % 2 == 0).square().mean().backward()
        optimizer.step()
    assert same_everywhere(flat(branches))
    # A rank that ran out of data mirrors the others' buckets, outside of any backward.
    model, sent = DDP(mlp()), Sent()
    with model.join():
        train(model, range(2 + 2 * rank))
    assert same_everywhere(flat(model))
    if is_blob():
        assert sent.calls == 2 * dist.get_world_size()  # all ranks take part, some without data
    model, sent = DDP(mlp()), Sent()
    train(torch.compile(model, backend="eager"), range(3))
    assert same_everywhere(flat(model))
    assert sent.calls == 3


@by_parameter
@in_blobs
def test_no_sync_accumulates(rank: int) -> None:
    found = []
    for of in (group(), gloo()):
        sent, model = Sent(), in_ddp(mlp(), of)
        with model.no_sync():
            model(batch(0)).square().mean().backward()
        assert sent.calls == 0
        model(batch(1)).square().mean().backward()
        assert sent.calls == (of is group())
        found.append(gradients(model))
    assert 0 < (found[0] - found[1]).norm() < 0.25 * found[1].norm()
    assert same_everywhere(found[0])


@in_blobs
def test_fsdp_scatters_blobs(rank: int) -> None:
    model = sharded(mlp())
    assert torch.equal(flat(model), flat(mlp()))  # weights are gathered uncompressed
    sent, strayed = beside(model, sharded(mlp(), gloo()), 4)
    assert 0 < strayed < 0.25
    assert sent.calls == 8  # two layers are large enough
    assert sent.ratio > 5.5


@by_parameter
@in_blobs
def test_fsdp_in_half_precision(rank: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model, sent = sharded(mlp(80), mp_policy=policy), Sent()
    train(model, range(3), clip=1.0)
    assert sent.calls >= 3 if is_blob() else sent.calls == 9
    assert torch.isfinite(flat(model)).all()


def replicas_of_shards(**how: Any) -> tuple[Any, Any]:
    """A module, and groups of its mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"), **how)
    groups = [mesh[name].get_group() for name in ("replicas", "shards")]
    return fully_shard(mlp(200), mesh=mesh), groups


@by_parameter
@in_blobs
def test_hybrid_sharding_is_compressed_in_both_hops(rank: int) -> None:
    if dist.get_world_size() != 4:
        return
    model, groups = replicas_of_shards()
    _, strayed = beside(model, sharded(mlp(200), gloo()))
    assert 0 < strayed < 0.25
    sent = [of.stats() for of in groups]
    assert sorted(stats["calls"] for stats in sent) == ([3, 3] if is_blob() else [0, 6])
    if not is_blob():
        assert not any("reduce_scatter_single" in stats["left_alone"] for stats in sent)


@on(4, environment=ENVIRONMENT)
def test_one_dimension_of_a_mesh(rank: int) -> None:
    """gloo inside a machine, gradwire between machines: HSDP's slow hop alone is compressed."""
    warnings.simplefilter("ignore")
    assert dist.get_backend() == "gloo"
    model, (replicas, shards) = replicas_of_shards(backend_override={"replicas": "gradwire"})
    sent, strayed = beside(model, sharded(mlp(200)), of=replicas)
    assert 0 < strayed < 0.25
    assert dist.get_backend(shards) == "gloo"
    assert sent.calls == 3
    assert "allreduce" not in replicas.stats()["left_alone"]


@by_parameter
def test_an_aggregator_is_named_like_a_codec(rank: int) -> None:
    with setting(GRADWIRE_CODEC="powersgd:rank=2") as chosen:
        attached = in_ddp(mlp(), gloo())
        handle = gw.attach(attached, "powersgd:rank=2")
        _, strayed = beside(in_ddp(mlp(), chosen), attached)
        assert strayed == 0
        assert chosen.stats()["wire_bytes"] == handle.stats()["wire_bytes"] > 0
        handle.detach()


# ---- what is left alone: bit-identical to gloo


@by_parameter
def test_hooks_of_a_script_are_left_alone(rank: int) -> None:
    """torch's own, in Python and in C++."""

    def python(model: DDP) -> None:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)

    def builtin(model: DDP) -> None:
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)

    def attached(model: DDP) -> None:
        gw.attach(model, "identity")

    for way in (python, builtin, attached):
        both = DDP(mlp()), in_ddp(mlp(), gloo())
        for model in both:
            way(model)
        sent, strayed = beside(*both)
        assert (sent.calls, strayed) == (0, 0), way.__name__


@by_parameter
def test_collectives_of_a_script_are_torchs(rank: int) -> None:
    """In a backward pass and outside: tensor parallelism, and reductions in tensor hooks; and
    sparse gradients of a module."""
    size, sent = dist.get_world_size(), Sent()
    made = []
    for backend in (group(), gloo()):
        mesh = dist.DeviceMesh.from_group(backend, "cpu", mesh_dim_names=("tp",))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 80 * size), nn.ReLU(), nn.Linear(80 * size, 40))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        x = torch.randn(64, 40, generator=torch.Generator().manual_seed(1), requires_grad=True)

        def reduce(gradient: torch.Tensor, backend: Any = backend) -> torch.Tensor:
            reduced = gradient.clone()
            dist.all_reduce(reduced, dist.ReduceOp.AVG, group=backend)
            return reduced

        y = x * 1.0
        y.register_hook(reduce)
        model(y).square().sum().backward()
        made.append([x.grad, *(p.grad.to_local() for p in model.parameters())])
        sparse = in_ddp(nn.EmbeddingBag(100, 30, sparse=True), backend)
        for step in range(3):
            at = torch.arange(6).view(2, 3) + rank + step
            sparse(at).square().sum().backward()
        made[-1].append(sparse.module.weight.grad.to_dense())
    assert all(map(torch.equal, *made))
    assert sent.calls == 0
    assert group().stats()["left_alone"]["allreduce"] > 0


@in_blobs
def test_metrics_stay_exact(rank: int) -> None:
    """Large float sums outside of a backward pass, and in a recomputed forward."""
    sent = Sent()
    metric = torch.randn(5_000, generator=torch.Generator().manual_seed(rank))
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


# ---- blobs


@by_parameter
def test_blobs_by_choice(rank: int) -> None:
    own = dist.new_group(backend="gradwire")
    gw.register(blob=True, bits=8, group=own)
    assert own.settings.codec == gw.QSGD(bits=8)
    model, sent = DDP(mlp(), process_group=own), Sent(own)
    train(model, range(3))
    assert sent.calls == 3
    assert not own.models.handles
    assert 3 < sent.ratio < 4
    builtin = DDP(mlp(), process_group=own)
    builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    for said, call in (
        ("FP16_COMPRESS", lambda: builtin(batch(0))),
        ("give no model", lambda: gw.register(mlp(), blob=True)),
        ("gloo", lambda: gw.register(blob=True, group=gloo())),
        ("rank", lambda: gw.register(blob=True, bits=4 + rank % 2, group=own)),
    ):
        refuses(said, call)


@in_blobs
def test_hooks_of_ddp_are_compressed_too(rank: int) -> None:
    """A hook's all-reduce, in half precision and with a callback, is a blob as well; what is not
    finite reaches all ranks."""
    sent = Sent()
    model = DDP(mlp())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(model, range(3))
    assert sent.calls == 3
    assert same_everywhere(flat(model))
    model, x = DDP(mlp()), batch(0)
    if rank == 1:
        x[0, 0] = float("inf")
    model(x).square().mean().backward()
    assert not torch.isfinite(gradients(model)).all()


@in_blobs
def test_several_groups_at_once(rank: int) -> None:
    """Two modules over overlapping groups, in one backward."""
    size = dist.get_world_size()
    other = dist.new_group(list(range(size)), backend="gradwire")
    pair = dist.new_group([0, 1], backend="gradwire")
    wide = DDP(mlp(), process_group=other)
    loss = wide(batch(0)).square().mean()
    if rank < 2:
        narrow = DDP(mlp(), process_group=pair)
        loss = loss + narrow(batch(1)).square().mean()
    sent = Sent(other)
    loss.backward()
    assert sent.calls == 1
    assert same_everywhere(gradients(wide))
    if rank < 2:
        assert pair.stats()["calls"] == 1
    dist.barrier()


@in_blobs
def test_any_layout_is_reduced_in_place(rank: int) -> None:
    """A script's all-reduce in an autograd hook: averages, sums, and transposed tensors."""
    size = dist.get_world_size()
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


@by_parameter
@in_blobs
def test_the_group_is_of_the_backend(rank: int) -> None:
    warnings.simplefilter("ignore")  # from now on
    assert dist.get_backend() == "gradwire"


@by_parameter
def test_one_line_says_what_is_done(rank: int) -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("gradwire")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        own = dist.new_group(backend="gradwire")
        model = DDP(mlp(), process_group=own)
        train(model, range(2))
        dist.all_reduce(torch.ones(3), group=own)
        train(model, range(2))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    said = [line for line in lines if "passed on to torch" in line]
    assert len(said) == (rank == 0)
    if said:
        assert "DDP module Sequential: 2 of 6 parameters through qsgd" in said[0]
        assert "allgather 1, broadcast" in said[0]


# The last of its processes, since it destroys a group: DTensor takes meshes of the same ranks for
# the same mesh.
@over(ENVIRONMENT, ([in_ddp, sharded], "GRADWIRE_CODEC", "none"))
@over(
    BLOBS,
    ([in_ddp], "GRADWIRE_MIN_BYTES", "1000000"),
    ([in_ddp, sharded], "GRADWIRE_CODEC", "none"),
)
def test_all_goes_as_it_is(rank: int, wraps: list[Any], variable: str, value: str) -> None:
    with setting(**{variable: value}) as chosen:
        for wrap in wraps:
            sent, strayed = beside(wrap(mlp(), chosen), wrap(mlp(), gloo()), of=chosen)
            assert (sent.calls, strayed) == (0, 0)
        assert chosen.stats()["ratio"] == 1


@on(1, backend="gradwire", environment=ENVIRONMENT)
def test_alone(rank: int) -> None:
    """World size 1: nothing is sent, so nothing is compressed."""
    for wrap in (DDP, sharded):
        sent, strayed = beside(wrap(mlp()), mlp())
        assert sent.calls == 0
        assert strayed < 1e-5
