"""Train with torchft: replica groups come and go, and what they exchange is compressed.

    torchft_lighthouse --min_replicas 1 --join_timeout_ms 1000 &
    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    REPLICA=0 torchrun --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint localhost:0 \\
        examples/torchft_ddp.py &
    REPLICA=1 torchrun ... examples/torchft_ddp.py &

Each torchrun is a replica group. End one of them, and the others go on; start it again, and it gets
the others' weights and joins.
"""

import argparse
import os
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

import gradwire as gw


class CompressedGloo(ProcessGroupGloo):
    """torchft's process group between replica groups, with all-reduces through a codec.

    Args:
        codec: an unbiased one, since nothing here feeds errors back, such as gw.QSGD(bits=4).
        smallest: number of values from which a tensor is compressed.
        timeout: of a collective.
    """

    def __init__(self, codec, smallest=4096, timeout=timedelta(seconds=60)):
        if codec.biased:
            raise ValueError(f"{codec} is biased: what it loses would be lost for good")
        super().__init__(timeout)
        self.codec, self.smallest = codec, smallest

    def allreduce(self, tensors, opts):
        (tensor,) = tensors
        # A sum: the manager divides.
        summed = getattr(opts, "reduceOp", opts) == dist.ReduceOp.SUM
        if summed and tensor.dtype == torch.float32 and tensor.numel() >= self.smallest:
            future = gw.all_reduce(tensor, self.codec, group=self.parent, async_op=True)
        else:
            future = super().allreduce(tensors, opts).get_future()
        return InFlight(future)


class InFlight(dist._Work):
    """An all-reduce whose errors are in its future alone: there the manager takes them."""

    def __init__(self, future):
        super().__init__()
        self.future = future

    def wait(self, timeout=None):
        with suppress(Exception):
            self.future.wait()
        return True

    def get_future(self):
        return self.future


class FaultTolerantDDP(DistributedDataParallel):
    """torchft's, whose hook in 0.2 ends the process where the manager has given up the step."""

    @staticmethod
    def _comm_hook(manager, bucket):
        work = manager.allreduce(bucket.buffer())
        work.wait()
        future = work.get_future()
        return getattr(future, "_fut", future)  # a step that was given up has a plain future


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--groups", type=int, default=1, help="that must be there at the end")
    parser.add_argument("--die", action="store_true", help="within a step of so many groups")
    args = parser.parse_args()

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))

    def save():
        return {"model": net.state_dict(), "optimizer": optimizer.state_dict()}

    def load(state):
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    group = CompressedGloo(gw.QSGD(bits=4))
    name = f"replica{os.environ['REPLICA']}"
    manager = Manager(group, load, save, min_replica_size=1, replica_id=name, max_retries=10)
    model = FaultTolerantDDP(manager, net)
    optimizer = Optimizer(manager, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))

    done = False
    while not done:
        before = manager.current_step()
        optimizer.zero_grad()  # asks which replica groups are there
        if args.die and manager.num_participants() >= args.groups:
            os._exit(1)
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()  # unless a group has failed within this step
        step, groups = manager.current_step(), manager.num_participants()
        print(f"step {step}: {groups} groups" if step > before else "discarded", flush=True)
        done = step > before and step >= args.steps and groups >= args.groups

    total = sum(float(p.detach().double().sum()) for p in net.parameters())
    print(f"ends with {total.hex()}", flush=True)
    manager.shutdown()


if __name__ == "__main__":
    main()
