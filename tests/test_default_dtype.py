"""torch's default dtype changes nothing: tensors say their dtype, and results are bit-identical.

Kernels get memory by its address, so a tensor of the default dtype is not only a wrong result.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from averaging import Parameters, Shape, drawn, fed
from codec_calls import CODECS, UNFUSED, call, gradient, key_of
from gradwire.aggregators import (
    THC,
    Aggregator,
    ARTopK,
    Compressed,
    DeepGradientCompression,
    Dense,
    GlobalTopK,
    LWTopK,
    PowerSGD,
    TopKC,
)
from gradwire.aggregators import registry as aggregators
from gradwire.codecs import (
    QSGD,
    HardThreshold,
    LearnedLevels,
    LowRank,
    MSTopK,
    OneBit,
    RandomK,
    RandomShift,
    TopK,
)
from gradwire.controllers import Budget, CodecBits, Mixture, losses, tables
from gradwire.controllers import registry as policies
from gradwire.engine import Communicator
from gradwire.lang.contraction import worst_error
from ranks import as_threads
from test_house import ROOT, modules, parsed

MAKERS = {
    "arange", "as_tensor", "asarray", "complex", "empty", "empty_permuted", "empty_strided", "eye",
    "frombuffer", "full", "linspace", "logspace", "normal", "ones", "rand", "randint", "randn",
    "randperm", "range", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
}  # fmt: skip
DEFAULTS = ("get_default_dtype", "set_default_dtype", "set_default_tensor_type")


def faults(node: ast.Call, of_torch: set[str]) -> str | None:
    """What a call has of torch's default dtype; `of_torch`: names imported from torch."""
    called = node.func
    if isinstance(called, ast.Attribute) and ast.unparse(called.value) == "torch":
        name = called.attr
    elif isinstance(called, ast.Name) and called.id in of_torch:
        name = called.id
    else:
        return None
    if name in MAKERS and not any(one.arg == "dtype" for one in node.keywords):
        return f"torch.{name} without dtype="
    if name in DEFAULTS or name.endswith("Tensor"):
        return f"torch.{name}"
    branches = [one.operand if isinstance(one, ast.UnaryOp) else one for one in node.args[1:]]
    if name == "where" and branches and all(isinstance(one, ast.Constant) for one in branches):
        return "torch.where of two numbers"
    return None


def test_every_tensor_says_its_dtype() -> None:
    found = []
    for path in modules().values():
        nodes = list(ast.walk(parsed(path)))
        imports = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.module == "torch"]
        named = {alias.asname or alias.name for n in imports for alias in n.names}
        for node in nodes:
            if isinstance(node, ast.Call) and (what := faults(node, named)):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {what}")
    assert not found, "\n".join(found)


def under(default: torch.dtype, results: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    torch.set_default_dtype(default)
    try:
        return results()
    finally:
        torch.set_default_dtype(torch.float32)


@cache
def expected(results: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    return under(torch.float32, results)


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_alike, a, b))
    if isinstance(a, torch.Tensor):
        a, b = a.contiguous(), b.contiguous()
        same = (a.dtype, a.shape) == (b.dtype, b.shape)
        return same and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
    return bool(a == b)


VALUES, RESIDUAL = gradient(1100), gradient(1100, seed=1)


def coded() -> dict[str, Any]:
    """What forms of every codec write, on the target that defines it; and what is learned, or
    measured, of codecs."""
    found: dict[str, Any] = {}
    given: dict[str, Any] = {"target": "eager", "residual": RESIDUAL}
    for codec in (*CODECS, *UNFUSED, MSTopK()):
        first, *peers = (
            call(codec, "encode", VALUES, key=key_of(n), **given).payload for n in range(3)
        )
        summed = {"peers": peers, "origins": [1, 2]}
        for form in ("encode_ef", "decode", "decode_add", "reduce_encode_ef"):
            more = summed if form == "reduce_encode_ef" else {}
            made = call(codec, form, VALUES, payload=first, factor=0.5, **given, **more)
            found[f"{form} of {codec!r}"] = made.values, made.residual, made.payload
    for codec in (OneBit(), TopK(), QSGD(bits=2)):
        found[f"worst error of {codec!r}"] = worst_error.__wrapped__(codec)
    for rounding in ("nearest", "stochastic"):
        learned = LearnedLevels.learn(VALUES, 3, 64, rounding, steps=20)
        found[f"levels, {rounding}"] = learned.grid
    return found


AGGREGATORS: list[Aggregator] = [
    *(made() for made in aggregators.REGISTRY.values()),
    Dense(),
    Dense(torch.float16),
    Compressed(QSGD(bits=2)),
    Compressed(OneBit()),
    Compressed(RandomK(0.1)),
    Compressed(LowRank(2, columns=20)),
    Compressed(HardThreshold(1.5, 0.2), "all_gather"),
    PowerSGD(2, warm=False, orthogonal="qr"),
    ARTopK(0.05, "variance"),
    ARTopK(0.05, "auto", "layer", "fp32"),
    LWTopK(0.05, "fp32", "model"),
    GlobalTopK(0.05),
    TopKC(bits=4, chunk=16, permuted=True),
    THC(rotation="full", chunk=32),
    DeepGradientCompression(0.05, clip=1.0, warmup=2),
]
SHAPE: Shape = (20, 30)
GRADIENTS = [
    [drawn([SHAPE] * len(AGGREGATORS), rank, step) for step in range(3)] for rank in (0, 1)
]


def averaged() -> dict[str, Any]:
    """Averages and states after three steps of every aggregator, on both ranks."""

    def body(comm: Communicator) -> dict[str, Any]:
        mine = Parameters(comm, [SHAPE] * len(AGGREGATORS), [*map(fed, AGGREGATORS)])
        scopes = [[i] for i in range(len(AGGREGATORS))]
        found = [mine.average(gradients, scopes) for gradients in GRADIENTS[comm.rank]]
        kept = [[*m.state.values(), *m.metrics.values()] for m in mine.members]
        return {
            f"{a}, rank {comm.rank}": (averages, states)
            for a, averages, states in zip(AGGREGATORS, zip(*found, strict=True), kept, strict=True)
        }

    return {case: one for of_rank in as_threads(2, body) for case, one in of_rank.items()}


NAMED = [(f"{shape}", drawn([shape], 0, 0)[0]) for shape in [(64, 40), (40, 4), (300,)]]


def decided() -> dict[str, Any]:
    """Error tables, and what every policy chooses by them. (Bayes needs a package, and reads the
    same tables.)"""
    found: dict[str, Any] = {}
    for family in (Mixture(), CodecBits(RandomShift())):
        layers = tables(NAMED, family)
        found[f"{family}"] = [(one.norm, one.top_norm, one.errors.tolist()) for one in layers]
        for name, policy in policies.REGISTRY.items():
            if name != "bayes":
                found[f"{name}, {family}"] = (
                    policy().propose(layers, Budget.of(layers, 1.0)).choices
                )
    return found


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("results", [coded, averaged, decided])
def test_results_are_the_same(
    results: Callable[[], dict[str, Any]], default: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "_WHOLE", 16)  # as of large matrices
    found, right = under(default, results), expected(results)
    assert found.keys() == right.keys()
    assert not [case for case in right if not _alike(found[case], right[case])]
