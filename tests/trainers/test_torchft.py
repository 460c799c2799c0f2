"""Replica groups of the examples die in a step or a meeting; the others go on; they join again."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from trained import compressed, net

import gradwire as gw
from ranks import as_processes, refuses

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = EXAMPLES / "torchft_ddp.py"
DIES_JOINING = """
import os, runpy, torchft
torchft.ProcessGroupGloo.configure = lambda *_, **options: os._exit(1)
runpy.run_path({!r}, run_name="__main__")
"""


class Groups:
    """Replica groups of one process each, which run an example, and torchft's lighthouse."""

    def __init__(self, folder: Path, example: Path = EXAMPLE) -> None:
        from torchft.coordination import LighthouseServer

        self.folder, self.example = folder, str(example)
        self.lighthouse = LighthouseServer(
            bind="[::]:0", min_replicas=1, join_timeout_ms=2000, heartbeat_timeout_ms=1000
        )
        self.stores: list[dist.TCPStore] = []  # as torchrun's agent has them, which outlives ranks
        self.running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, replica: int, *options: str, joins: bool = True) -> None:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.stores.append(store)
        environment = {
            **os.environ, "TORCHFT_LIGHTHOUSE": self.lighthouse.address(),
            "REPLICA": str(replica), "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(store.port),
        }  # fmt: skip
        with open(self.folder / f"{replica}.txt", "ab") as told:
            self.running[replica] = subprocess.Popen(
                [sys.executable, *(
                    [self.example] if joins else ["-c", DIES_JOINING.format(self.example)]
                ), *options],
                env=environment, stdout=told, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def told(self, replica: int) -> str:
        return (self.folder / f"{replica}.txt").read_text(errors="replace")

    def end(self, replica: int) -> int:
        return self.running[replica].wait(120)

    def __enter__(self) -> Groups:
        return self

    def __exit__(self, *_: Any) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()
        self.lighthouse.shutdown()


needs_torchft = pytest.mark.skipif(find_spec("torchft") is None, reason="torchft is not installed")


@needs_torchft
def test_its_modules_and_groups_are_refused() -> None:
    import torchft

    model = torchft.DistributedDataParallel(None, torch.nn.Linear(4, 4))
    said = "is a process group of torchft, whose ranks come and"
    refuses(said, lambda: gw.attach(model))
    group = torchft.ProcessGroupGloo()
    refuses(said, lambda: gw.all_reduce(torch.ones(10), group=group))


@needs_torchft
@pytest.mark.multiprocess
def test_a_replica_group_dies_and_joins_again(tmp_path: Path) -> None:
    with Groups(tmp_path) as groups:
        options = "--groups", "3", "--steps", "5"
        for replica in range(3):
            groups.start(replica, *options, *(["--die"] if replica == 0 else []))
        assert groups.end(0) == 1
        groups.start(0, *options, joins=False)  # dies when the others have made room for it
        assert groups.end(0) == 1
        groups.start(0, *options)
        assert [groups.end(replica) for replica in range(3)] == [0, 0, 0], groups.told(1)
        told = [groups.told(replica) for replica in range(3)]
    assert len({re.findall(r"ends with (\S+)", text)[0] for text in told}) == 1  # the same weights
    with pytest.raises(ValueError, match="is biased"):
        runpy.run_path(str(EXAMPLE))["CompressedGloo"](gw.TopK())
    for text in told[1:]:
        assert "TransportError" in text  # gradwire's: the step in which one died
        assert "discarded" in text
    for text in told:
        assert re.findall(r"step \d+: (\d) groups", text)[-1] == "3"


@needs_torchft
@pytest.mark.multiprocess
def test_a_replica_is_lost_in_a_meeting_and_joins_again(tmp_path: Path) -> None:
    with Groups(tmp_path, EXAMPLES / "torchft_outer.py") as groups:
        options = "--replicas", "3", "--steps", "20"
        for replica in range(3):
            groups.start(replica, *options, *(["--die"] if replica == 0 else []))
        assert groups.end(0) == 1
        groups.start(0, *options, joins=False)  # dies when the others have made room for it
        assert groups.end(0) == 1
        groups.start(0, *options)
        assert [groups.end(replica) for replica in range(3)] == [0, 0, 0], groups.told(1)
        told = [groups.told(replica) for replica in range(3)]
    assert len({re.findall(r"ends with (\S+)", text)[0] for text in told}) == 1
    for text in told[1:]:
        assert "TransportError" in text  # the meeting in which one died
        assert re.findall(r"step \d+: (\d) replicas", text)[-1] == "3"
        assert "2 replicas" in text
        steps = [int(step) for step in re.findall(r"step (\d+): ", text)]
        assert steps == sorted(steps)


def averages_between_groups(rank: int, replica: int, lighthouse: str) -> torch.Tensor:
    """FSDP2 in a group of two ranks; its shards are averaged with the other group's."""
    import torchft

    example = runpy.run_path(str(EXAMPLE))
    model: torch.nn.Module = net()
    fully_shard(model)
    handle = gw.attach(model, "qsgd:bits=4", error_feedback=True)
    manager = torchft.Manager(
        example["CompressedGloo"](gw.QSGD(bits=8), smallest=1024), lambda _: None, dict,
        min_replica_size=2, replica_id=f"replica{replica}", lighthouse_addr=lighthouse,
        rank=rank, world_size=2, store_addr=os.environ["MASTER_ADDR"],
        store_port=int(os.environ["MASTER_PORT"]), init_sync=False,
    )  # fmt: skip
    model.set_all_reduce_hook(lambda shard: manager.allreduce(shard).wait())
    optimizer = torchft.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
    draw = torch.Generator().manual_seed(2 * replica + rank)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 64, generator=draw)).square().mean().backward()
        optimizer.step()
    assert manager.current_step() == 3
    assert manager.num_participants() == 2
    compressed(handle)
    whole = torch.cat([p.full_tensor().flatten() for p in model.parameters()])
    manager.shutdown()
    return whole.detach()


@needs_torchft
@pytest.mark.multiprocess
def test_attach_within_replica_groups() -> None:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=60000)
    with ThreadPoolExecutor(2) as pool:
        groups = [
            pool.submit(as_processes, 2, averages_between_groups, of, lighthouse.address())
            for of in range(2)
        ]
        first, *others = [weights for group in groups for weights in group.result()]
    lighthouse.shutdown()
    assert all(torch.equal(weights, first) for weights in others)
