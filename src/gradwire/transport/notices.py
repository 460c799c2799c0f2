"""Notices: through which ranks tell each other whom they hold responsible for a failure.

From every peer a small receive stands posted. A rank that fails, or waits unusually long, sends
its peers the number of the rank it waits for; one whose long wait ended well withdraws that.
Whoever then fails follows the notices from rank to rank to where the failure began.
"""

from __future__ import annotations

import threading
from datetime import timedelta

import torch
import torch.distributed as dist

_ARRIVAL = timedelta(seconds=1)  # of the rest of a notice whose beginning is there


class Notices:
    """The notices of one rank in one process group.

    Args:
        group: carries them, beside everything else.
        tag: of all notices; nothing else may use it.
    """

    def __init__(self, group: dist.ProcessGroup, tag: int) -> None:
        self.rank = group.rank()
        self._group = group
        self._tag = tag
        self._nobody = group.size()
        self._lock = threading.Lock()
        self._said: dict[int, int] = {}  # peer -> the rank it blames
        self._posted: dict[int, tuple[dist.Work, torch.Tensor]] = {}
        # gloo reads these for as long as it likes, so they live as long as we do.
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []
        for peer in range(group.size()):
            if peer != self.rank:
                self._post(peer)

    def _post(self, peer: int) -> None:
        notice = torch.zeros(8, dtype=torch.uint8)
        self._posted[peer] = self._group.recv([notice], peer, self._tag), notice

    def tell(self, blamed: int | None) -> None:
        """Tell every peer that can be reached whom we wait for; None withdraws it."""
        number = 1 + (self._nobody if blamed is None else blamed)
        notice = torch.tensor([number], dtype=torch.int64).view(torch.uint8)
        with self._lock:
            for peer in range(self._nobody):
                if peer in (self.rank, blamed):
                    continue
                try:
                    self._sent.append((self._group.send([notice], peer, self._tag), notice))
                except RuntimeError:
                    continue  # that peer is gone too; the ones that can be reached are being told

    def collect(self) -> None:
        """Take in what has arrived."""
        with self._lock:
            for peer in list(self._posted):
                while peer in self._posted and bool(self._posted[peer][1].any()):
                    work, notice = self._posted.pop(peer)
                    try:
                        work.wait(_ARRIVAL)
                        self._said[peer] = int(notice.view(torch.int64).item()) - 1
                        self._post(peer)
                    except RuntimeError:
                        break  # the connection is broken: nothing more will come from this peer

    def heard(self, peer: int, blamed: int) -> None:
        """`peer` holds `blamed` responsible, as it said in another way."""
        with self._lock:
            self._said[peer] = blamed

    def first_to_fail(self, peer: int) -> int:
        """Follow the notices from `peer` to the rank that blames nobody, or itself, or us."""
        self.collect()
        seen = {self.rank}
        while peer not in seen:
            seen.add(peer)
            blamed = self._said.get(peer, self._nobody)
            if blamed == self._nobody or blamed in seen:
                break
            peer = blamed
        return peer
