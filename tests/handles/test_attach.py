"""`gw.attach` on real DDP modules over gloo. One start of processes serves many scenarios."""

from __future__ import annotations

import copy
import inspect
import io
import resource
import threading
import warnings
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import gradwire as gw
from ranks import on, refuses
from training import Acts, backward, batch, everywhere, flat, gradients, same_everywhere, train

pytestmark = [pytest.mark.multiprocess, on(2), on(3, exhaustive=True)]


def mlp(width: int = 40) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.LayerNorm(width), nn.Linear(width, 3))


class Shortened(nn.Module):
    """Its first layer, whose gradient comes last, is unused in some steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(20, 20), nn.Linear(20, 20)
        self.third = nn.Linear(20, 20)

    def forward(self, x: torch.Tensor, whole: bool) -> torch.Tensor:
        return self.third(self.second(self.first(x) if whole else x))


def plain(build: Callable[[], nn.Module], steps: range) -> torch.Tensor:
    """Weights that DDP gives."""
    model = DDP(build())
    train(model, steps)
    return flat(model)


def as_plain(model: DDP, build: Callable[[], nn.Module], **arguments: Any) -> gw.Handle:
    """Train an attached module, uncompressed unless `arguments` say another codec: it is that of
    plain DDP, on all ranks alike."""
    handle = gw.attach(model, **{"codec": None, **arguments})
    train(model, range(4))
    found, expected = flat(model), plain(build, range(4))
    assert same_everywhere(found)
    if "bits" in arguments:
        assert 0 < (found - expected).abs().max() < 0.02
    else:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    return handle


# ---- scenarios: each runs on every rank, within one process group


def test_training_is_that_of_plain_ddp(rank: int) -> None:
    as_plain(DDP(mlp()), mlp)
    as_plain(DDP(nn.LayerNorm(20)), lambda: nn.LayerNorm(20), codec="qsgd")  # nothing to compress
    as_plain(DDP(mlp(), static_graph=True), mlp, codec="qsgd", bits=8)
    stats = as_plain(DDP(mlp()), mlp, codec="qsgd", bits=8).stats()
    assert stats["steps"] == 4
    assert stats["wire_bytes"] > 0
    assert stats["parameters"]["0.weight"]["ratio"] > 3
    assert stats["parameters"]["0.bias"]["codec"] == "none"


class TwoDtypes(nn.Module):
    """In one bucket each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last, self.first = nn.Linear(40, 100).bfloat16(), nn.Linear(20, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).bfloat16()).float()


def test_static_graph_of_several_buckets(rank: int) -> None:
    """DDP gives each bucket of its first pass index 0, and is_last() False."""
    for coalesce_bytes in (0, 5000, 1 << 18):  # the first has 3360 bytes, the last 8200
        model, reference = DDP(TwoDtypes(), static_graph=True), DDP(TwoDtypes(), static_graph=True)
        handle = gw.attach(model, codec=None, options=gw.Options(coalesce_bytes=coalesce_bytes))
        for step in range(2):
            for of in (model, reference):
                of(batch(step)).square().mean().backward()
            for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                assert same_everywhere(p.grad)
                torch.testing.assert_close(p.grad, q.grad, rtol=0.02, atol=1e-4)  # bf16
            assert handle.stats()["steps"] == step + 1


def test_skipped_parameters_are_fine(rank: int) -> None:
    """DDP skips a bucket of parameters that no rank has used, even the last one."""
    if "skip_all_reduce_unused_params" not in inspect.signature(DDP).parameters:
        return  # torch below 2.7
    each: dict[str, Any] = {"bucket_cap_mb": 1e-3, "find_unused_parameters": True}
    model = DDP(Shortened(), skip_all_reduce_unused_params=True, **each)
    handle = gw.attach(model, codec=None)
    reference = DDP(Shortened(), **each)
    for step in range(5):  # DDP rebuilds its buckets after the first; all are used until then
        for of in (model, reference):
            of.zero_grad()
            of(batch(step), step < 2).square().mean().backward()
        assert (model.module.first.weight.grad is None) == (step >= 2)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad)
    assert handle.stats()["steps"] == 5


def test_several_modules_keep_apart(rank: int) -> None:
    first, second, bare = DDP(mlp()), DDP(mlp(56)), DDP(mlp())
    one, two = gw.attach(first, bits=4), gw.attach(second, bits=8, options=gw.Options(seed=3))
    train(bare, range(2))  # law 9: what is not attached is not touched
    assert torch.equal(flat(bare), plain(mlp, range(2)))
    both = list(first.parameters()) + list(second.parameters())
    for step in range(3):
        for p in both:
            p.grad = None
        x = batch(step)
        (first(x).square().mean() + second(x).square().mean()).backward()
    assert one.stats()["steps"] == two.stats()["steps"] == 3
    assert same_everywhere(gradients(first))
    assert same_everywhere(gradients(second))


def test_handles_draw_numbers_of_their_own(rank: int) -> None:
    model, drawn = DDP(mlp()), []
    for _ in range(3):
        handle = gw.attach(model, bits=2)
        backward(model, batch(0))
        drawn.append(gradients(model))
        handle.detach()
    assert all(map(same_everywhere, drawn))
    assert not any(torch.equal(a, b) for a, b in combinations(drawn, 2))


def test_many_codecs_cost_no_more_kernel_calls(rank: int) -> None:
    def calls(bits: list[int], target: str) -> int:
        """The result of two steps, once DDP has rebuilt its buckets."""
        torch.manual_seed(0)
        model = DDP(nn.Sequential(*(nn.Linear(20, 20) for _ in bits)))
        codecs = {f"{n}.weight": gw.QSGD(bits=b) for n, b in enumerate(bits)}
        handle = gw.attach(model, codecs=codecs, options=gw.Options(target=target))
        train(model, range(2))
        before = handle.stats()["kernel_calls"]
        train(model, range(2, 4))
        assert same_everywhere(flat(model))
        return int(handle.stats()["kernel_calls"] - before)

    one, many = (calls(bits, "c") for bits in ([4] * 6, [2, 4, 8] * 2))
    assert many == one > 0
    assert calls([2, 4, 8] * 2, "eager") > one


class Mixed(nn.Module):
    """Parameters of four dtypes, two of which codecs support."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(20, 30)
        self.turn = nn.Parameter(torch.randn(30, dtype=torch.complex64))
        self.narrow = nn.Linear(30, 30).bfloat16()
        self.wide = nn.ModuleList(nn.Linear(30, 30).double() for _ in range(3))
        self.last = nn.Linear(30, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.narrow((self.first(x) * self.turn).abs().bfloat16()).double()
        for layer in self.wide:
            x = layer(x)
        return self.last(x.float())


def test_other_dtypes_go_as_they_are(rank: int) -> None:
    """Next to compressed parameters, in any bucketing."""
    for megabytes, coalesce_bytes in ((25, 1 << 18), (0.0001, 0), (0.0001, 1 << 30), (0.002, 4000)):
        reference = DDP(Mixed(), bucket_cap_mb=megabytes)
        model = DDP(Mixed(), bucket_cap_mb=megabytes)
        handle = gw.attach(model, codec=None, options=gw.Options(coalesce_bytes=coalesce_bytes))
        for step in range(3):
            x = batch(step)
            for each in (reference, model):
                backward(each, x)
            pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
            for (name, p), q in pairs:
                loose = {"rtol": 1e-2, "atol": 1e-3} if "narrow" in name else {}
                torch.testing.assert_close(p.grad, q.grad, **loose)
        assert handle.stats()["steps"] == 3
        handle.detach()  # then too
        backward(model, batch(2))
        torch.testing.assert_close(model.module.turn.grad, reference.module.turn.grad)

    model = DDP(Mixed(), bucket_cap_mb=0.002)
    handle = gw.attach(model, bits=8, error_feedback=True)
    train(model, range(3))
    for p in model.parameters():
        assert same_everywhere(p.detach())
    stats = handle.stats()
    told = stats["parameters"]["wide.0.weight"]
    assert told["codec"] == "none"
    assert (told["payload_bytes"], told["ratio"]) == (7200, 1)
    assert stats["parameters"]["first.weight"]["ratio"] > 3
    raw = sum(p.numel * p.dtype.itemsize for p in handle.plan.parameters if p.how == "dense")
    sent = everywhere(stats["wire_bytes"])
    assert sum(sent) > 3 * 2 * (len(sent) - 1) * raw
    state = handle.state_dict()
    assert state["steps"]["turn"] == 3
    handle.load_state_dict(state)
    train(model, range(3, 5))

    told = refuses("", lambda: gw.attach(DDP(Mixed()), include=["turn"]))
    assert "turn" in told
    assert "complex64" in told


def test_plans_that_differ_are_named(rank: int) -> None:
    refuses("0.weight", lambda: gw.attach(DDP(mlp()), bits=4 if rank else 2))
    refuses(f"{10 + rank} x", lambda: gw.all_reduce(torch.zeros(10 + rank)))


def test_bucketing_changes_nothing(rank: int) -> None:
    """Nor does it change a bit whether buckets below a threshold are combined."""
    trained, collectives = [], []
    ways = ((0.0001, 1 << 18), (0.002, 1 << 18), (0.02, 0), (0.02, 1 << 30), (25, 1 << 18))
    for megabytes, coalesce_bytes in ways:
        model = DDP(mlp(2000), bucket_cap_mb=megabytes)
        handle = gw.attach(model, bits=4, options=gw.Options(coalesce_bytes=coalesce_bytes))
        train(model, range(4))
        trained.append(flat(model))
        collectives.append(handle._reductions.owner.core.issued)
        handle.detach()
    assert all(torch.equal(trained[0], other) for other in trained)
    assert collectives[3] == 4 < collectives[2], collectives


class Pieces(nn.Module):
    """Whose backward pass is several of autograd's: recomputed in pieces, or of several losses."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> Any:
        if not self.reentrant:
            return [layer(x) for layer in self.layers]
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def test_backward_in_pieces(rank: int) -> None:
    for reentrant in (True, False):
        results = []
        for compressed in (False, True):
            model = DDP(Pieces(reentrant), bucket_cap_mb=0.001)
            if compressed:
                gw.attach(model, codec=None, options=gw.Options(coalesce_bytes=1 << 30))
            for step in range(3):
                model.zero_grad()
                out = model(batch(step).requires_grad_())
                for piece in reversed(out) if isinstance(out, list) else [out]:
                    piece.square().mean().backward()
            results.append(gradients(model))
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)
        assert same_everywhere(results[1])


def test_copies_are_plain_modules(rank: int) -> None:
    model = DDP(mlp())
    refuses("bits=9", lambda: gw.attach(model, bits=9))
    handle = gw.attach(model, bits=4)
    train(model, range(1))
    for attached in (True, False):
        if not attached:
            handle.detach()
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        copies = [
            copy.deepcopy(model),
            torch.load(saved, weights_only=False),
            AveragedModel(model).module,
        ]
        for other in copies:
            bare = copy.deepcopy(other.module)
            train(other, range(1, 3))
            assert torch.equal(flat(other), plain(lambda bare=bare: bare, range(1, 3)))
            own = gw.attach(copy.deepcopy(other), bits=4)
            assert own.stats()["steps"] == 0
    assert handle.stats()["steps"] == 1


def test_what_ddp_synchronises_is_planned(rank: int) -> None:
    def trained(attach: bool, **arguments: Any) -> torch.Tensor:
        module = mlp()
        module[2].weight.requires_grad_(False)  # before wrapping: DDP ignores it
        model = DDP(module, **arguments)
        module[0].weight.requires_grad_(False)  # after wrapping: it stays in its bucket
        if attach:
            handle = gw.attach(model, codec=None)
            names = [p.name for p in handle.plan.parameters]
            assert names == ["0.weight", "0.bias", "2.bias", "3.weight", "3.bias"]
        train(model, range(3))
        return flat(model)

    for arguments in ({"find_unused_parameters": True}, {"static_graph": True}):
        torch.testing.assert_close(
            trained(True, **arguments), trained(False, **arguments), rtol=1e-5, atol=1e-6
        )

    model = DDP(mlp())
    model.module[3] = nn.Linear(40, 5)
    refuses("[(3,), (3, 40)]", lambda: gw.attach(model))

    model = DDP(mlp())
    handle = gw.attach(model)
    del handle._reductions._by_parameter[model.module[3].weight]
    refuses("(3, 40)", lambda: train(model, range(1)))


def test_uneven_inputs_join(rank: int) -> None:
    def joined(attach: bool) -> torch.Tensor:
        model = DDP(mlp(), bucket_cap_mb=0.001)
        if attach:
            gw.attach(model, codec=None)
        with model.join():
            train(model, range(2 + 2 * rank))
        return flat(model)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, expected = joined(True), joined(False)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert same_everywhere(found)

    model = DDP(mlp())
    handle = gw.attach(model, bits=2, error_feedback=True)
    with model.join():
        train(model, range(4 - rank))
    assert handle.stats()["steps"] == 4
    assert same_everywhere(flat(model))


def test_memory_stays_flat(rank: int) -> None:
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(20, 2000), nn.Linear(2000, 100)), bucket_cap_mb=0.2)
    handle = gw.attach(model, bits=4)
    train(model, range(15))
    gradient_bytes = 4 * sum(p.numel() for p in model.parameters())
    # DDP's first bucket has the whole model; messages in flight take at most half of its bytes.
    # How many buckets that is depends on the scheduler, so the peak may come late.
    assert handle.stats()["peak_extra_bytes"] <= gradient_bytes / 2


def test_averaging_overlaps_with_backward(rank: int) -> None:
    """The last layer's bucket is averaged while the first layer's gradient is not yet computed."""
    layers, averaged = Acts(), threading.Event()
    model = DDP(layers, bucket_cap_mb=0.02)
    handle = gw.attach(model, bits=4)
    train(model, range(2))  # DDP rebuilds its buckets after the first iteration
    reduce = handle._reductions.reduce

    def waits() -> None:
        assert averaged.wait(60), "no bucket is averaged before backward ends"

    def spied(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = reduce(bucket)
        future.add_done_callback(lambda _: averaged.set())
        return future

    handle._reductions.reduce, layers.between = spied, waits
    train(model, range(2, 3))


@pytest.mark.timing
@on(2)
def test_two_thousand_steps_leave_memory_flat(rank: int) -> None:
    model = DDP(mlp())
    handle = gw.attach(model, bits=4, error_feedback=True)
    train(model, range(200))
    early, resident = handle.stats()["peak_extra_bytes"], resident_bytes()
    train(model, range(200, 2000))
    assert handle.stats()["peak_extra_bytes"] <= 2 * early
    assert resident_bytes() - resident < 8 << 20


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@on(1)
def test_alone_sharded_or_plain(rank: int) -> None:
    """The same calls, whatever wraps the module; `ratio` can be formatted."""

    for wrap in (DDP, fully_shard, nn.Module.train):
        model = wrap(mlp())
        handle = gw.attach(model, "qsgd", bits=4, error_feedback=True)
        train(model, range(2))
        update = handle.update(bits=3)
        update.wait()
        train(model, range(2, 4))
        assert update.in_force
        assert torch.equal(flat(model), plain(mlp, range(4)))
        stats = handle.stats()
        assert (stats["steps"], stats["wire_bytes"], f"{stats['ratio']:.1f}") == (4, 0, "1.0")
        assert f"{stats.get('weights_ratio', 1):.1f}" == "1.0"
        assert handle.metrics(every=1).keys() == {"exposed_seconds", "ratio", "bits_per_value"}
        assert (handle.metrics()["ratio"], handle.metrics()["bits_per_value"]) == (1, 32)
        assert "one rank sends nothing" in str(handle)
        assert stats["residual_bytes"] == 0
        state = handle.full_state_dict(rank0_only=True)
        assert state["world_size"] == 1
        handle.load_state_dict(state)
        handle.detach()
        train(model, range(4, 5))
        assert torch.equal(flat(model), plain(mlp, range(5)))
