"""Whether the weights of a sharded module have changed since they were gathered, agreed by all
ranks.

Each rank compares its own shards with a copy. Nothing else tells: weights are also changed through
`.data`, by torch's foreach functions, and by optimizers that are not torch's, which neither a hook
nor the version counter of a tensor sees. Ranks may differ: one may leave a step out. A rank that
gathers alone waits for its peers until the time-out, so ranks exchange one number before they rely
on it.

Groups of parameters none of which is trained (adapters, LoRA) change apart from the others: what is
kept of them stays good when an optimizer has stepped.

    1. outside backward, a gather asks unless it is of the forward in which ranks last asked. Within
       that one, too, if its group was gathered since then, or gradients were reduced. All of this
       is equal on all ranks: forwards that gather nothing, which some ranks may run, do not count.
    2. each rank tells whether its weights have changed; the largest number counts
    3. if one has changed, the weights have a new version, and frozen ones if one of these has

Within backward no rank asks: weights are those of forward.

Bytes sent per rank and question: one number, all-reduced. Memory: this rank's shards once more.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from gradwire.handles.backward import in_backward

_SAME, _CHANGED, _FROZEN, _LOST = range(4)  # nothing; trained weights; frozen ones, too


class Changes:
    """The versions of the weights.

    Args:
        shards: this rank's, as an optimizer changes them: frozen ones, others.
        most: the largest of all ranks' numbers; collective.
        drop: called if a rank has not got from a loaded state what others have got.

    Attributes:
        version: equal on all ranks.
        frozen: the version in which frozen weights last changed.
    """

    def __init__(
        self,
        shards: Callable[[], Sequence[Sequence[torch.Tensor]]],
        most: Callable[[int, torch.device], int],
        drop: Callable[[], None],
    ) -> None:
        self.version = self.frozen = 0
        self._shards, self._most, self._drop = shards, most, drop
        self._seen: list[list[torch.Tensor]] | None = None  # as ranks last asked; None: not known
        self._least = _SAME  # to tell, since a state was loaded
        self._digest: str | None = None  # of the shards as it was saved, until ranks ask
        self._reduced = False
        self._forward: object | None = None  # in which ranks last asked
        self._gathered: set[object] = set()  # groups, since then

    def reduced(self) -> None:
        """Called as gradients are reduced."""
        self._reduced = True

    def interrupted(self) -> None:
        """Called as an exception ends a forward: FSDP2 takes the next one for a part of it."""
        self._forward = None

    def agreed(
        self, group: object, device: torch.device, frozen: bool, forward: object | None
    ) -> int:
        """The version that a group must have been gathered in, if it is not gathered now.

        Args:
            frozen: whether no parameter of the group is trained.
            forward: in which it is gathered; None: by `unshard` outside of any.
        """
        within = forward is not None and forward is self._forward
        if not in_backward() and (self._reduced or group in self._gathered or not within):
            told = self._told()
            if self._seen is None or told != _SAME:
                self._seen = [[shard.clone() for shard in kind] for kind in self._shards()]
            most = self._most(told, device)
            if most == _LOST:
                self._drop()
            self.version += most != _SAME
            self.frozen = self.version if most >= _FROZEN else self.frozen
            self._least, self._digest, self._reduced = _SAME, None, False
            self._forward = forward
            self._gathered.clear()
        self._gathered.add(group)
        return self.needed(frozen)

    def needed(self, frozen: bool) -> int:
        """As `agreed`, without asking."""
        return self.frozen if frozen else self.version

    @property
    def changed(self) -> bool:
        """Whether this rank's weights have changed since ranks last asked."""
        return self._told() != _SAME

    def _told(self) -> int:
        if self._least != _SAME:
            return self._least
        if self._seen is None:
            return _SAME if self._digest is None or self._digest == self.digest() else _FROZEN
        frozen, trained = map(_equal, self._seen, self._shards())
        return _FROZEN if not frozen else _SAME if trained else _CHANGED

    def digest(self) -> str:
        """A digest of this rank's shards."""
        found = hashlib.blake2b(digest_size=16)
        for shard in chain(*self._shards()):
            found.update(shard.contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
        return found.hexdigest()

    def loaded(self, changed: bool, lost: bool, digest: str | None) -> None:
        """A state was loaded, before the weights or after them.

        Args:
            changed: the weights had changed, as it was saved.
            lost: it has no gathered weights for this rank.
            digest: of this rank's shards then; None: they were others.
        """
        self._seen, self._digest, self._reduced = None, digest, True
        self._least = _LOST if lost else _FROZEN if changed or digest is None else _SAME


def _equal(before: Sequence[torch.Tensor], now: Sequence[torch.Tensor]) -> bool:
    """Whether tensors are the same in kind and values; what is not a number never is."""
    return len(before) == len(now) and all(
        (a.dtype, a.device) == (b.dtype, b.device) and torch.equal(a, b)
        for a, b in zip(before, now, strict=True)
    )


class Versions:
    """Counts the steps of optimizers that have one of the parameters, made before or after: then a
    version is over. The version counters of tensors do not tell it: torch's foreach optimizers
    change sharded parameters without counting (seen with torch 2.13).

    Args:
        parameters: those that an optimizer has now. FSDP2 may replace them, and torch moves no
            module (`to_empty`) whose parameters have weak references.

    Attributes:
        steps: so far; 0 also if what trains the module is no torch Optimizer.
    """

    def __init__(self, parameters: Callable[[], Iterable[torch.Tensor]]) -> None:
        self.steps = 0
        self._parameters = parameters
        here = weakref.ref(self)

        def stepped(optimizer: Optimizer, *_: Any) -> None:
            versions = here()
            if versions is not None and versions.has(optimizer):
                versions.steps += 1

        self._hook = register_optimizer_step_post_hook(stepped)
        weakref.finalize(self, self._hook.remove)

    def has(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer has one of the parameters."""
        ours = {id(parameter) for parameter in self._parameters()}
        return any(id(p) in ours for group in optimizer.param_groups for p in group["params"])

    def unwatch(self) -> None:
        """End counting: nothing is left behind."""
        self._hook.remove()
