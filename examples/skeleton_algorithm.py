"""A complete algorithm to copy: a star, in which rank 0 sums for all ranks.

    python examples/skeleton_algorithm.py

To write your own, copy this file, rename the class, and change `build`. It lists the tasks of one
rank, in the order in which they are expected to become ready; the buffers determine the
dependencies. Then change `hop`, `wire_bytes`, `rounds` and `seconds` to match. A line in the
registry makes its name known to all options. tests/examples/test_skeleton_algorithm.py shows the
tests that an algorithm should pass; docs/reference/algorithms.md has the rules for all algorithms.
"""

from __future__ import annotations

from threading import Thread

import torch

from gradwire import Options, all_reduce
from gradwire.algorithms import REGISTRY, Sizes
from gradwire.algorithms.protocol import message
from gradwire.engine import Communicator, Graph
from gradwire.transport import Hub


class Star:
    """All ranks send their payloads to rank 0, which sums them and sends the encoded sum to all."""

    ROLES = ("contribution", "result")

    def chunks(self, world_size: int) -> int:
        return 1

    def rounds(self, world_size: int) -> int:
        return 2 if world_size > 1 else 0

    def build(self, rank: int, world_size: int, sizes: Sizes) -> Graph:
        graph = Graph(self.ROLES)
        for s in [s for s, (size,) in enumerate(sizes) if size and world_size > 1]:
            result = graph.buffer("result", s, 0, 0)
            peers = range(1, world_size)
            if rank == 0:
                gathered = [graph.buffer("contribution", s, 0, peer) for peer in peers]
                for contribution, peer in zip(gathered, peers, strict=True):
                    graph.recv(s, contribution, peer)
                graph.merge(s, gathered, [result], own=0, final=True)
                for peer in peers:
                    graph.send(s, result, peer)
            else:
                contribution = graph.buffer("contribution", s, 0, rank)
                graph.encode(s, [contribution])
                graph.send(s, contribution, peer=0)
                graph.recv(s, result, peer=0)
                graph.decode(s, [result])
        return graph

    def hop(self, role: str, chunk: int, sender: int, receiver: int, world_size: int) -> int:
        return self.ROLES.index(role)  # results come after contributions

    def wire_bytes(self, rank: int, world_size: int, sizes: Sizes) -> int:
        sent = world_size - 1 if rank == 0 else 1
        return sent * sum(message(size) for (size,) in sizes)

    def seconds(self, world_size: int, payload_bytes: float, alpha: float, beta: float) -> float:
        return self.rounds(world_size) * alpha + 2 * (world_size - 1) * payload_bytes * beta


REGISTRY["star"] = Star()


def main() -> None:
    """Average over four ranks, which are threads of this process."""
    hub = Hub(4)
    gradients = [torch.full((1000,), float(rank)) for rank in range(4)]

    def work(rank: int) -> None:
        comm = Communicator(hub.transport(rank))
        options = Options(algorithm="star")
        all_reduce(gradients[rank], "qsgd", bits=4, op="avg", group=comm, options=options)
        comm.close()

    threads = [Thread(target=work, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("averages by rank:", *(round(float(g.mean()), 3) for g in gradients))


if __name__ == "__main__":
    main()
