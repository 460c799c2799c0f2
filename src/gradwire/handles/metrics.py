"""Metrics while training: scalars of a handle, for any logger.

Counters are read at the call. What needs the gradient and what was sent of it is measured in a
*sample*: one pass in many, and none before the first call. A sample is taken where an observer is
called, as the averages of a scope are there and before its residuals change again. It reads, and
changes nothing, so training is bit-identical with it and without.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from gradwire.aggregators import Attached, Dense, ErrorFeedback, Observation
from gradwire.aggregators.error_feedback import RESIDUAL
from gradwire.errors import ConfigError
from gradwire.lang import Codec
from gradwire.lang.kernels import decode, encode
from gradwire.planner import Plan

EVERY = 100  # passes


def times_less(raw: float, wire: float) -> float:
    """How many times fewer bytes were sent than uncompressed; 1.0 where none were sent."""
    return raw / wire if wire else 1.0


class Sampler:
    """Takes samples of passes.

    Args:
        ranks: that take part in an average; a single rank has nothing to sample.

    Attributes:
        running: whether the running pass is sampled.
        step: number of the pass that was sampled last; None: there is no sample.
    """

    def __init__(self, ranks: int) -> None:
        self.running = False
        self.step: int | None = None
        self._ranks = ranks
        self._every = 0  # 0: nobody has asked
        self._next = 0
        self._now = 0
        # By parameter: |p|, |s|, |p - s| and |residual|, on the gradient's device.
        self._partial: dict[str, torch.Tensor] = {}
        self._norms: dict[str, torch.Tensor] = {}
        self._weights: dict[str, torch.Tensor] = {}  # |w| and |w - s|, of the last sample

    def ask(self, every: int) -> None:
        """From the next pass on, sample one in `every` passes."""
        if every != self._every:
            self._every, self._next = every, 0

    def begin(self, number: int) -> None:
        """Called as pass `number` begins, when all scopes of the one before have ended."""
        self.end()
        self._now = number
        self.running = bool(self._every) and number >= self._next and self._ranks > 1
        if self.running:
            self._next = number + self._every

    def observe(self, member: Attached, observed: Observation) -> None:
        """Sample a parameter, from its average; called from the engine's threads."""
        aggregator, residual = member.aggregator, member.state.get(RESIDUAL)
        if aggregator == Dense():
            return
        gradient = observed.gradient.view(-1)
        if observed.sent is not None:
            sent = observed.sent.float().view(-1)
            fed = gradient.float() if residual is None else sent + residual.view(-1)
        elif not isinstance(aggregator, ErrorFeedback):
            codec = getattr(aggregator, "codec", None)
            if codec is None:
                return
            fed, sent = gradient.float(), round_trip(codec, gradient, member)
            own = slice(*observed.exact)
            sent[own] = fed[own]
        else:
            return
        kept = fed.new_zeros(1) if residual is None else residual
        self._partial[member.name] = _norms(fed, sent, fed - sent, kept)

    @property
    def due(self) -> bool:
        """Whether the next pass will be sampled, and so the forward before it."""
        return bool(self._every) and self._now + 1 >= self._next and self._ranks > 1

    def add_weight(self, name: str, own: torch.Tensor, sent: torch.Tensor) -> None:
        """Sample a parameter's weights: this rank's shard, and what all ranks decode; fp32."""
        self._weights[name] = _norms(own, own - sent)

    def weights_error(self) -> dict[str, list[float]]:
        """Of the last sample of weights, by parameter: |w|^2, |w - s|^2. Waits for the device."""
        return _squares(dict(self._weights))

    def squares(self) -> dict[str, list[float]]:
        """Of the last sample, by parameter: |p|^2, |s|^2, |p - s|^2, |residual|^2. Waits for the
        device."""
        return _squares(self._norms)  # the next sample takes its place

    def end(self) -> None:
        """Called at the end of a pass, at the latest as the next one begins: makes its sample
        readable."""
        if self.running and self._partial:
            self._norms, self._partial, self.step = self._partial, {}, self._now
        self.running = False


def _norms(*vectors: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.linalg.vector_norm(v, dtype=torch.float64) for v in vectors])


def _squares(norms: Mapping[str, torch.Tensor]) -> dict[str, list[float]]:
    """The squares of equally many norms by name; one copy from the device."""
    rows = torch.stack(list(norms.values())).square().tolist() if norms else []
    return dict(zip(norms, rows, strict=True))


class Metrics:
    """The scalars of one handle.

    Args:
        ranks: that take part in an average.
    """

    def __init__(self, ranks: int) -> None:
        self.sampler = Sampler(ranks)
        self._ranks = ranks
        self._before: dict[str, float] = {}
        self._window: dict[str, float] = {}

    def read(
        self,
        totals: Mapping[str, float],
        plan: Plan,
        members: Mapping[str, Attached],
        layers: bool,
        every: int,
    ) -> dict[str, float]:
        """See `Handle.metrics`; `totals` are steps, wire_bytes, raw_bytes, exposed_seconds."""
        if type(every) is not int or every < 1:
            raise ConfigError(f"every={every!r}: give a number of passes, 1 or more")
        self.sampler.ask(every)
        found: dict[str, float] = {}
        told = _told(members)
        for name in sorted({name for of in told.values() for name in of}):
            of = {key: values[name] for key, values in told.items() if name in values}
            weights = {key: max(math.prod(members[key].shape), 1) for key in of}
            found[name] = sum(of[key] * w for key, w in weights.items()) / sum(weights.values())
        self._advance(totals, plan)
        squares = self.sampler.squares()
        found |= self._window | sampled(list(squares.values()))
        errors = self.sampler.weights_error()
        found |= weights_nmse(errors.values())
        if self.sampler.step is not None:
            found["sampled_step"] = self.sampler.step
        if layers:
            for p in plan.parameters:
                own = dict(told.get(p.name, {}))
                if p.numel:
                    payload = p.aggregator.payload_bytes(p.shape, p.dtype)
                    own["bits_per_value"] = 8 * payload / p.numel
                if p.name in squares:
                    own |= sampled([squares[p.name]])
                if p.name in errors:
                    own |= weights_nmse([errors[p.name]])
                found |= {f"{p.name}/{key}": value for key, value in own.items()}
        return found

    def _advance(self, totals: Mapping[str, float], plan: Plan) -> None:
        """Counters of the passes since the previous call; they stay if there was none.

        Another thread reads in the middle of a pass: then no gradient may have been sent in a pass
        that has begun, or nothing but plan versions.
        """
        new = {key: totals[key] - self._before.get(key, 0) for key in totals}
        if new["steps"] < 1:  # or another thread has read later totals meanwhile
            return
        self._before = dict(totals)
        window = {"exposed_seconds": new["exposed_seconds"] / new["steps"]}
        if new.get("weights_wire_bytes"):
            window["weights_exposed_seconds"] = new["weights_exposed_seconds"] / new["steps"]
            if new["weights_raw_bytes"]:
                ratio = times_less(new["weights_raw_bytes"], new["weights_wire_bytes"])
                window["weights_ratio"] = ratio
        values = sum(p.numel for p in plan.parameters)
        if values and (self._ranks == 1 or (new["raw_bytes"] and new["wire_bytes"])):
            ratio = times_less(new["raw_bytes"], new["wire_bytes"])
            bits = 8 * sum(p.numel * p.dtype.itemsize for p in plan.parameters)
            window |= {"ratio": ratio, "bits_per_value": bits / values / ratio}
        self._window = window


def sampled(squares: Sequence[Sequence[float]]) -> dict[str, float]:
    """nmse, compression_gain and residual_norm, from the rows of `Sampler.squares`; nothing that is
    not known."""
    if not squares:
        return {}
    fed, sent, lost, residual = (sum(column) for column in zip(*squares, strict=True))
    found = {"residual_norm": math.sqrt(residual)} if residual >= 0 else {}
    if fed > 0:
        found |= {"nmse": lost / fed, "compression_gain": sent / fed}
    return found


def weights_nmse(errors: Iterable[Sequence[float]]) -> dict[str, float]:
    """The error of gathered weights; nothing if it is not known."""
    sums = [sum(column) for column in zip(*errors, strict=True)]
    return {"weights_nmse": sums[1] / sums[0]} if sums and sums[0] > 0 else {}


def round_trip(codec: Codec, values: torch.Tensor, member: Attached) -> torch.Tensor:
    """What a codec makes of a vector of this rank, in fp32: without error feedback nobody keeps
    what was sent, so the codec draws anew."""
    key = member.keys.own
    payload = encode(codec, values, key)
    return decode(codec, payload, values.numel(), values.dtype, key).float()


def _told(members: Mapping[str, Attached]) -> dict[str, dict[str, float]]:
    """What aggregators have told, by parameter and name; one copy from the device."""
    told = {
        (name, key): value.detach().double().reshape(())
        for name, member in members.items()
        for key, value in dict(member.metrics).items()
    }
    found: dict[str, dict[str, float]] = {}
    values = torch.stack(list(told.values())).tolist() if told else []
    for (name, key), number in zip(told, values, strict=True):
        found.setdefault(name, {})[key] = number
    return found
