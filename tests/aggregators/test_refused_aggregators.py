"""What aggregators refuse, and what the message says."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gradwire import ConfigError
from gradwire.aggregators import (
    THC,
    Aggregator,
    ARTopK,
    Dense,
    ErrorFeedback,
    GlobalTopK,
    LWTopK,
    PowerSGD,
    Radial,
    SparseLoCo,
    StateSpec,
    TopKC,
    registry,
)
from gradwire.aggregators import DeepGradientCompression as Deep
from gradwire.aggregators.artopk import LEADERS, SCOPES
from gradwire.codecs import TopK
from gradwire.planner import Rules, make_plan
from ranks import caught

DENSITY = " must be above 0 and at most 1: "
SMALL, LARGE, THIN = ("small", (3, 8)), ("large", (40, 30)), ("thin", (1, 9))

OPTIONS: list[tuple[Callable[..., object], dict[str, Any], str]] = [
    *(
        (PowerSGD, {option: value}, f"PowerSGD: {option}={value!r} must be ")
        for option, values in {
            "rank": [0, -1, 1.5, True, "2", None],
            "warm": [0, 1, None, "false"],
            "orthogonal": ["lu", None, True],
        }.items()
        for value in values
    ),
    (THC, {"bits": 9}, "THC: bits=9 must be 2 to 8"),
    (THC, {"bits": 1}, "bits=1"),
    (THC, {"bits": 3}, "code=4 must be 2 to 3 for bits=3"),
    (THC, {"bits": 4.0}, "bits=4.0"),
    (THC, {"code": 1}, "code=1"),
    (THC, {"rotation": "half"}, "rotation='half' must be 'partial', 'full' or 'none'"),
    (THC, {"chunk": 1000}, "a power of two, such as 1024"),
    (THC, {"chunk": 1 << 17}, "chunk=131072 must be 2 to 65536"),
    (THC, {"chunk": 3}, "such as 4"),
    (THC, {"chunk": "64"}, "chunk='64' must be a whole number"),
    (THC, {"saturate": 1}, "saturate=1 must be False or True"),
    (TopKC, {"bits": 0}, "at most 16"),
    (TopKC, {"bits": 17}, "at most 16"),
    (TopKC, {"bits": 33, "values": "fp32"}, "at most 32"),
    (TopKC, {"bits": "2"}, "bits='2'"),
    (TopKC, {"bits": True}, "bits=True"),
    (TopKC, {"bits": 0.25, "chunk": 64}, "chunk=65 or more"),
    (TopKC, {"bits": 0.1}, "TopKC: bits=0.1: .*chunk=161 or more"),
    (TopKC, {"bits": 1e-9}, "bits=1e-09: .*use bits=0.00025 or more, and chunk=65536"),
    (TopKC, {"bits": 1e-320}, "use bits=0.00025 or more, and chunk=65536"),
    (TopKC, {"chunk": 1}, "2 to 65536"),
    (TopKC, {"chunk": 64.0}, "a whole number, 2 to 65536"),
    (TopKC, {"values": "int8"}, "'fp16', 'bf16' or 'fp32'"),
    (TopKC, {"permuted": 1}, "permuted=1 must be False or True"),
    (TopKC, {"scope": "bucket"}, "scope='bucket' must be 'layer' or 'model'"),
    *(
        (ARTopK, {"density": density}, f"ARTopK: density=.*{DENSITY}")
        for density in (0, -0.1, 1.1, torch.nan, "0.1", None)
    ),
    (ARTopK, {"density": 1.1}, "use 1$"),
    (ARTopK, {"density": 0}, "use 1e-06 or more$"),
    (ARTopK, {"density": True}, "give a number$"),
    (ARTopK, {"leader": "no"}, f"leader='no' must be '{LEADERS[0]}'.* or"),
    (ARTopK, {"scope": "no"}, f"scope='no' must be '{SCOPES[0]}'.* or"),
    (ARTopK, {"values": "no"}, "values='no' must be 'fp16'.* or"),
    *(
        (made, {"density": density}, f"{made.__name__}: density={density!r}.*{near}")
        for made in (LWTopK, GlobalTopK)
        for density, near in ((0, "use 1e-06 or more"), (2, "use 1$"), ("a", "give a number"))
    ),
    (LWTopK, {"values": "fp8"}, "values='fp8'"),
    (LWTopK, {"scope": "bucket"}, "scope='bucket'"),
    (Deep, {"density": 0}, f"density=0{DENSITY}use 1e-06 or more"),
    (Deep, {"density": 7}, f"density=7{DENSITY}use 1$"),
    (Deep, {"momentum": 1}, "momentum=1 must be at least 0 and below 1"),
    (Deep, {"momentum": -0.1}, "momentum=-0.1 must be at least 0 and below 1: use 0"),
    (Deep, {"clip": 0}, "clip=0 must be above 0 and below inf: use 1e-06 or more"),
    (Deep, {"clip": -1}, "clip=-1 must be above 0 and below inf: use 1e-06 or more"),
    (Deep, {"clip": math.inf}, "clip=inf must be .* a number below inf"),
    (Deep, {"clip": 10**400}, "clip=10+ must be .* a number below inf"),
    (Deep, {"clip": "no"}, "clip='no' must be above 0"),
    (Deep, {"warmup": -1}, "warmup=-1 must be 0 to 4294967295"),
    (Deep, {"warmup": 1 << 32}, "warmup=4294967296 must be 0 to 4294967295"),
    (Deep, {"warmup": 1.5}, "warmup=1.5 must be a whole number, 0 to"),
    (Deep, {"values": "fp8"}, "values='fp8'"),
    (SparseLoCo, {"bits": 5}, "SparseLoCo: bits=5 must be 1, 2, 3, 4 or 16"),
    (SparseLoCo, {"chunk": 4000}, "a power of two, as 4096"),
    (SparseLoCo, {"transform": "fft"}, "transform='fft' must be 'none' or 'dct'"),
    (
        SparseLoCo,
        {"transform": "dct", "chunk": 2048},
        'chunk=2048 must be a square for transform="dct", as 1024$',
    ),
    (Radial, {"codec": "bf16"}, "radial:codec=NAME:OPTION=VALUE"),
    (registry.get, {"method": "radial:codec=qsdg"}, "unknown codec 'qsdg'"),
    (registry.get, {"method": "radial:bits=4"}, "'bits'"),
    (registry.get, {"method": "radial:codec=qsgd:scope=model"}, "no option 'scope'"),
    (Dense, {"dtype": torch.float64}, "float64"),
    (StateSpec, {"shape": (3,), "dtype": torch.int64}, "has no mean"),
    (StateSpec, {"shape": (3,), "kind": "sharded", "dim": 1}, "no dim 1"),
    (StateSpec, {"shape": (3,), "kind": "shared"}, "'shared'"),
    (StateSpec, {"shape": (3,), "start": "ones"}, "'ones'"),
    *(
        (
            ErrorFeedback,
            {"inner": given},
            rf'write gw\.attach\(model, "{codec}", error_feedback=True',
        )
        for given, codec in (
            ("topk:density=0.1", "topk:density=0.1"),
            (TopK(0.1), "topk:density=0.1"),
            (3, "qsgd"),
        )
    ),
    *(
        (ErrorFeedback, {"inner": given}, f"ErrorFeedback: {given} has its own: give it to attach")
        for given in (Deep(), ErrorFeedback(THC()))
    ),
    (registry.get, {"method": "topk:scope=bucket"}, "scope='bucket' must be 'layer' or 'model'"),
    (registry.get, {"method": "topk:algorithm=no"}, "algorithm"),
]


def rank_of(rank: int, **codecs: str) -> Rules:
    return Rules().changed(codec="powersgd", options={"rank": rank}, codecs=codecs)


# A plan's rules and its parameters, for two ranks.
PLANS: list[tuple[Rules, list[tuple[str, tuple[int, ...]]], str]] = [
    (
        rank_of(5, **{"s*": "powersgd:rank=5"}),
        [SMALL, LARGE],
        "small: rank=5 .* 3 x 8: the largest .* is 2",
    ),
    (
        rank_of(5, small="powersgd:rank=3"),
        [SMALL, LARGE],
        "small: rank=3 .* 3 x 8: the largest .* is 2",
    ),
    (
        rank_of(5, thin="powersgd:rank=2"),
        [THIN, SMALL, LARGE],
        "thin: rank=2 .* 1 x 9: no rank shrinks it",
    ),
    (rank_of(50), [SMALL, LARGE], "no parameter can be compressed; parameter small"),
    *(
        (
            rank_of(rank),
            [("w", (rows, columns)), ("bias", (90,))],
            f"parameter w: rank={rank} does not shrink a matrix of {rows} x {columns}",
        )
        for rank, (rows, columns) in ((2, (2, 2)), (1, (1, 40)), (4, (8, 4)), (1, (0, 4)))
    ),
]

# THC that does not saturate, for more ranks than its bits suffice for.
NARROW: list[tuple[int, Aggregator, str]] = [
    (
        3,
        THC(5, saturate=False),
        r"3 ranks' numbers, each up to 7, may be 21, .* up to 15: give bits=6",
    ),
    (4, THC(4, 4, saturate=False), "give bits=6"),
    (19, THC(8, saturate=False), "8 bits suffice for code=3"),
    (127, THC(8, 3, saturate=False), "8 bits suffice for code=2"),
    (128, THC(8, 2, saturate=False), "at most 127 ranks can do without, or saturate=True"),
]


def test_each_is_refused_with_what_is_possible() -> None:
    calls: list[tuple[str, Callable[[], object]]] = [
        (message, partial(made, **options)) for made, options, message in OPTIONS
    ]
    for ranks, aggregator, message in NARROW:
        calls.append((message, partial(aggregator.check_ranks, ranks)))
        named = [("p", torch.zeros(3, 4))]
        calls.append((message, partial(make_plan, named, Rules(aggregator), ranks)))
    for rules, shapes, message in PLANS:
        named = [(name, torch.zeros(shape)) for name, shape in shapes]
        calls.append((message, partial(make_plan, named, rules, 2)))
    faults = []
    for message, call in calls:
        error = caught(call)
        if not isinstance(error, ConfigError) or not re.search(message, str(error)):
            faults.append(f"{message}: {error!r}")
    assert not faults, "\n".join(faults)
