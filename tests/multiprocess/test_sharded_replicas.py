"""FSDP2 on meshes of two dimensions: with replicas (HSDP), whose hop is per parameter too; on
several machines; and with tensor parallelism."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from scenario import (
    ALL,
    MATRICES,
    OFTEN,
    Model,
    assert_as_asked,
    backward,
    batch,
    gathered,
    gradients,
    methods,
    model_of,
    own_mesh,
    prepared,
    replicas_of_shards,
    replicated,
    same,
    sharded,
    train,
    unlike,
    until_decided,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from gradwire.algorithms import HierarchicalReduceScatter
from gradwire.lang import layout
from ranks import on, refuses
from rooms.decide import tables
from training import alike, everywhere

pytestmark = on(4)


def test_shards_without_values_switch(rank: int) -> None:
    """No reduction tells the ranks of later shards which version the others have, and nothing is
    scattered to a single shard. Gradients are those of FSDP2, but for the order of sums."""
    for replicas in (1, 2, 4):
        mesh = replicated(replicas) if replicas > 1 else own_mesh()
        plain, ours = (fully_shard(nn.Linear(30, 1), mesh=mesh) for _ in range(2))
        plain.load_state_dict(ours.state_dict())
        handle = gw.attach(ours, "identity", include=["*"])
        versions = []
        for step in range(4):
            if step == 1:
                prepared(handle, codec="qsgd", bits=2)
            for model in (plain, ours):
                model.zero_grad()
                model(batch(step)).square().mean().backward()
            if step < 2:
                assert_as_asked(gradients(plain), gradients(ours), (), close=(1e-4, 1e-6))
            versions.append(handle.plan.version)
        assert versions == [0, 0, 1, 1], replicas


def test_a_policy_decides_for_all_replicas(rank: int) -> None:
    """From averages over all ranks; a failure on one rank leaves the plan in all replicas."""
    model = model_of("hsdp")
    how: dict[str, Any] = {"policy": OFTEN, "weights": "randomshift:bits=5"}
    handle: Any = gw.attach(model, "qsgd:bits=4", **how)
    summed: dict[str, torch.Tensor] = {}
    decided = handle._reductions.adaptation._window

    def window(kind: str) -> Any:
        made = decided(kind)
        if kind == "gradients" and not summed:
            summed.update(made.values)
        return made

    handle._reductions.adaptation._window = window
    until_decided(model, handle, 2, 1)
    chosen = [methods(handle), {p.name: str(p.weight) for p in handle.plan.parameters}]
    assert alike(chosen)
    assert len({chosen[0][name] for name in MATRICES}) > 1
    mine = [summed[name].tolist() for name in MATRICES]  # this rank's shards, in windows of all
    assert [of for i, of in enumerate(everywhere(mine)) if i % 2 == rank % 2] == [mine] * 2
    before, at = handle.plan.parameters, len(handle._reductions.adaptation.history)
    with pytest.MonkeyPatch.context() as monkey:
        if rank == 1:
            monkey.setattr(tables, "table", lambda *_: 1 / 0)
        until_decided(model, handle, at + 2, 1)
    assert handle.plan.parameters == before
    later = handle._reductions.adaptation.history[at:]
    assert all("the plan stays" in row["line"] for row in later)


def test_states_fit_the_mesh(rank: int) -> None:
    """In the same mesh resuming is bit-identical, from a rank's own state and from that of all; in
    another, residuals are refused."""
    how: dict[str, Any] = {"density": 0.1, "error_feedback": True}

    def made() -> tuple[Any, Any]:
        model = replicas_of_shards(2)
        return model, gw.attach(model, "topk", policy="lgreco", **how)

    model, handle = made()
    for step in range(2):
        backward(model, step, spare=True)
    state = copy.deepcopy(handle.state_dict())
    full, first = handle.full_state_dict(), handle.full_state_dict(rank0_only=True)
    assert [of["rank"] for of in full["ranks"]] == [0, 1, 2, 3]
    assert [of["rank"] for of in first.get("ranks", ())] == [0, 1, 2, 3] * (rank == 0)
    # On ranks 0 and 1 too, whose shards agree.
    unlike = partial(handle.full_state_dict, rank0_only=rank == 3)
    refuses("disagree on full_state_dict", unlike)
    went_on = [backward(model, step, spare=True) for step in (2, 3)]
    for saved in (state, full):
        again, resumed = made()
        resumed.load_state_dict(saved)
        for expected, step in zip(went_on, (2, 3), strict=True):
            for name, gradient in backward(again, step, spare=True).items():
                assert same(gradient, expected[name])
    del state["policy"]
    other = replicas_of_shards(1)
    flat = gw.attach(other, "topk", **how)
    ddp = gw.attach(DDP(Model()), "topk", **how)
    own = {key: value for key, value in ddp.state_dict().items() if key != "aggregators"}
    own = {**own, "rank": rank, "aggregators": state["aggregators"]}
    for said, into, changed in (
        ("4 ranks in 2 shards; this group has 4 in 4", flat, state),
        ("4 ranks in 2 shards; this group has 4 under DDP", ddp, state),
        ("4 ranks under DDP; this group has 4 in 2 shards", resumed, own),
        ("sharded in other dimensions", resumed, {**state, "dims": {"embedding": 1}}),
    ):
        refuses(said, partial(into.load_state_dict, changed))
    flat.load_state_dict({**state, "aggregators": {}})


# ---- several machines with several ranks each: gathered and scattered in two levels


MACHINES = {3: (0, 0, 1), 4: (0, 0, 1, 1), 5: (0, 1, 1, 0, 1)}


def attached(codec: str, nodes: Any, inside: str = "codec", keep: str | None = None) -> Any:
    model = sharded(mesh=own_mesh())
    two = {"algorithm": "hierarchical", "nodes": nodes, "inside": inside}
    options = gw.Options(**two if nodes is not None else {}, keep=keep)
    return model, gw.attach(model, codec, weights=ALL, options=options)


@on(4, ("full", "payload"))
@on(5, ("codec", "reference"), exhaustive=True)
@on(3, ("codec", "none"), exhaustive=True)
def test_two_levels_train_as_one(rank: int, inside: str, keep: str) -> None:
    nodes = MACHINES[dist.get_world_size()]
    flat, _ = attached("identity", None, keep=keep)
    model, handle = attached("identity", nodes, inside, keep)
    for name, weights in gathered(flat).items():
        assert torch.equal(weights, gathered(model)[name]), "payloads are forwarded"
    # Sums have another order, and 8-bit weights may fall into another code.
    assert train(model, 3) == pytest.approx(train(flat, 3), rel=1e-3)
    model, handle = attached("qsgd:bits=4", nodes, inside, keep)
    losses = train(model, 5)
    assert losses[-1] < 0.5 * losses[0], losses
    assert "hierarchical" in str(handle.plan.describe()[0])
    update = prepared(handle, codec="identity")
    for step in range(3):
        backward(model, step)
    assert update.in_force
    assert not unlike(gathered(model))


def test_only_what_crosses_is_compressed(rank: int) -> None:
    """Of shards that share a machine, with inside="full": sums within it are exact, in every
    micro-batch, and cross in the last one through the codec, for which ones have no error."""
    for inside in ("full", "codec"):
        model = fully_shard(nn.Linear(64, 32, bias=False), mesh=replicated(2))
        options = gw.Options(algorithm="hierarchical", inside=inside, nodes=(0, 0))
        handle = gw.attach(
            model, "qsgd:bits=4", options=options, weights={"*": "randomshift:bits=8"}
        )
        sent, crossed = [0], [0]
        for micro_batch in range(3):
            model.set_requires_all_reduce(micro_batch == 2)
            made = torch.Generator().manual_seed(micro_batch + 10 * (rank // 2))
            x = torch.randint(0, 256, (1, 64), generator=made) / 128
            model(2 - x if rank % 2 else x).sum().backward()  # of a machine: ones, on average
            stats = handle.stats()
            sent.append(stats["wire_bytes"] - sum(sent))
            crossed.append(stats["replicas_wire_bytes"])
        exact = torch.equal(gradients(model)["weight"], torch.full((16, 64), 3.0))
        assert exact == (inside == "full")
        shard = 16 * 64
        assert crossed[:3] == [0, 0, 0]
        assert shard / 2 < crossed[3] == sent[3] - sent[2] < 0.8 * shard
        assert sent[1] == sent[2]
        assert (sent[1] >= 4 * shard) == (inside == "full")
        handle.detach()


def test_bytes_are_those_of_the_formula(rank: int) -> None:
    nodes = MACHINES[4]
    model, handle = attached("qsgd:bits=4", nodes)
    backward(model, 0, spare=True)
    before = handle.stats()
    backward(model, 1, spare=True)
    after = handle.stats()

    def sent(algorithm: Any, codec_of: Any) -> int:
        """By the formula, of one collective for every group."""
        total = 0
        for group in handle._reductions._trained.shards():
            sizes = [
                sum(
                    layout(codec_of(name) or gw.codecs.Identity(), torch.float32).nbytes(lengths[r])
                    for name, lengths, _ in group
                )
                for r in range(4)
            ]
            total += algorithm(nodes=nodes).wire_bytes(rank, 4, [sizes])
        return total

    gradients = {p.name: p.codec for p in handle.plan.parameters}
    expected = sent(HierarchicalReduceScatter, gradients.get)
    found = int(after["wire_bytes"] - before["wire_bytes"])
    assert found == pytest.approx(expected, rel=0.1)  # segments have headers of their own


# ---- tensor parallelism in one dimension


COMPRESSED = {"embedding.weight", "up.weight", "down.weight", "frozen.weight", "spare.weight"}


class Parallel(nn.Module):
    """Tied weights, a frozen layer, an unused one, an excluded one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.excluded = nn.Linear(32, 32)
        self.spare = nn.Linear(32, 32)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.down(self.up(x).relu())
        return self.head(self.excluded(self.frozen(x)).tanh())


def parallel(mesh: DeviceMesh) -> Parallel:
    model = Parallel()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for module in (model.up, model.spare, model):
        fully_shard(module, mesh=mesh["dp"])
    return model


def of_tokens(model: nn.Module, mesh: DeviceMesh, step: int) -> dict[str, Any]:
    """The gradients of this rank's shards; ranks of one row have the same batch."""
    model.zero_grad()
    made = torch.Generator().manual_seed(10 * step + mesh["dp"].get_local_rank())
    tokens = torch.randint(0, 50, (4, 6), generator=made)
    model(tokens).square().mean().backward()
    return gradients(model)


@on(4, True)
@on(4, False, backend="gradwire")
def test_gradients_of_columns_are_exact_or_near(rank: int, attached: bool) -> None:
    names = {"mesh_dim_names": ("dp", "tp")}
    plainly = {"backend_override": {"dp": "gloo", "tp": "gloo"}}
    beside = init_device_mesh("cpu", (2, 2), **names, **plainly)
    mesh = beside if attached else init_device_mesh("cpu", (2, 2), **names)
    plain, ours = parallel(beside), parallel(mesh)
    how: dict[str, Any] = {"bits": 4, "exclude": ["excluded.*"]}
    handle = gw.attach(ours, **how) if attached else gw.register(ours, **how).handle
    assert handle is not None
    told = handle.stats()["parameters"]
    assert {name for name, facts in told.items() if facts["codec"] != "none"} == COMPRESSED
    for step in range(2):
        expected, found = of_tokens(plain, beside, step), of_tokens(ours, mesh, step)
        assert_as_asked(expected, found, COMPRESSED, near=0.2)
        assert expected["spare.weight"] is None
        assert expected["frozen.weight"] is None
    if not attached:
        group: Any = mesh["tp"].get_group()
        assert dist.get_backend(group) == "gradwire"
        assert group.stats()["calls"] == 0
        assert group.stats()["left_alone"], "tensor parallelism sent nothing"


def test_checkpoints_have_the_residuals_of_all_columns(rank: int, tmp_path: Path) -> None:
    """Each column of the mesh has a handle with a rank 0: none replaces another's residuals."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def made() -> tuple[Any, Any]:
        model = parallel(mesh)
        return model, gw.attach(model, "qsgd:bits=4", error_feedback=True)

    model, handle = made()
    of_tokens(model, mesh, 0)
    handle.save(tmp_path)
    _, resumed = made()
    resumed.load(tmp_path)
    saved, found = (h.state_dict()["aggregators"] for h in (handle, resumed))
    assert saved
    for name, kept in saved.items():
        assert torch.equal(found[name]["residual"], kept["residual"]), name
