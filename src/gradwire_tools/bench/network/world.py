"""The ranks of a benchmark: started here on the lab's nodes, or by torchrun already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from gradwire.errors import ConfigError, TransportError
from gradwire_tools.lab import Network, available


@dataclass(frozen=True)
class World:
    """
    Attributes:
        network: between the nodes of ranks that are started here.
        joins: whether this process is one of the ranks, which torchrun has started.
        per_node: ranks on each node.
    """

    count: int
    network: Network
    joins: bool = False
    per_node: int = 1

    @classmethod
    def here(cls, count: int, net: str, per_node: int = 1) -> World:
        """Ranks that are started here.

        Args:
            net: RATE,LATENCY between nodes, or none.

        Raises:
            ConfigError: fewer than two ranks, nodes that do not share them evenly, or an impossible
                network.
        """
        network = Network.parse(net)
        several(count)
        if per_node < 1 or count % per_node:
            raise ConfigError(
                f"--per-node {per_node}: give a number that divides the {count} ranks"
            )
        if network.shaped and count == per_node:
            raise ConfigError(
                f"--per-node {per_node}: all ranks share one machine, so nothing crosses "
                f"--net {net}; use --net none, or more ranks"
            )
        emulable(network)
        return cls(count, network, per_node=per_node)

    @classmethod
    def of(cls, wanted: int | None, net: str, environment: Mapping[str, str]) -> World:
        """As many as torchrun has started, else as wanted; None is 2, or those of torchrun.

        Raises:
            ConfigError: as `here`, or other than torchrun's.
        """
        started = started_by_torchrun(environment)
        if started == 1:
            return cls.here(2 if wanted is None else wanted, net)
        if wanted not in (None, started):
            raise ConfigError(
                f"--ranks {wanted}: torchrun has started {started} ranks; leave it out"
            )
        network = Network.parse(net)
        if network.shaped:
            raise ConfigError(
                f"--net {net}: under torchrun the network between its ranks is measured; "
                "leave it out"
            )
        return cls(started, network, joins=True)

    @property
    def nodes(self) -> int:
        """The machines of ranks that are started here."""
        return self.count // self.per_node

    @property
    def keys(self) -> dict[str, object]:
        """What rows say of it."""
        return {"ranks": self.count, "net": "as it is" if self.joins else str(self.network)}

    @contextmanager
    def joined(self) -> Iterator[None]:
        """As one of torchrun's ranks, with a default group over gloo.

        Raises:
            TransportError: the others cannot be reached.
        """
        import torch.distributed as dist

        try:
            dist.init_process_group("gloo")
        except (ValueError, RuntimeError) as error:
            raise TransportError(
                f"cannot join the {self.count} ranks given by RANK and WORLD_SIZE: "
                f"{str(error).splitlines()[0]}; unset them to measure this machine"
            ) from error
        yield
        dist.barrier()
        dist.destroy_process_group()


def started_by_torchrun(environment: Mapping[str, str]) -> int:
    """How many ranks; 1 without torchrun.

    Raises:
        ConfigError: WORLD_SIZE is no number.
    """
    world_size = environment.get("WORLD_SIZE", "1") if "RANK" in environment else "1"
    if not world_size.isdecimal():
        raise ConfigError(f"the environment has WORLD_SIZE={world_size!r}: unset it, or RANK")
    return max(1, int(world_size))


def several(ranks: int, option: str = "") -> None:
    """Refuse fewer than two ranks, by a ConfigError that names the option."""
    if ranks < 2:
        named = option or f"--ranks {ranks}"
        raise ConfigError(f"{named}: one rank sends nothing; use 2 ranks or more")


def emulable(*networks: Network, instead: str = "use --net none") -> None:
    """Refuse networks that the lab would have to emulate where it cannot, by a ConfigError."""
    if any(network.shaped for network in networks) and (reason := available()) is not None:
        raise ConfigError(f"this machine cannot emulate a network ({reason}); {instead}")
