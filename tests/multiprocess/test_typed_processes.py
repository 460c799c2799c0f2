"""Every verb between processes, over gloo and shared memory, compared with torch's own."""

from __future__ import annotations

from datetime import timedelta
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

import gradwire as gw
from gradwire import ConfigError
from ranks import caught, on
from stress.worlds import of_transport
from training import everywhere
from typed_values import EVERY_DTYPE, same_bits, values

NUMEL = 3001
OVER = {shm: {"environment": of_transport(shm)} for shm in (False, True)}  # gloo, shared memory


@on(2, **OVER[False])
@on(3, **OVER[True])
@on(2, exhaustive=True, **OVER[True])
@on(3, exhaustive=True, **OVER[False])
def test_every_verb_beside_torch(rank: int) -> None:
    n = dist.get_world_size()
    made = torch.Generator().manual_seed(1000 * n + rank)

    ops = {"float32": "sum", "float64": "min", "int64": "max", "uint8": "sum"}
    for dtype, op in ((getattr(torch, name), op) for name, op in ops.items()):
        torchs, own = getattr(dist.ReduceOp, op.upper()), values(NUMEL, dtype, made)
        expected = own.clone()
        dist.all_reduce(expected, torchs)
        for algorithm in ("sra", "ring", "tree"):
            reduced = own.clone()
            gw.all_reduce(reduced, None, op=op, algorithm=algorithm)
            torch.testing.assert_close(reduced, expected)

        given = values(n * NUMEL, dtype, made)
        shard, expected = torch.empty(2, NUMEL, dtype=dtype)
        gw.reduce_scatter(shard, given, None, op=op)
        dist.reduce_scatter_tensor(expected, given.clone(), torchs)
        torch.testing.assert_close(shard, expected)

    for dtype in EVERY_DTYPE:
        own = values(NUMEL, dtype, made)
        whole = torch.empty(n * NUMEL, dtype=dtype)
        gw.all_gather(whole, own, None)
        # torch over gloo supports fewer dtypes: compare bytes
        gathered = torch.empty(n * NUMEL * dtype.itemsize, dtype=torch.uint8)
        dist.all_gather_into_tensor(gathered, own.view(torch.uint8))
        assert same_bits(whole.view(torch.uint8), gathered), dtype

        for root, algorithm in enumerate(("sra", "tree", "sra")[:n]):
            sent, expected = own.clone(), own.clone().view(torch.uint8)
            gw.broadcast(sent, root, algorithm=algorithm)
            dist.broadcast(expected, root)
            assert same_bits(sent.view(torch.uint8), expected), (dtype, root)

    for codec in ("qsgd", "dgc"):  # the length of DGC's payload depends on data
        sent = values(NUMEL, torch.float32, made)
        before, expected = sent.clone(), sent.clone()
        gw.broadcast(sent, n - 1, codec)
        dist.broadcast(expected, n - 1)
        everyone = [torch.empty(NUMEL) for _ in range(n)]
        dist.all_gather(everyone, sent)
        assert all(same_bits(other, sent) for other in everyone)
        assert float((sent - expected).square().sum()) < float(expected.square().sum())
        assert not torch.equal(sent, before)


@on(3, **OVER[True])
@on(3, exhaustive=True, **OVER[False])
def test_another_root_is_told(rank: int) -> None:
    """Rank 1 gives another root, in a broadcast that all have agreed on before, like the first.

    It is told before the groups' timeout. A rank whose call has all its inputs may return; its next
    call raises the error.
    """
    for algorithm, numel in product(("sra", "tree"), (4, 300_000)):
        group = dist.new_group(timeout=timedelta(seconds=100))
        how: dict[str, Any] = {"algorithm": algorithm, "group": group}
        tensor = torch.full((numel,), float(rank))
        for root in (0, 1):
            gw.broadcast(tensor, root, **how)
        dist.barrier()
        first = caught(lambda: gw.broadcast(tensor, int(rank == 1), **how))  # noqa: B023
        second = caught(lambda: gw.broadcast(tensor, **how))  # noqa: B023
        every = everywhere(None if first is None else str(first))
        case = f"{algorithm}, {numel} values: {every}"
        assert any(every), case
        assert isinstance(second, ConfigError), case
        assert first is None or isinstance(first, ConfigError), case
        assert all(said in str(second) for said in ("root=0", "root=1")), case
