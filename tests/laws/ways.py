"""The algorithms and codecs that laws of collectives are asserted for, and law 2 itself."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

from gradwire import Codec, ConfigError, Options, codecs
from gradwire.collectives import check_defined
from gradwire.lang import layout
from laws.drawing import Case


def hierarchical(nodes: tuple[int, ...], **how: Any) -> Options:
    return Options(algorithm="hierarchical", nodes=nodes, **how)


def anywhere(n: int) -> Options:
    draw = random.Random(n)
    nodes = tuple(draw.randrange(4) for _ in range(n))
    return hierarchical(nodes, inside=draw.choice(["codec", "full"]))


# The options of each algorithm, as a function of the number of ranks.
WAYS: dict[str, Any] = {
    "sra": lambda n: Options(),
    "ring": lambda n: Options(algorithm="ring"),
    "tree": lambda n: Options(algorithm="tree"),
    "servers": lambda n: Options(algorithm="parameter_server"),
    "3_servers": lambda n: Options(algorithm="parameter_server", partitions=3),
    "coordinated": lambda n: Options(coordinated=True),
    "coordinated_servers": lambda n: Options(
        algorithm="parameter_server", partitions=5, coordinated=True
    ),
    "all_gather": lambda n: Options(algorithm="all_gather"),
    "pairs": lambda n: hierarchical(tuple(r // 2 for r in range(n)), inside="full"),
    "in_turn": lambda n: hierarchical(tuple(r % 3 for r in range(n))),
    "one_machine": lambda n: hierarchical((7,) * n, inside="full"),
    "grid": lambda n: hierarchical(tuple(range(n)), between="grid"),
    "grid_of_pairs": lambda n: hierarchical(
        tuple(max(r, 1) for r in range(n)), between="grid", inside="full"
    ),
    "anywhere": anywhere,
}

CODECS: dict[str, Codec] = {
    **{name: codecs.get(name) for name in codecs.REGISTRY},
    "qsgd3": codecs.get("qsgd", bits=3, block=64, metadata="fp32"),
    "qsgd8": codecs.get("qsgd", bits=8, block=16, scale="max", rounding="nearest"),
    "qsgd2": codecs.get("qsgd", bits=2, scale="l2"),
    "stochastic": codecs.get("qsgd", rounding="stochastic"),
    "ternary": codecs.get("terngrad", form="ternary"),
    "topk": codecs.get("topk", density=0.05),
    "randomk": codecs.get("randomk", density=0.1),
    "hardthreshold": codecs.get("hardthreshold", threshold=2.0, density=0.1),
}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def defined(codec: str, algorithm: str, operation: str = "all_reduce") -> bool:
    try:
        check_defined(algorithm, CODECS[codec], operation)
    except ConfigError:
        return False
    return True


def kind(case: Case) -> Case:
    """The codec, as far as messages depend on it."""
    data_dependent = layout(CODECS[case["codec"]]).data_dependent
    return {"kind": "packed" if data_dependent else case["codec"] in ("identity", "qsgd")}


def lost(case: Case, brought: Any, reduced: torch.Tensor, kept: Any) -> Iterator[str]:
    """Law 2, in float64: gradients and residuals before are what was reduced, and the residuals
    after."""
    dtype, n = DTYPES[case["dtype"]], case["n"]
    # Results, and sums inside a machine, are rounded to the gradient's dtype.
    slack = torch.finfo(dtype).eps * 4 * n if dtype != torch.float32 else 1e-5
    total = reduced.double() * (n if case["op"] == "avg" else 1)
    if total.numel():
        off = float((total + kept - brought).abs().max())
        largest = max(1.0, float(total.abs().max()), float(brought.abs().max()))
        if not off <= slack * largest:
            yield f"{off} of {largest} is lost"
