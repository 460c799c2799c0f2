"""Methods that measure the network while they train, and decide by it what is sent.

    auto        gradwire's automatic mode, with options of `gradwire.Auto`
    flexible    density and collective of top-k, with options of `gradwire.Flexible` and
                `gradwire.Triggers`

What they measure before the first step, and the steps that they throw away, count as training time.
After a run is resumed, they begin anew.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.controllers.flexible import check_pymoo
from gradwire.errors import ConfigError, use_one_of
from gradwire.integrations.flexible import check_numbers
from gradwire_tools.bench.train.torch_hooks import Applied, Options, of_handle

AUTO, FLEXIBLE = "auto", "flexible"

_FIRST = "artopk:density=0.01"  # of `flexible`, until it decides
_OF_AUTO = tuple(option.name for option in fields(gradwire.Auto) if option.name != "replan")
_OF_TRIGGERS = tuple(option.name for option in fields(gradwire.Triggers))
_OF_FLEXIBLE = ("steps", "seconds", *_OF_TRIGGERS)


def auto_options(options: Options) -> gradwire.Auto:
    """What automatic mode is told.

    Raises:
        ConfigError: another option than `gradwire.Auto`'s, or a wrong value.
    """
    given: dict[str, Any] = {name: value for name, value in options.items() if name != "codec"}
    _check(AUTO, given, _OF_AUTO)
    for option in ("codecs", "methods"):
        if option in given:
            given[option] = [str(given[option])]
    return gradwire.Auto(**given)


def check_flexible(options: Options) -> None:
    """Whether `flexible` can begin.

    Raises:
        ConfigError: another option than those above, a wrong value, or pymoo is missing.
    """
    check_pymoo()
    _flexible_options(options)


def flexible(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, options: Options
) -> Applied:
    """`flexible` at work. The step alone says where in the data and in the schedule of the learning
    rate training is, so that nothing else has a state that a trial would change."""
    handle = gradwire.attach(model, _FIRST)
    decides = gradwire.Flexible(handle, model, optimizer, **_flexible_options(options))

    def remove() -> None:
        decides.close()
        handle.detach()

    def load(state: dict[str, Any]) -> None:
        # Whatever density was in force: residuals of all have the same form.
        facts = {p.name: p.facts() for p in handle.plan.parameters}
        handle.load_state_dict({**state, "parameters": facts})

    return replace(of_handle(handle), flexible=decides, remove=remove, load=load)


def _flexible_options(options: Options) -> dict[str, Any]:
    _check(FLEXIBLE, options, _OF_FLEXIBLE)
    given: dict[str, Any] = dict(options)
    of_triggers = {name: given.pop(name) for name in _OF_TRIGGERS if name in given}
    check_numbers(**given)
    return {**given, "triggers": gradwire.Triggers(**of_triggers)}


def _check(method: str, given: Options, known: tuple[str, ...]) -> None:
    for name in (one for one in given if one not in known):
        raise ConfigError(f"method {method} has no option {name!r}: {use_one_of(name, known)}")
