"""Whether the weights of a sharded module have changed since they were gathered, agreed by all
ranks.

Each rank compares its own shards with a copy. Nothing else tells: weights are also changed through
`.data`, by torch's foreach functions, and by optimizers that are not torch's, which neither a hook
nor the version counter of a tensor sees. Ranks may differ: one may leave a step out. A rank that
gathers alone waits for its peers until the time-out, so ranks exchange one number before they rely
on it.

    1. outside backward, a gather asks if gradients were reduced since ranks last asked, or if its
       group was gathered since then: as a forward begins. Both are equal on all ranks.
    2. each rank tells whether its weights have changed; the largest number counts
    3. if one has changed, the weights have a new version

Within backward no rank asks: weights are those of forward.

Bytes sent per rank and question: one number, all-reduced. Memory: this rank's shards once more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch

from gradwire.integrations.backward import in_backward

_SAME, _CHANGED, _LOST = range(3)


class Changes:
    """The versions of the weights.

    Args:
        shards: this rank's, as an optimizer changes them.
        most: the largest of all ranks' numbers; collective.
        drop: called if a rank has not got from a loaded state what others have got.

    Attributes:
        version: equal on all ranks.
        asked: how often they asked.
    """

    def __init__(
        self,
        shards: Callable[[], Sequence[torch.Tensor]],
        most: Callable[[int, torch.device], int],
        drop: Callable[[], None],
    ) -> None:
        self.version = 0
        self.asked = 0
        self._shards, self._most, self._drop = shards, most, drop
        self._seen: list[torch.Tensor] | None = None  # as ranks last asked; None: not known
        self._changed = self._lost = False  # since a state was loaded
        self._digest: str | None = None  # of the shards as it was saved, until ranks ask
        self._reduced = False

    def reduced(self) -> None:
        """Called as gradients are reduced."""
        self._reduced = True

    def agreed(self, last: int, device: torch.device) -> int:
        """The version of the weights that a group gathers now.

        Args:
            last: `asked`, as the group was last gathered.
        """
        if not in_backward() and (self._reduced or last == self.asked):
            told = _LOST if self._lost else _CHANGED if self.changed else _SAME
            if self._seen is None or told != _SAME:
                self._seen = [shard.clone() for shard in self._shards()]
            most = self._most(told, device)
            if most == _LOST:
                self._drop()
            self.version += most != _SAME
            self._changed = self._lost = self._reduced = False
            self._digest = None
            self.asked += 1
        return self.version

    @property
    def changed(self) -> bool:
        """Whether this rank's weights have changed since ranks last asked."""
        if self._changed or self._seen is not None:
            return self._changed or not _equal(self._seen or (), self._shards())
        return self._digest is not None and self._digest != self.digest()

    def digest(self) -> str:
        """A digest of this rank's shards."""
        found = hashlib.blake2b(digest_size=16)
        for shard in self._shards():
            found.update(shard.contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
        return found.hexdigest()

    def loaded(self, changed: bool, lost: bool, digest: str | None) -> None:
        """A state was loaded, before the weights or after them.

        Args:
            changed: the weights had changed, as it was saved.
            lost: it has no gathered weights for this rank.
            digest: of this rank's shards then; None: they were others.
        """
        self._seen, self._lost, self._digest = None, lost, digest
        self._changed = changed or digest is None
        self._reduced = True


def _equal(before: Sequence[torch.Tensor], now: Sequence[torch.Tensor]) -> bool:
    """Whether tensors are the same in kind and values; what is not a number never is."""
    return len(before) == len(now) and all(
        (a.dtype, a.device) == (b.dtype, b.device) and torch.equal(a, b)
        for a, b in zip(before, now, strict=True)
    )
