"""How replicas meet: the settings of the one loop, and the published methods as presets of them.

    Delta = theta - theta_r                   each replica, of the weights that are due
    Delta <- mean over replicas, through a codec, with what it left out before
    v <- momentum v + Delta;  theta <- theta - lr (Delta + momentum v), or its sign
    theta_r <- mix theta_r + (1 - mix) theta

theta are the outer weights, equal on all replicas; theta_r are a replica's own.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

from gradwire.aggregators.registry import Method
from gradwire.codecs import checks
from gradwire.errors import ConfigError, use_one_of
from gradwire.handles.bias import warn_user

RULES = ("nesterov", "sign")
MEETINGS = 20  # for each that a momentum averages over


@dataclass(frozen=True)
class OuterSettings:
    """How replicas meet; equal on all of them.

    Attributes:
        every: optimizer steps from one meeting of the same weights to the next (H).
        codec: through which differences travel, as for `gw.attach`.
        lr, momentum: of the outer step, which is that of torch.optim.SGD with nesterov=True.
        rule: "nesterov", or "sign": each weight moves by lr, in the direction of that step.
        residual: the share of what the codec left out that is added to the next difference; 0 for
            none. None: 1 for a codec that needs it, else 0.
        fragments: into how many parts of the model, which meet one after the other, every /
            fragments steps apart. None: one of every third layer, as far as that divides `every`.
        delay: steps that go on while an average is under way.
        mix: the share of a replica's own weights that it keeps at a meeting.

    Raises:
        ConfigError: a number out of range.
    """

    called: ClassVar = "outer"

    every: int = 100
    codec: Method = "bf16"
    lr: float = 0.7
    momentum: float = 0.9
    rule: str = "nesterov"
    residual: float | None = None
    fragments: int | None = 1
    delay: int = 0
    mix: float = 0.0

    def __post_init__(self) -> None:
        checks.integer(self, "every", 1)
        checks.integer(self, "delay", 0)
        checks.number(self, "lr", above=0, below=math.inf)
        checks.number(self, "momentum", least=0, below=1)
        checks.one_of(self, "rule", RULES)
        checks.number(self, "mix", least=0, below=1)
        if self.residual is not None:
            checks.number(self, "residual", least=0, most=1)
        if self.fragments is not None:
            checks.integer(self, "fragments", 1)
            self._check_division(self.fragments)

    def _check_division(self, fragments: int) -> None:
        if self.every % fragments:
            sizes = [n for n in range(1, self.every + 1) if self.every % n == 0]
            at = bisect(sizes, fragments)
            near = sizes[at - 1 : at + 1]
            more = -(-self.every // fragments) * fragments
            raise ConfigError(
                f"outer: every={self.every} steps are not a multiple of fragments={fragments}: use "
                f"fragments={' or '.join(map(str, near))}, or every={more}"
            )
        if self.delay and self.delay >= self.every // fragments:
            raise ConfigError(
                f"outer: delay={self.delay}: an average must be there before the next fragment is "
                f"due, every {self.every // fragments} steps: use less"
            )

    @property
    def apart(self) -> int:
        """Steps from one fragment's meeting to the next one's."""
        assert self.fragments is not None
        return self.every // self.fragments

    def due(self, step: int) -> int | None:
        """The fragment that is due after so many optimizer steps; None: none is."""
        return None if step % self.apart else step % self.every // self.apart


# name -> what differs from the defaults, and where it is from
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "diloco": {"every": 500},  # 2311.08105
        "streaming": {  # 2501.18512
            "every": 100, "codec": "qsgd:bits=4", "lr": 0.4, "fragments": None, "delay": 1,
            "mix": 0.5,
        },
        "muloco": {"every": 30, "codec": "qsgd:bits=4", "lr": 0.8, "residual": 0.95},  # 2505.23725
        "sparseloco": {  # 2508.15706
            "every": 30, "codec": "sparseloco", "lr": 1.0, "momentum": 0.0, "residual": 0.95,
        },
        "demo": {  # 2411.19870
            "every": 1, "codec": "sparseloco:keep=32:bits=16:clip=false:transform=dct", "lr": 1e-3,
            "momentum": 0.0, "rule": "sign", "residual": 0.999,
        },
        "average": {"every": 30, "lr": 1.0, "momentum": 0.0},  # local SGD: 1805.09767
    }
)  # fmt: skip


def settings_of(
    preset: str | None, given: Mapping[str, Any], rounds: int | None = None
) -> OuterSettings:
    """The settings of a preset, changed by arguments that are not None.

    Args:
        rounds: how often the same weights will meet in all. A momentum of mu averages over the last
            1 / (1 - mu) meetings, which should be few of them: lr and momentum are those between
            plain averaging and the preset's of which they are a 20th.
    """
    if not (preset is None or (isinstance(preset, str) and preset in PRESETS)):
        raise ConfigError(f"outer: preset {preset!r:.60}: {use_one_of(preset, PRESETS)}")
    changed = {name: value for name, value in given.items() if value is not None}
    found = OuterSettings(**{**PRESETS.get(preset or "", {}), **changed})
    if rounds is None:
        return found
    if type(rounds) is not int or rounds < 1:
        raise ConfigError(f"outer: rounds={rounds!r:.60} must be a whole number, at least 1")
    most = round(max(0.0, 1 - MEETINGS / rounds), 2)
    if found.momentum <= most:
        return found
    if "momentum" in changed:
        warn_user(
            f"outer: momentum={found.momentum:g} averages over {1 / (1 - found.momentum):.0f} of "
            f"{rounds} meetings, and what is added first counts for long: use momentum={most:g}"
        )
        return found
    lr = found.lr if "lr" in changed else round(1 - (1 - found.lr) * most / found.momentum, 2)
    return replace(found, lr=lr, momentum=most)
