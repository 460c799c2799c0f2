"""The lab: emulated machines on a slow network, all on this machine.

    from gradwire_tools.lab import Network, launch
    codes = launch(["python", "train.py"], nodes=4, net=Network.parse("1gbit,1ms"))

Read in this order: `network` and `schedule` (what is emulated), `links` (how), `supervisor` (the
process that owns it), `client` (the API), `run` (a command on every node). The user's page is
docs/laboratory/lab.md.
"""

from gradwire_tools.lab.client import Lab, NodeProcess, available
from gradwire_tools.lab.network import Network
from gradwire_tools.lab.run import launch, run_command
from gradwire_tools.lab.schedule import Schedule

__all__ = ["Lab", "Network", "NodeProcess", "Schedule", "available", "launch", "run_command"]
