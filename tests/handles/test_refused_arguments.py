"""Arguments that `attach`, `register`, a handle's `update` and options refuse, and what the message
says: on a plain module in a single process, and on a DDP module of two ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from gradwire import codecs
from gradwire.codecs import RandomK
from ranks import caught, refuses
from rooms.handles import arguments
from training import mlp

SCALES = RandomK(density=0.1, unbiased=True)
ALL = ("attach", "register", "update")

# The calls that refuse, what they are given, and what they say.
ARGUMENTS: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    # names that are misspelt, or of other libraries
    (ALL, {"excludes": ["*"]}, " has no argument 'excludes': did you mean 'exclude'?"),
    (ALL, {"codec": "topk", "feedback": True}, "did you mean 'error_feedback'?"),
    (("update",), {"plans": 3}, "update has no argument 'plans': did you mean 'plan'?"),
    (("all_reduce",), {"asyncop": True}, "all_reduce has no argument 'asyncop': did you mean"),
    (("all_reduce",), {"codec": "int8"}, "unknown codec 'int8': did you mean 'qsgd:bits=8'?"),
    (ALL, {"codec": "qsdg"}, "'qsdg': did you mean 'qsgd'? Else use one of identity"),
    (ALL, {"codec": "QSGD"}, "'QSGD': did you mean 'qsgd'?"),
    (("attach",), {"codec": "atuo"}, "'atuo': did you mean 'auto'?"),
    (ALL, {"codec": "zstd"}, "'zstd': use one of identity"),
    (ALL, {"codec": "topk", "densty": 0.1}, "'densty': did you mean 'density'?"),
    (ALL, {"codec": "topk", "rank": 4}, "'topk' has no option 'rank': use one of density"),
    (("attach",), {"plan": "measured"}, "gradwire plan --shapes FILE --net RATE,LATENCY --save"),
    (("attach",), {"policy": "l-greco"}, "unknown policy 'l-greco': did you mean 'lgreco'?"),
    (ALL, {"bitz": 4}, "bitz"),
    (ALL, {"density": 0.1}, "has no option 'density'"),
    # values
    (ALL, {"bits": 9}, "bits=9"),
    (ALL, {"codec": "qsgd:bits=99"}, "bits=99"),
    (("attach", "register"), {"codec": None, "bits": 2}, "options bits"),
    (("attach", "register"), {"options": {"segments": 2}}, "options={'segments': 2}"),
    *(
        (("attach", "register"), {name: 1}, f": {name} is given otherwise now: write {write}")
        for name, write in arguments.RENAMED.items()
    ),
    *(
        (
            ("update",),
            {name: 1},
            f"options=dataclasses.replace(handle.plan.options, {name}={value})",
        )
        for name, value in (("algorithm", '"ring"'), ("coalesce_bytes", 0))
    ),
    *(
        (("update",), {name: 1}, f"update: {name} is as `attach` was told")
        for name in ("plan", "policy", "seed", "keep", "replan", "auto")
    ),
    (("update",), {"codec": gw.Auto()}, 'update: "auto" is for attach'),
    (("update",), {"options": gw.Options(seed=1)}, "seed is as `attach` was told"),
    (("update",), {"options": gw.Options(keep="none")}, "keep is as `attach` was told"),
    (ALL, {"error_feedback": "yes"}, "error_feedback='yes'"),
    (("attach", "register"), {"include": None}, "include=None"),
    (ALL, {"codecs": ["0.weight"]}, "codecs=['0.weight']"),
    (ALL, {"codecs": {"*": "topk:density"}}, "expected OPTION=VALUE"),
    (ALL, {"codecs": {"0.weight": "zip"}}, "zip"),
    (ALL, {"include": ["nobody"]}, "nobody"),
    (ALL, {"exclude": ["encoder.*"]}, "matches no parameter"),
    (ALL, {"exclude": "0.*"}, "list of patterns"),
    # what does not go together
    (
        ("attach",),
        {"codec": "tbq", "options": gw.Options(algorithm="ring"), "error_feedback": True},
        "not defined in the algorithm 'ring'",
    ),
    *(
        (("attach",), {"codec": "auto", name: value}, f'{name}={value!r:.60}: "auto" decides this')
        for name, value in (
            ("bits", 4),
            ("policy", "lgreco"),
            ("policy", gw.Replan()),
            ("error_feedback", True),
        )
    ),
    (
        ("attach",),
        {"codec": gw.Auto(methods=["powersgd:rank=100000"])},
        "rank=100000 does not shrink",
    ),
    (("attach",), {"policy": 3}, "policy=3: give a policy"),
    (("attach",), {"policy": gw.Replan({"every": 5})}, "policy={'every': 5}: give a policy"),
    (
        ("attach",),
        {"codec": "topk", "policy": "lgreco:budget=qsgd:bits=5"},
        "codec='topk': the policy's budget is 'qsgd:bits=5', and is the codec: leave codec",
    ),
]


def faults_of(wrap: Callable[[nn.Module], nn.Module]) -> list[str]:
    """The rows that are not refused with their message."""
    model = wrap(mlp(20, 40, 3))
    handle = gw.attach(model)
    calls: dict[str, Callable[..., object]] = {
        "attach": partial(gw.attach, wrap(mlp(20, 40, 3))),
        "update": handle.update,
        "all_reduce": partial(gw.all_reduce, torch.zeros(3)),
    }
    if wrap is not DDP:  # else it needs a group of its backend
        calls["register"] = partial(gw.register, model)
    faults = []
    for names, given, told in ARGUMENTS:
        for name in calls.keys() & names:
            error = caught(partial(calls[name], **given))
            if not isinstance(error, gw.ConfigError) or told not in str(error):
                faults.append(f"{name}({given}): {error!r}")
    if handle.plan.version or handle.plan.parameters[0].codec not in (gw.QSGD(), None):
        faults.append("an update that was refused has changed the plan")
    return faults


def test_wrong_arguments_are_refused_in_a_single_process() -> None:
    assert not dist.is_initialized()
    faults = faults_of(nn.Module.train)
    assert not faults, "\n".join(faults)
    for given, told in (
        ({"codec": "dgc:density=0.1:momentum=0.9"}, "place of the optimizer's momentum"),
        ({"weights": "int8"}, "weights='int8': unknown codec: use"),
        ({"options": gw.Options(keep="payloads")}, "keep='payloads': did you mean 'payload'?"),
    ):
        with pytest.raises(gw.ConfigError, match=re.escape(told)):
            gw.attach(mlp(20, 40, 3), **given)
    storeless: Any = dist.ProcessGroup(0, 2)
    for said, call in (
        ("torch.nn.Module", lambda: gw.register([mlp(20, 3)])),  # type: ignore[arg-type]
        ("observe: 3: give a function", lambda: gw.attach(mlp(20, 3)).observe(3)),  # type: ignore[arg-type]
        ("init_process_group", lambda: gw.all_reduce(torch.zeros(3))),
        ("2 ranks has no store", lambda: gw.all_reduce(torch.zeros(3), group=storeless)),
    ):
        refuses(said, call)


def test_wrong_arguments_are_refused(rank: int) -> None:
    faults = faults_of(DDP)
    assert not faults, "\n".join(faults)
    how: dict[str, Any] = {"options": gw.Options("all_gather"), "error_feedback": True}
    attach = partial(gw.attach, DDP(mlp(20, 40, 3)), **how)
    for given in ({"codec": SCALES}, {"codec": None, "codecs": {"0.weight": SCALES}}):
        refuses("unbiased=True without", partial(attach, **given))


@dataclass(frozen=True)
class Weighed(gw.QSGD):
    weight: float = 1.0


def test_what_looks_wrong_and_is_not() -> None:
    for given in codecs.ELSEWHERE.values():  # what other libraries' names stand for
        gw.attach(mlp(20, 3), given)
    own = gw.attach(mlp(20, 3), Weighed(bits=4))  # whose option looks like an argument
    own.update(weight=2.0, options=gw.Options("ring", seed=0))  # the seed that it has
    assert own._reductions.switch.newest.rules.default.codec == Weighed(bits=4, weight=2.0)


# ---- options of what adapts


def test_options_are_plain_and_refused_in_one_line() -> None:
    """Ranks compare them by their text."""
    text: Any = np.str_("time")
    given: list[tuple[Any, Any]] = [
        (
            gw.Replan("lgreco", np.int64(9), np.int64(9), 2, weigh=text),
            gw.Replan("lgreco", 9, 9, 2, weigh="time"),
        ),
        (gw.Auto(trial=np.int64(8)), gw.Auto()),
        (
            gw.flexible.Triggers(gain=torch.tensor(0.5), check=np.int8(3)),
            gw.flexible.Triggers(gain=0.5, check=3),
        ),
    ]
    for one, same in given:
        assert one == same
        assert repr(one) == repr(same)
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (gw.Options, {"seed": "a"}, "seed='a'"),
        (gw.Options, {"seed": -1}, "seed=-1"),
        (gw.Options, {"seed": 1 << 64}, r"below 2\^64"),
        (gw.Options, {"seed": True}, "seed=True"),
        (gw.Options, {"coalesce_bytes": True}, "coalesce_bytes=True"),
        (gw.Options, {"coalesce_bytes": -1}, "coalesce_bytes=-1"),
        (gw.Options, {"algorithm": "rings"}, "'rings': did you mean 'ring'"),
        (gw.Replan, {"every": 0}, "Replan: every=0 must be at least 1"),
        (gw.Replan, {"alpha": 10**400}, "Replan: alpha=10+ must be above 0 and below inf: give"),
        (gw.Replan, {"stale": 0.5}, "stale=0.5 must be above 1 and below inf: give more than 1"),
        (gw.Replan, {"stale": np.ones(2)}, r"stale=array\(\[1., 1.\]\) must be above 1"),
        (gw.Replan, {"weigh": "size"}, "weigh='size' must be 'bytes', 'priority' or 'time'"),
        (gw.Auto, {"trial": 1.5}, "Auto: trial=1.5 must be a whole number, at least 1"),
        (gw.Auto, {"changed": True}, "Auto: changed=True must be above 0: give a number"),
        (
            gw.Auto,
            {"policy": gw.controllers.LGreco(budget="qsgd")},
            "leave the policy's budget out",
        ),
        (
            gw.flexible.Triggers,
            {"share": "all"},
            "Triggers: share='all' must be above 0: give a number",
        ),
        (gw.flexible.Triggers, {"rest": -1}, "Triggers: rest=-1 must be at least 0"),
    ]
    for made, options, message in wrong:
        with pytest.raises(gw.ConfigError, match=f"^.*{message}.*$"):
            made(**options)
