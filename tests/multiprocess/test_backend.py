"""The backend "gradwire" under real DDP and FSDP2 modules: by parameter, and in blob mode, where
tensors that a backward pass reduces are compressed without knowledge of parameters.

The training code is what it would be over gloo. A gloo group of the same ranks stands beside, to
compare with.
"""

from __future__ import annotations

import copy
import logging
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from small_models import Sent, gloo, group, mlp, setting, sharded, strayed
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
from training import Branches, batch, flat, same_everywhere, train

ENVIRONMENT = {"GRADWIRE_MIN_BYTES": "4000"}
BLOBS = {**ENVIRONMENT, "GRADWIRE_BLOB": "1"}


def over(environment: dict[str, str], *rows: Any) -> Any:
    """A test over the backend, on two ranks and more."""

    def marked(test: Any) -> Any:
        how: dict[str, Any] = {"backend": "gradwire", "environment": environment}
        return on(2, *rows, **how)(on(4, *rows, exhaustive=True, **how)(test))

    return marked


by_parameter, in_blobs = over(ENVIRONMENT), over(BLOBS)


# ---- what is found, and compressed


def is_blob() -> bool:
    return bool(group().settings.blob)


@by_parameter
@in_blobs
def test_ddp_modules_are_compressed(rank: int) -> None:
    sent = Sent()
    model, reference = DDP(mlp()), DDP(mlp(), process_group=gloo())
    train(model, range(4))
    assert sent.calls == 4
    assert sent.ratio > (6 if is_blob() else 2)  # small, since biases and norms are uncompressed
    assert same_everywhere(flat(model))
    train(reference, range(4))
    assert 0 < strayed(model, reference, mlp()) < 0.25


@by_parameter
def test_ddp_modules_are_compressed_by_parameter(rank: int) -> None:
    model, again = DDP(mlp()), copy.deepcopy(DDP(mlp()))
    train(model, range(4))
    handle = group().models.handles[model]
    codecs = {name: facts["codec"] for name, facts in handle.stats()["parameters"].items()}
    assert {name for name, codec in codecs.items() if codec != "dense"} == {"0.weight", "3.weight"}
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
        train(model, range(2 + 2 * dist.get_rank()))
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
    model, reference = DDP(mlp()), DDP(mlp(), process_group=gloo())
    found = []
    for wrapped in (model, reference):
        sent = Sent()
        with wrapped.no_sync():
            wrapped(batch(0)).square().mean().backward()
        assert sent.calls == 0
        wrapped(batch(1)).square().mean().backward()
        assert sent.calls == (wrapped is model)
        found.append(torch.cat([p.grad.reshape(-1) for p in wrapped.parameters()]))
    assert 0 < (found[0] - found[1]).norm() < 0.25 * found[1].norm()
    assert same_everywhere(found[0])


@in_blobs
def test_fsdp_scatters_blobs(rank: int) -> None:
    sent, model, reference = Sent(), sharded(mlp()), sharded(mlp(), gloo())
    assert torch.equal(flat(model), flat(mlp()))  # weights are gathered uncompressed
    train(model, range(4))
    assert sent.calls == 8  # two layers are large enough
    assert sent.ratio > 5.5
    train(reference, range(4))
    assert 0 < strayed(model, reference, mlp()) < 0.25


@by_parameter
@in_blobs
def test_fsdp_in_half_precision(rank: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model, sent = sharded(mlp(80), mp_policy=policy), Sent()
    train(model, range(3), clip=1.0)
    assert sent.calls >= 3 if is_blob() else sent.calls == 9
    assert torch.isfinite(flat(model)).all()


@by_parameter
@in_blobs
def test_hybrid_sharding_is_compressed_in_both_hops(rank: int) -> None:
    if dist.get_world_size() != 4:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model, reference = fully_shard(mlp(200), mesh=mesh), sharded(mlp(200), gloo())
    train(model, range(3))
    train(reference, range(3))
    sent = [mesh[name].get_group().stats() for name in ("replicas", "shards")]
    assert sorted(stats["calls"] for stats in sent) == ([3, 3] if is_blob() else [0, 6])
    if not is_blob():
        assert not any("reduce_scatter_single" in stats["left_alone"] for stats in sent)
    assert 0 < strayed(model, reference, mlp(200)) < 0.25


# ---- what is left alone


@by_parameter
def test_hooks_of_a_script_are_left_alone(rank: int) -> None:
    """torch's own, in Python and in C++: bit-identical to gloo."""

    def python(model: DDP) -> None:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)

    def builtin(model: DDP) -> None:
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)

    def attached(model: DDP) -> None:
        gw.attach(model, "identity")

    for way in (python, builtin, attached):
        sent = Sent()
        model, reference = DDP(mlp()), DDP(mlp(), process_group=gloo())
        for one in (model, reference):
            way(one)
            train(one, range(3))
        assert torch.equal(flat(model), flat(reference)), way.__name__
        assert sent.calls == 0


@by_parameter
def test_collectives_of_a_script_are_torchs(rank: int) -> None:
    """In a backward pass and outside: tensor parallelism, and reductions in tensor hooks."""
    rank, size, sent = dist.get_rank(), dist.get_world_size(), Sent()
    beside = gloo()
    made = {}
    for backend in (group(), beside):
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
        made[backend] = [x.grad, *(p.grad.to_local() for p in model.parameters())]
    for ours, torchs in zip(*made.values(), strict=True):
        assert torch.equal(ours, torchs)
    assert sent.calls == 0
    assert group().stats()["left_alone"]["allreduce"] > 0
    assert rank < size


@by_parameter
def test_sparse_gradients_are_left_alone(rank: int) -> None:
    sent, made = Sent(), []
    for backend in (group(), gloo()):
        torch.manual_seed(0)
        model = DDP(nn.EmbeddingBag(100, 30, sparse=True), process_group=backend)
        for step in range(3):
            at = torch.arange(6).view(2, 3) + dist.get_rank() + step
            model(at).square().sum().backward()
        made.append(model.module.weight.grad.to_dense())
    assert torch.equal(*made)
    assert sent.calls == 0


def in_ddp(model: nn.Module, of: Any) -> DDP:
    return DDP(model, process_group=of)


@by_parameter
def test_an_aggregator_is_named_like_a_codec(rank: int) -> None:
    with setting(GRADWIRE_CODEC="powersgd:rank=2") as chosen:
        named, attached = DDP(mlp(), process_group=chosen), DDP(mlp(), process_group=gloo())
        handle = gw.attach(attached, "powersgd:rank=2")
        train(named, range(3))
        train(attached, range(3))
        assert torch.equal(flat(named), flat(attached))
        assert chosen.stats()["wire_bytes"] == handle.stats()["wire_bytes"] > 0
        handle.detach()


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
    assert len(said) == (dist.get_rank() == 0)
    if said:
        assert "DDP module Sequential: 2 of 6 parameters through QSGD" in said[0]
        assert "allgather 1, broadcast" in said[0]


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
        ("rank", lambda: gw.register(blob=True, bits=4 + dist.get_rank() % 2, group=own)),
    ):
        refuses(said, call)


# ---- blobs


@in_blobs
def test_metrics_stay_exact(rank: int) -> None:
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


@in_blobs
def test_hooks_of_ddp_are_compressed_too(rank: int) -> None:
    """A hook's all-reduce, in half precision and with a callback, is a blob as well."""
    sent = Sent()
    model = DDP(mlp())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(model, range(3))
    assert sent.calls == 3
    assert same_everywhere(flat(model))


@in_blobs
def test_several_groups_at_once(rank: int) -> None:
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


@in_blobs
def test_non_finite_gradients_reach_every_rank(rank: int) -> None:
    model = DDP(mlp())
    x = batch(0)
    if dist.get_rank() == 1:
        x[0, 0] = float("inf")
    model(x).square().mean().backward()
    assert not all(torch.isfinite(p.grad).all() for p in model.parameters())


@in_blobs
def test_any_layout_is_reduced_in_place(rank: int) -> None:
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


# ---- what is registered


class Trainer(nn.Module):
    """A framework's module around the user's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.ones(30, 30))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) @ self.scale


@by_parameter
def test_a_registered_part_of_what_ddp_wraps(rank: int) -> None:
    bare = mlp()
    how = {"bits": 2, "error_feedback": True, "coalesce_bytes": 0}
    registration = gw.register(bare, codecs={"3.weight": "terngrad"}, **how)
    model = DDP(Trainer(bare))
    train(model, range(2))
    assert registration.handle is not None
    stats = registration.handle.stats()
    codecs = {name: p["codec"].split("(")[0] for name, p in stats["parameters"].items()}
    assert codecs.pop("inner.0.weight") == "QSGD"
    assert codecs.pop("inner.3.weight") == "TernGrad"
    assert set(codecs.values()) == {"dense"}
    assert stats["residual_bytes"] == 4 * (20 * 60 + 60 * 30)


@by_parameter
def test_wrong_use_is_named(rank: int) -> None:
    unlike = 4 + dist.get_rank() % 2
    for said, call in (
        ("gloo", lambda: gw.register(DDP(mlp(), process_group=gloo()))),
        ("gloo", lambda: gw.register(sharded(mlp(), gloo()))),
        ("algorithm", lambda: gw.register(sharded(mlp()), algorithm="ring")),
        ("coalesce_bytes", lambda: gw.register(sharded(mlp()), coalesce_bytes=0)),
        ("nobody", lambda: gw.register(mlp(), exclude=["nobody"])),
        ("nothing", lambda: gw.register(mlp(), "nothing")),
        ("0.weight", lambda: gw.register(DDP(mlp()), bits=unlike)),
        ("0.weight", lambda: gw.register(sharded(mlp()), bits=unlike)),
    ):
        refuses(said, call)


@by_parameter
def test_environments_that_differ_are_named(rank: int) -> None:
    rank = dist.get_rank()
    for wrong in (1, 0):  # the rank with an invalid value; every rank gets the error
        os.environ["GRADWIRE_MIN_BYTES"] = "many" if rank == wrong else "4000"
        refuses("GRADWIRE_MIN_BYTES='many'", lambda: dist.new_group(backend="gradwire"))
    os.environ["GRADWIRE_MIN_BYTES"] = str(4000 + rank)
    said = refuses("GRADWIRE_MIN_BYTES 4001", lambda: dist.new_group(backend="gradwire"))
    assert "rank 1" in said
    os.environ.update(ENVIRONMENT)


@by_parameter
def test_split_groups_are_of_the_backend(rank: int) -> None:
    """torch only splits groups of accelerators; the group's own method works on the CPU."""
    child = group().split_group([0, 1], group_name="a pair", group_desc="split")
    assert (child is None) == (dist.get_rank() > 1)
    if child is not None:
        assert (type(child), child.size(), child.group_name) == (type(group()), 2, "a pair")
        assert child.settings == group().settings
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


@by_parameter
@in_blobs
def test_the_group_is_of_the_backend(rank: int) -> None:
    warnings.simplefilter("ignore")  # from now on
    assert dist.get_backend() == "gradwire"


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
            model, reference = wrap(mlp(), chosen), wrap(mlp(), gloo())
            train(model, range(3))
            train(reference, range(3))
            assert torch.equal(flat(model), flat(reference))
        assert chosen.stats()["calls"] == 0
        assert chosen.stats()["ratio"] == 1


@on(1, backend="gradwire", environment=ENVIRONMENT)
def test_alone(rank: int) -> None:
    """World size 1: nothing is sent, so nothing is compressed."""
    for wrap in (DDP, sharded):
        model, reference = wrap(mlp()), mlp()
        train(model, range(3))
        train(reference, range(3))
        torch.testing.assert_close(flat(model), flat(reference))
    assert group().stats()["calls"] == 0


@on(4, environment=ENVIRONMENT)
def test_one_dimension_of_a_mesh(rank: int) -> None:
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
    sent = mesh["replicas"].get_group().stats()
    assert sent["calls"] == 3
    assert "allreduce" not in sent["left_alone"]
    assert 0 < strayed(model, reference, mlp(200)) < 0.25
