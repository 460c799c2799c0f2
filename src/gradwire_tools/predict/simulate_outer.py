"""`gradwire sim --methods outer:...`: rows of replicas that meet every so many steps, beside DDP's.

DDP's codecs come first. A row: outer, method, model, numel, algorithm, ranks, per_node, net, every,
seconds, forward_seconds, backward_seconds, exposed_seconds, wire_bytes, gain,
compute_seconds, limit_seconds, of_limit, messages, exact, machine, of replicas delay, needed_delay,
hidden_seconds, meeting_seconds and meeting_bytes, and sweep and value where a parameter was swept.
docs/laboratory/simulator.md explains them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gradwire.errors import ConfigError, use_one_of
from gradwire_tools.bench.rows import row_kind
from gradwire_tools.bench.train import methods, outer
from gradwire_tools.predict.sim_sweep import Point
from gradwire_tools.predict.simulate import SWEPT, Case, Row, WantedCollectives
from gradwire_tools.sim import Curves, Scenario, predict
from gradwire_tools.sim.meetings import OuterScenario, predict_outer
from gradwire_tools.sim.predict import check_seconds

KINDS = (
    row_kind(
        "sim --methods outer",
        "outer exposed_seconds",
        "outer:flag method:text model:text net:text algorithm:text ranks:positive "
        "per_node:positive every:positive seconds:amount forward_seconds:amount "
        "backward_seconds:amount exposed_seconds:amount wire_bytes:amount "
        "gain:amount? limit_seconds:amount?",
        "delay:count needed_delay:count hidden_seconds:amount meeting_seconds:amounts "
        "meeting_bytes:amounts machine:text? sweep:text value:plain",
    ),
)

_SWEPT = (*SWEPT, "forward")


@dataclass(frozen=True)
class WantedOuter(WantedCollectives):
    """The request for replicas that meet, beside DDP with `codecs`.

    Attributes:
        methods: names as of `bench train`, outer:...
        forward: seconds of computing; None: half of `backward`.
    """

    methods: Sequence[str] = ()

    def cases(self, point: Point) -> Iterator[Case]:
        found = {text: self._options(text, point) for text in self.methods}
        of_ddp = point if point.name in SWEPT else Point()
        first: list[float] = []  # seconds of DDP's first row

        def beside(predicted: Callable[[Curves], Row], curves: Curves) -> Row:
            row = predicted(curves)
            first.append(row["seconds"])
            return {**row, "gain": first[0] / row["seconds"] if row["seconds"] else None}

        for algorithm in self.algorithms:
            common = self.at(of_ddp, algorithm)
            forward = common["backward"] / 2 if self.forward is None else self.forward
            forward = point.number("forward", forward)
            for name, seconds in (("forward", forward), ("backward", common["backward"])):
                check_seconds(name, seconds)
            if not forward + common["backward"]:
                raise ConfigError(
                    f"--methods {self.methods[0]}: replicas compute between their meetings: give "
                    "--backward or --forward, in seconds"
                )
            for text in self.codecs:
                ddp = self._scenario(text, algorithm, of_ddp)
                yield (
                    {"method": f"gradwire:{text}"},
                    ddp.priced,
                    partial(beside, partial(_of_ddp, ddp, forward)),
                )
            for text, options in found.items():
                try:
                    one = OuterScenario(
                        settings=outer.settings(options), model=self.model, forward=forward,
                        codec_options=outer.codec_options(options), **common,
                    )  # fmt: skip
                except ConfigError as error:
                    raise ConfigError(f"method {text!r}: {error}") from error
                yield {"method": text}, one.priced, partial(beside, partial(predict_outer, one))

    def _options(self, text: str, point: Point) -> dict[str, Any]:
        """Of a method, with what is swept of it."""
        if text.partition(":")[0] != outer.OUTER:
            raise ConfigError(f"--methods {text}: write outer:PRESET:every=N, or give --sharded")
        method = methods.parse(text)
        swept = {} if point.name in (None, *_SWEPT) else {str(point.name): point.keys["value"]}
        try:
            outer.settings({**method.options, **swept})
        except ConfigError as error:
            known = f"--sweep {point.name}: {use_one_of(str(point.name), _SWEPT)}, or an option of "
            told = f"{known}the method: " if swept else ""
            raise ConfigError(f"{told}method {text!r}: {error}") from error
        return {**method.options, **swept}


def _of_ddp(scenario: Scenario, forward: float, curves: Curves) -> Row:
    """A step of DDP, forward and all, as a round of one step."""
    row = predict(scenario, curves)
    seconds, limit = forward + row["seconds"], row["limit_seconds"]
    limit = None if limit is None else forward + limit
    exposed = row["seconds"] - scenario.backward
    return {
        "outer": False,
        **{key: one for key, one in row.items() if key != "buckets"},
        "seconds": seconds,
        "limit_seconds": limit,
        "of_limit": None if limit is None else limit / seconds,
        "forward_seconds": forward,
        "every": 1,
        "exposed_seconds": exposed,
    }
