"""Replicas that meet every so many steps, and come and go: torchft tells which are there.

    torchft_lighthouse --min_replicas 1 &
    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    REPLICA=0 torchrun --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint localhost:0 \\
        examples/torchft_outer.py &
    REPLICA=1 torchrun ... examples/torchft_outer.py &

Each torchrun is a replica. End one of them, and the others go on; start it again, and it begins at
their outer weights. The handle gives it these, so torchft's own healing is off.
"""

import argparse
import os
from datetime import timedelta

import torch
from torchft import Manager, ProcessGroupGloo

import gradwire as gw

EVERY = 5


class Replicas:
    """Those of torchft's newest quorum, among which `outer` meets."""

    def __init__(self, outer):
        self.outer, self.group, self.joined = outer, ProcessGroupGloo(), None
        self.manager = Manager(
            self.group, None, None, min_replica_size=1, use_async_quorum=False, init_sync=False,
            replica_id=f"replica{os.environ['REPLICA']}", quorum_timeout=timedelta(hours=1),
        )  # fmt: skip

    def ask(self):
        """Wait until all replicas ask, and meet among those that have, from now on."""
        while True:
            self.manager.start_quorum(allow_heal=False)
            if not self.manager.errored() and self.group.parent is not self.joined:
                self.told(lambda: self.outer.recover(self.group.parent))
                self.joined = self.group.parent
            if not self.manager.errored():
                break
            self.manager.should_commit()  # no: the next quorum gets another group
        self.asked = self.taken()

    def meet(self, step):
        """Take the optimizer step whose meeting is due; go on with those that are left."""
        self.told(step)
        if not self.manager.should_commit():
            self.ask()

    def taken(self):
        """Optimizer steps: those of the others, after joining them."""
        return self.outer.stats()["optimizer_steps"]

    def told(self, call):
        """Call, and tell the manager if a replica is lost meanwhile."""
        try:
            call()
        except gw.TransportError as error:
            print(f"TransportError: {error}", flush=True)
            self.manager.report_error(error)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--replicas", type=int, default=1, help="that must be there at the end")
    parser.add_argument("--die", action="store_true", help="in a meeting of so many")
    args = parser.parse_args()

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(net.parameters())
    outer = gw.outer(net, optimizer, every=EVERY, codec="qsgd:bits=4")  # a replica alone, so far
    replicas = Replicas(outer)
    replicas.ask()

    while True:
        taken = replicas.taken()
        if taken >= args.steps and taken % EVERY == 0 and outer.world_size >= args.replicas:
            break
        due = taken % EVERY == EVERY - 1
        if due and replicas.asked != taken:  # one that joins has asked for the meeting at hand
            replicas.ask()
            continue
        if due and args.die and outer.world_size >= args.replicas:
            os._exit(1)
        optimizer.zero_grad()
        net(torch.randn(32, 64)).square().mean().backward()
        if due:
            replicas.meet(optimizer.step)
            print(f"step {replicas.taken()}: {outer.world_size} replicas", flush=True)
        else:
            optimizer.step()

    total = sum(float(values.double().sum()) for values in outer.outer_weights().values())
    print(f"ends with {total.hex()}", flush=True)
    replicas.manager.shutdown()


if __name__ == "__main__":
    main()
