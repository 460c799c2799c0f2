"""Flexible compression: the density and the collective of top-k follow training and network
(ARTOPK 3-E).

    1. at the start, and whenever the compression gain has changed by 10 %, every candidate density
       is tried for some steps from a checkpoint in memory, which is restored: its gain and the time
       of its selections are measured
    2. rank 0 searches the density and collective (gradwire/controllers/flexible.py), and tells all
    3. whenever the highest latency or the lowest bandwidth has changed by a threshold, as a watch
       of the links finds (gradwire/planner/link_watch.py), 2 is done again with what 1 had found

Steps of a trial are *thrown away*: after them, model, optimizer, data and random numbers are what
they were before. A trial begins and ends at the same step on all ranks.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire.aggregators import Dense
from gradwire.control import PendingResult
from gradwire.controllers.flexible import (
    DENSITIES,
    Candidate,
    SparseChoice,
    check_pymoo,
    search,
    sparse_collective,
)
from gradwire.engine import ranks_of
from gradwire.errors import ConfigError
from gradwire.flexible.memory_checkpoint import MemoryCheckpoint, Stateful, check_stateful
from gradwire.flexible.sparse_methods import (
    ALGORITHMS,
    base_of,
    method_of,
    selected_from,
    selection_seconds,
)
from gradwire.flexible.triggers import Triggers
from gradwire.groups import communicator
from gradwire.handles.handle import Handle
from gradwire.handles.switch import Update
from gradwire.planner.link_watch import LinkWatch
from gradwire.planner.links import SECONDS, Links, measure_links
from gradwire.planner.rules import exactly

log = logging.getLogger("gradwire")

_SAMPLES = 5  # of the gain, between two checks


class Flexible:
    """Chooses density and collective of a DDP module's top-k while it trains; made on all ranks.

        handle = gw.attach(model, "artopk:density=0.01")
        flexible = gw.Flexible(handle, model, optimizer, stateful=(batches,))
        while flexible.steps < 1000:
            optimizer.zero_grad()
            loss(model, next(batches)).backward()
            optimizer.step()
            flexible.step()

    Args:
        handle: of `attach`, with "artopk" or "lwtopk" as its one codec.
        model, optimizer: what trains; one backward pass per step.
        stateful: all else that a step changes and that has state_dict and load_state_dict: the
            position in the data, the schedule of the learning rate, a GradScaler. They are loaded
            between two steps, and must take effect in the next.
        densities: candidates.
        steps: that each candidate is tried.
        triggers: what makes it act.
        seconds: that the first measurement of the links should take; all ranks wait for it.

    Attributes:
        steps: training steps so far, without those that were thrown away.
        trying: whether the steps of a trial are running, which will be thrown away.
        choice: density and collective in force; None before the first search.
        history: what it did and why: dicts of step and line. Rank 0 logs the lines, too.

    Raises:
        ConfigError: another codec than these, a number out of range, or a policy at work.
        TransportError: a peer failed.
    """

    def __init__(
        self,
        handle: Handle,
        model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        stateful: Sequence[Stateful] = (),
        densities: Sequence[float] = DENSITIES,
        steps: int = 10,
        triggers: Triggers | None = None,
        seconds: float = SECONDS,
    ) -> None:
        if not isinstance(handle, Handle) or not isinstance(model, DistributedDataParallel):
            raise ConfigError("Flexible: give a DDP module and its handle, as attach returned it")
        handle._reductions.refuse_update()
        check_stateful(stateful)
        check_numbers(steps, seconds)
        if len(set(densities)) < 2:
            raise ConfigError("Flexible: give two candidate densities or more")
        check_pymoo()
        self._base = base_of(handle.plan)
        for density in densities:
            method_of(self._base, density, "art_ring")  # checks it
        self.steps = 0
        self.trying = False
        self.choice: SparseChoice | None = None
        self.history: list[dict[str, Any]] = []
        self._handle, self._of = handle, (handle, model, optimizer, stateful)
        self._densities, self._tried = tuple(densities), steps
        self._triggers = triggers or Triggers()
        self._sent = [p for p in handle.plan.parameters if not isinstance(p.inner, Dense)]
        self._nbytes = sum(4 * p.numel for p in self._sent)
        self._comm = communicator(model.process_group)
        self._owner = self._comm.owner("flexible")
        self._candidates: list[Candidate] = []
        self._links = measure_links(self._comm, seconds)
        self._watch = LinkWatch(self._comm, self._links, self._triggers.share)
        self._script = self._single() if self._comm.world_size == 1 else self._flexible()

    def step(self) -> bool:
        """Call it after every optimizer.step, on all ranks; whether that step was training, rather
        than one that is thrown away.

        Raises:
            ConfigError: it is closed, or ranks have refused a plan.
            TransportError: a peer failed.
        """
        counts = not self.trying
        self.steps += counts
        if next(self._script, None) is None:
            raise ConfigError("Flexible: it was closed, or has failed: make a new one")
        return counts

    def close(self) -> None:
        """End it, on all ranks at the same step, before `detach`. A trial's steps are thrown away;
        the plan in force stays."""
        self._script.close()
        self._watch.close()
        self._comm.close_owner(self._owner)

    # ---- what it does; each yield waits for the user's next step

    def _single(self) -> Generator[bool, None, None]:
        self._note("one rank sends nothing: there is nothing to choose")
        while True:
            yield True

    def _flexible(self) -> Generator[bool, None, None]:
        why = "the start"
        while True:
            yield from self._measure(why)
            why = yield from self._train()

    def _measure(self, why: str) -> Iterator[bool]:
        """Try every candidate, decide, and go back to where training was."""
        self._note(f"{why}: tries {len(self._densities)} densities, {self._tried} steps each")
        kept = MemoryCheckpoint(*self._of)
        self.trying = True
        try:
            mine = []
            for density in self._densities:
                mine.append((yield from self._try(density, kept)))
            self._candidates = self._agreed(mine)
            choice = self._search()
            yield from self._adopt(choice.density, choice.collective)
        finally:
            kept.restore()  # also if it is closed, or fails
            self.trying = False
        self.choice = choice
        gains = ", ".join(f"{one.density:g}: {one.gain:.3g}" for one in self._candidates)
        self._note(f"gains by density {gains}; chooses {choice}")

    def _try(self, density: float, kept: MemoryCheckpoint) -> Generator[bool, None, Candidate]:
        links = self._links.worst_alpha, self._links.worst_beta
        collective = sparse_collective(self._comm.world_size, self._nbytes, density, *links)
        yield from self._adopt(density, collective)
        kept.restore()
        gains = _GainSamples(self._handle, every=1)
        for _ in range(self._tried):
            yield True
            gains.look()
        gain = gains.mean()
        if gain is None:
            raise ConfigError("Flexible: no gain was sampled: is this the module of the handle?")
        device = next(self._of[1].parameters()).device
        lengths = selected_from(self._base, [p.numel for p in self._sent])
        seconds = selection_seconds(lengths, density, device)
        return Candidate(density, seconds, gain)

    def _adopt(self, density: float, collective: str) -> Iterator[bool]:
        """Change the plan, and wait until a pass has run with it: the same on all ranks."""
        update = self._update(density, collective)
        update.wait()
        while not update.in_force:
            yield True

    def _train(self) -> Generator[bool, None, str]:
        """Train until the gain has changed; returns why the candidates are to be tried."""
        triggers, begun = self._triggers, self.steps
        every = max(1, triggers.check // _SAMPLES)
        gains = _GainSamples(self._handle, every)
        gain: float | None = None  # since the last change of plan
        links: Links | None = None
        update: Update | None = None  # not in force yet
        asked: PendingResult[list[Any]] | None = None  # what ranks told at the last check
        while True:
            yield True
            if update is not None:
                if not update.in_force:
                    continue  # on all ranks
                update, gain, asked, gains = None, None, None, _GainSamples(self._handle, every)
            gains.look()
            if self.steps % triggers.check:
                continue
            told = [] if asked is None else asked.result()
            newest = self._watch.newest
            asked = self._tell(
                {"gain": gains.mean(), "links": None if newest is None else newest.text()}
            )
            gains = _GainSamples(self._handle, every)
            if not told or any(one["gain"] is None for one in told):
                continue
            now = statistics.fmean(one["gain"] for one in told)
            gain = now if gain is None else gain
            if abs(now - gain) > triggers.gain * gain and self.steps - begun >= triggers.rest:
                return f"the gain has changed from {gain:.3g} to {now:.3g}"
            if told[0]["links"] is not None:
                seen = Links.read(told[0]["links"])  # rank 0's, on all ranks
                links = seen if links is None else links
                if seen.changed(links, triggers.link):
                    update, links = self._search_again(links, seen), seen

    def _search_again(self, before: Links, now: Links) -> Update | None:
        """After a change of the network: search with what the candidates gave before."""
        self._links = now
        why = f"the links have changed from {_in_words(before)} to {_in_words(now)}: searches again"
        choice, last = self._search(), self.choice
        self.choice = choice
        if last is not None and (choice.density, choice.collective) == (
            last.density,
            last.collective,
        ):
            self._note(f"{why}; stays with {choice}")
            return None
        self._note(f"{why}; chooses {choice}")
        return self._update(choice.density, choice.collective)

    # ---- its parts

    def _search(self) -> SparseChoice:
        """As rank 0 decides; alike on all ranks."""
        answer: dict[str, Any] = {}
        if self._comm.rank == 0:
            links = self._links.worst_alpha, self._links.worst_beta
            try:
                found = search(self._candidates, self._comm.world_size, self._nbytes, *links)
                answer = asdict(found)
            except Exception as error:  # other ranks wait for this one
                answer = {"error": f"rank 0: {error}"}
        answer = self._tell(answer).result()[0]
        if "error" in answer:
            raise ConfigError(answer["error"])
        return SparseChoice(**answer)

    def _agreed(self, mine: Sequence[Candidate]) -> list[Candidate]:
        """Candidates of all ranks together: the mean gain, and the time of the slowest rank."""
        every = self._tell({"tried": [[one.seconds, one.gain] for one in mine]}).result()
        together = []
        for density, *of in zip(self._densities, *(one["tried"] for one in every), strict=True):
            seconds, gains = zip(*of, strict=True)
            together.append(Candidate(density, max(seconds), statistics.fmean(gains)))
        return together

    def _update(self, density: float, collective: str) -> Update:
        method = method_of(self._base, density, collective)
        algorithm = ALGORITHMS[collective]
        options = None if algorithm is None else self._handle.plan.options.through(algorithm)
        codecs = {exactly(p.name): method for p in self._sent}
        return self._handle.update(codecs=codecs, options=options)

    def _tell(self, mine: dict[str, Any]) -> PendingResult[list[Any]]:
        return ranks_of([self._comm], self._owner.key, breaks=False).tell("flexible", mine)

    def _note(self, line: str) -> None:
        self.history.append({"step": self.steps, "line": line})
        if self._comm.rank == 0:
            log.info("flexible, step %d: %s", self.steps, line)


class _GainSamples:
    """Samples of a handle's compression gain, E|gc|^2 / E|ge|^2 (ARTOPK 3-E), of passes that begin
    after this is made.

    Args:
        every: a sample in so many passes.
    """

    def __init__(self, handle: Handle, every: int) -> None:
        self._handle, self._every = handle, every
        self._since = handle.stats()["steps"]
        self._found: dict[float, float] = {}
        self.look()

    def look(self) -> None:
        """Note the newest sample."""
        found = self._handle.metrics(every=self._every)
        step = found.get("sampled_step", 0)
        if step > self._since and "compression_gain" in found:
            self._found[step] = found["compression_gain"]

    def mean(self) -> float | None:
        """Over the samples; None: there is none."""
        return statistics.fmean(self._found.values()) if self._found else None


def check_numbers(steps: int = 1, seconds: float = SECONDS) -> None:
    """Raise ConfigError for numbers that `Flexible` does not take."""
    if type(steps) is not int or steps < 1:
        raise ConfigError(f"Flexible: steps={steps!r}: give a number of steps, 1 or more")
    if type(seconds) not in (int, float) or not 0 < seconds < float("inf"):
        raise ConfigError(f"Flexible: seconds={seconds!r}: give a number above 0")


def _in_words(links: Links) -> str:
    return f"{1e3 * links.worst_alpha:.3g} ms and {8e-6 / links.worst_beta:.3g} Mbit/s"
