"""The lab: emulated machines on a slow network, on this one.

    from gradwire.lab import Network, launch
    codes = launch(["python", "train.py"], nodes=4, net=Network.parse("1gbit,1ms"))

Read in this order: `network` (what is emulated), `links` (how), `supervisor` (who holds it),
`client` (the handle on it), `run` (a command on every node). docs/reference/lab.md tells the same
to users.
"""

from gradwire.lab.client import Lab, NodeProcess, available
from gradwire.lab.network import Network
from gradwire.lab.run import launch, run_command

__all__ = ["Lab", "Network", "NodeProcess", "available", "launch", "run_command"]
