"""The laws that depend on the codec alone: unbiased, non-finite travels, residuals, sizes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from codec_calls import CODECS, DTYPES, UNFUSED, WIDTHS, call, drawn, gradient, round_trip, same
from gradwire import codecs
from gradwire.codecs import QSGD, Cast, Codec, LearnedLevels, TernGrad
from gradwire.codecs.qsgd import ROUNDINGS
from gradwire.lang import kernels, layout
from products import EXHAUSTIVE

FEW = (0, 1, 15, 16, 17)
BAD = [float("inf"), float("-inf"), float("nan")]
# codecs whose errors are within a step of a grid
STOCHASTIC: list[Codec] = [
    QSGD(),
    QSGD(bits=1, block=16),
    QSGD(bits=8, metadata="fp32"),
    QSGD(bits=3, scale="max", block=50),
    QSGD(bits=6, scale="l2"),
    QSGD(rounding="stochastic"),
    QSGD(bits=1, block=16, rounding="stochastic"),
    QSGD(bits=8, rounding="stochastic", metadata="fp32"),
    QSGD(bits=3, scale="max", rounding="stochastic"),
    TernGrad(),
    TernGrad(bits=5),
    TernGrad("ternary"),
]
UNBIASED: list[Codec] = [
    *STOCHASTIC,
    *(c for c in CODECS if codecs.name_of(c) in ("randomk", "randomshift", "rotated")),
    *(c for c in CODECS if isinstance(c, LearnedLevels) and c.rounding == "stochastic"),
]
ENTRIES = ("tbq", "topk", "dgc", "graddrop", "hardthreshold")
# codecs that work with error feedback
PARTIAL: list[Codec] = [
    *(c for c in CODECS if codecs.name_of(c) in ("onebit", *ENTRIES)),
    codecs.MSTopK(density=0.1, values="fp32"),
    codecs.ThreeLC(),
    codecs.ThreeLC(sparsity=1.75, block=33),
    codecs.AdaComp(block=100, density=0.1),
    codecs.get("randomk", density=0.1),
    *UNFUSED,
]
EVERY = list(dict.fromkeys([*CODECS, *WIDTHS, *UNBIASED, *PARTIAL]))
# codecs whose feedback is compiled; the others are variants of these
COMPILED = [*CODECS, *PARTIAL]
# an entry that is not finite is sent as such, and the others as they are
ENTRYWISE = ("identity", "fp16", "bf16", "saturating", "mstopk", *ENTRIES)
# constants are exact, since their metadata hold them
EXACT: list[Codec] = [
    codecs.get("identity"),
    QSGD(scale="max", rounding="stochastic", metadata="fp32"),
    TernGrad(),
    TernGrad("ternary"),
    *(c for c in CODECS if codecs.name_of(c) in ("randomshift", "learnedlevels")),
    *(c for c in WIDTHS if isinstance(c, QSGD)),
]


def grid_step(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    """Law: error <= one step of the grid, a little wider for the metadata's outward rounding."""
    assert isinstance(codec, (QSGD, TernGrad))
    block = codec.block if isinstance(codec, QSGD) else values.numel()
    steps = []
    for x in values.double().split(block):
        span = x.max() - x.min()
        if isinstance(codec, TernGrad):
            step = x.abs().max() if codec.form == "ternary" else span / (2**codec.bits - 1)
        elif codec.scale == "minmax":
            # bf16 rounds the lowest point by up to 2^-7 of itself, and the step by 2^-7
            lost = 2**-7 if codec.metadata == "bf16" else 2**-23
            step = (span + lost * x.abs().max()) / (2**codec.bits - 1) * (1 + lost)
        else:
            size = x.abs().max() if codec.scale == "max" else x.norm()
            step = size / codec.levels * (1 + 2**-6)
        steps.append(step.expand(len(x)))
    return torch.cat(steps) + values.abs().double() * 2**-22


# A law yields what is wrong with a codec's payloads of values of a dtype on a target.


def every_size_round_trips(codec: Codec, dtype: torch.dtype, target: str) -> Iterator[str]:
    block = layout(codec).block
    for n in (*FEW, block - 1, block, block + 1, 2 * block):
        decoded = round_trip(codec, gradient(n, dtype), target=target)
        if len(decoded) != n or not torch.isfinite(decoded).all():
            yield f"{n} values"


def zeros_decode_to_zeros(codec: Codec, dtype: torch.dtype, target: str) -> Iterator[str]:
    values = torch.zeros(1030, dtype=dtype)
    values[::3] = -0.0
    if not torch.equal(round_trip(codec, values, target=target), values):
        yield "not zero"


def constants_are_exact(codec: Codec, dtype: torch.dtype, target: str) -> Iterator[str]:
    if codec not in EXACT or dtype != torch.float32:
        return
    for value in (1.0, -3.14159, 1e-30, 1e30, -1e-12, 65504.0, 3e38):
        values = torch.full((300,), value)
        if not torch.equal(round_trip(codec, values, target=target), values):
            yield f"{value}"


def errors_are_within_one_step(codec: Codec, dtype: torch.dtype, target: str) -> Iterator[str]:
    if not isinstance(codec, (QSGD, TernGrad)):
        return
    values = gradient(3001, dtype)
    error = (round_trip(codec, values, target=target).double() - values.double()).abs()
    # values of half precision are rounded once more when they are stored
    rounding = {torch.float32: 0.0, torch.float16: 2**-11, torch.bfloat16: 2**-8}[dtype]
    step = grid_step(codec, values.float())
    size = torch.maximum(values.abs().double(), step)
    beyond = error > step + rounding * 2 * size + 6e-8 * (dtype == torch.float16)
    if beyond.any():
        yield f"{int(beyond.sum())} errors, the first at {int(beyond.nonzero()[0])}"


def non_finite_travels_in_its_block(codec: Codec, dtype: torch.dtype, target: str) -> Iterator[str]:
    """Law 4: what is scaled by Inf or NaN decodes to no finite value, the rest is untouched.

    What is scaled by it is a block, or the row; of a codec that sends entries, the entry itself.
    """
    lay, at = layout(codec, dtype), 1300
    clean = round_trip(codec, gradient(2500, dtype), target=target)
    for bad in BAD:
        values = gradient(2500, dtype)
        values[at] = bad
        decoded = round_trip(codec, values, target=target)
        if codecs.name_of(codec) in ENTRYWISE:
            touched = torch.arange(2500) == at
        elif isinstance(codec, codecs.AdaComp):  # the scale of all that is sent
            touched = decoded != 0
        elif codec in UNFUSED and isinstance(
            codec, codecs.Rotated
        ):  # what was rotated with it, and its
            touched = decoded.isnan()  # blocks, and what was rotated with those
            if not touched[:2048].all():
                yield f"{bad} among what was rotated with it"
        elif lay.splittable:
            touched = torch.arange(2500) // lay.block == at // lay.block
        else:
            touched = torch.ones(2500, dtype=torch.bool)
        if not touched[at] or torch.isfinite(decoded[touched]).any():
            yield f"{bad} becomes finite"
        if lay.splittable or isinstance(codec, codecs.TBQ):
            if not torch.equal(decoded[~touched], clean[~touched]):
                yield f"{bad} changes other blocks"
        elif not torch.isfinite(decoded[~touched]).all():  # it may take another entry's place
            yield f"{bad} spreads"


def nothing_is_lost(codec: Codec, dtype: torch.dtype, target: str) -> Iterator[str]:
    """Law 2: gradient + residual before == sent + residual after, to the last rounding."""
    if dtype != torch.float32 or (target == "c" and codec not in COMPILED):
        return
    residual = torch.zeros(2000)
    for step in range(20 if target == "c" else 5):
        values = gradient(2000, seed=step)
        made = {"key": step, "shared": step, "target": target}
        result = call(codec, "encode_ef", values, residual=residual, **made)
        memory = torch.full_like(values, 9.0)
        sent = call(codec, "decode", memory, payload=result.payload, **made).values
        before = values.double() + residual.double()
        after = sent.double() + result.residual.double()
        size = before.abs() + sent.abs() + result.residual.abs()
        if ((before - after).abs() > size * 2**-23).any():
            yield f"step {step}"
        residual = result.residual


def residuals_stay_clean(codec: Codec, dtype: torch.dtype, target: str) -> Iterator[str]:
    """Law 4: a non-finite step leaves every residual finite."""
    if target == "c" and codec not in COMPILED:
        return
    values, residual = gradient(2000, dtype), gradient(2000, seed=1)
    values[5], values[600] = float("nan"), float("-inf")
    result = call(codec, "encode_ef", values, residual=residual, target=target)
    if not torch.isfinite(result.residual).all():
        yield "not finite"


def feedback_sends_all_in_the_end(codec: Codec, dtype: torch.dtype, target: str) -> Iterator[str]:
    """For a constant gradient, the mean of what has been sent converges to it."""
    if codec not in PARTIAL or dtype != torch.float32 or target != "c":
        return
    values = torch.randn(2000, generator=torch.Generator().manual_seed(4)) * 1e-3
    tenth = 10 if codec in UNFUSED else 40  # of the steps; interpreted ones take milliseconds
    residual, errors = torch.zeros(2000), []
    for step in range(10 * tenth):
        made = {"key": step, "shared": step}
        residual = call(codec, "encode_ef", values, residual=residual, **made).residual
        errors.append(float(residual.norm() / values.norm()) / (step + 1))
    early, late = sum(errors[4 * tenth : 5 * tenth]), sum(errors[9 * tenth :])
    if not late < 0.75 * early < 0.5 * tenth:
        yield f"{early / tenth} is left after half of the steps, {late / tenth} after all"


LAWS = [
    every_size_round_trips,
    zeros_decode_to_zeros,
    constants_are_exact,
    errors_are_within_one_step,
    non_finite_travels_in_its_block,
    nothing_is_lost,
    residuals_stay_clean,
    feedback_sends_all_in_the_end,
]
# what target c does in half precision, lang/test_targets.py compares with eager
WAYS = [("c", torch.float32), *(("eager", dtype) for dtype in DTYPES)]


# of those with other options, one of 1 bit, and the others in exhaustive runs
OFTEN = [*CODECS, *UNFUSED, WIDTHS[0], WIDTHS[-1]]
HALF = WAYS[2:]


@pytest.mark.parametrize(
    ("number", "codec"),
    [pytest.param(*row, marks=[] if row[1] in OFTEN else [EXHAUSTIVE]) for row in enumerate(EVERY)],
    ids=str,
)
def test_every_codec_obeys_every_law(
    number: int, codec: Codec, pytestconfig: pytest.Config
) -> None:
    """On target eager in one dtype of half precision: in fp32 it gives the same bytes as c."""
    ways = WAYS if pytestconfig.getoption("exhaustive") else [WAYS[0], HALF[number % 2]]
    assert kernels(codec).target == "c"
    faults = [
        f"{law.__name__} on {target} in {dtype}: {fault}"
        for target, dtype in ways
        if dtype == torch.float32 or codec not in WIDTHS
        for law in LAWS
        for fault in law(codec, dtype, target)
    ]
    assert not faults, "\n".join([repr(codec), *faults])


def test_the_laws_cover_the_registry() -> None:
    every = {made for made, _ in codecs.REGISTRY.values()}
    assert every <= {type(codec) for codec in COMPILED}


def strays(codec: Codec, draws: int, n: int = 48) -> bool:
    """Law 3: whether the mean error over these draws is beyond 5 standard errors anywhere."""
    values = gradient(n, seed=3)
    error = drawn(codec, values, draws).double() - values.double()
    mean, variance = error.mean(0), error.var(0)
    # one draw in 10^4 of a step that is nearly never taken has no normal distribution
    step = grid_step(codec, values) if codec in STOCHASTIC else values.max() - values.min()
    floor = 8 * step / draws
    return bool((mean.abs() > 5 * (variance / draws).sqrt() + floor).any())


def test_stochastic_codecs_are_unbiased() -> None:
    """Over draws, element by element; and over many elements, where a common bias would add up."""
    full = codecs.Rotated("full", 4, 32)  # interpreted, which takes a millisecond per draw
    faults = [c for c in [*UNBIASED, full] if strays(c, 500 if c == full else 10_000)]
    values = torch.full((2**18,), 0.3)
    values[::2] = -0.55
    values[7::100] = 1.0
    for codec in UNBIASED:
        if codecs.name_of(codec) not in ("rotated", "randomshift"):
            error = (round_trip(codec, values) - values).double()
            if abs(error.mean()) > 4.5 * error.std() / len(error) ** 0.5 + 1e-8:
                faults.append(codec)
    assert not faults


def test_quantised_values_are_exact_to_the_precision_of_their_metadata() -> None:
    """Constants, and ranges from tiny to huge."""
    faults = []
    for bits in range(1, 9):
        for value in (1.0, 3.14159, -1e-20, 1e20):
            values = torch.full((300,), value)
            found = round_trip(QSGD(bits=bits), values, target="eager")
            error = float((found - values).abs().max() / abs(value))
            if error > (0.0 if value == 1.0 else 2**-7):
                faults.append((bits, value, error))
    unit = torch.rand(1000, generator=torch.Generator().manual_seed(1)) * 2 - 1
    for bits in range(2, 9):
        for metadata in ("bf16", "fp32"):
            for size in (1e-30, 1e-10, 1.0, 1e10, 1e30, 1.5e38, 3e38):
                # dithered values overflow above half the largest float32
                codec = QSGD(bits=bits, rounding=ROUNDINGS[size == 3e38], metadata=metadata)
                values = unit * size
                decoded = round_trip(codec, values, target="eager")
                error = (decoded.double() - values.double()).abs()
                within = (error <= grid_step(codec, values)).all()
                if not (within and decoded.double().std() > 0.3 * size):
                    faults.append((bits, metadata, size))
    assert not faults


def test_casts_are_exact_and_overflow_in_fp16_as_torchs_do() -> None:
    """bf16 saturates, which has the range of fp32; so does fp16 where a residual keeps the rest."""
    for codec in (Cast("fp16"), Cast("bf16")):
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[codec.dtype]
        exact = gradient(3000).to(dtype).float()
        exact = exact[torch.isfinite(exact)]
        assert torch.equal(round_trip(codec, exact), exact)
        largest = torch.finfo(dtype).max
        huge = torch.tensor([largest, -largest, 3.4028235e38, -3.4028235e38])
        ends = torch.tensor([largest, -largest] * 2)
        expected = ends if codec.dtype == "bf16" else huge.half().float()
        assert torch.equal(round_trip(codec, huge), expected)
        # every other value as torch rounds it
        values = gradient(3000)
        assert torch.equal(round_trip(codec, values), values.to(dtype).float())
    near = torch.tensor([65503.0, 65519.996, 65520.0, -65519.996, -65520.0, 131072.0, 3e38])
    most = near.clamp(-65504, 65504).half()
    zeros = torch.zeros(len(near))
    for target in ("eager", "c"):
        assert same(round_trip(Cast(), near, target=target), near.half().float())
        fed = call(Cast(), "encode_ef", zeros, residual=near, target=target)
        assert same(fed.payload.clone().view(torch.float16), most)
        assert same(fed.residual, near - most.float())
        given = call(Cast(), "encode_ef", near, residual=zeros, target=target)
        assert same(given.payload.clone().view(torch.float16), near.half())


def test_the_key_alone_changes_the_draw() -> None:
    values = gradient(1000)
    a, b, c = (round_trip(QSGD(), values, key=k) for k in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    nearest = QSGD(rounding="nearest")
    a, b = (round_trip(nearest, values, key=k, target="eager") for k in (1, 2))
    assert torch.equal(a, b)
