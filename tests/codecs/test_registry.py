"""The registry of codecs, its errors, and the output of `gradwire codec list`."""

from __future__ import annotations

import inspect
import math
import pickle
import re
import statistics
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest
import torch

from gradwire import aggregators as agg
from gradwire import codecs
from gradwire.aggregators import registry
from gradwire.codecs import QSGD, Codec, TopK, variants
from gradwire.errors import ConfigError
from gradwire.lang import show
from gradwire.lang.codec import code_lines


def test_names() -> None:
    assert codecs.get("identity") == codecs.Identity()
    assert codecs.get("fp16") == codecs.Cast("fp16")
    assert codecs.get("bf16") == codecs.Cast("bf16")
    assert codecs.get("qsgd", bits=2) == QSGD(bits=2)
    assert codecs.get("terngrad") == codecs.TernGrad()
    assert codecs.get(QSGD(bits=3)) == QSGD(bits=3)


def test_names_and_options_come_back() -> None:
    for name in codecs.REGISTRY:
        codec = codecs.get(name)
        assert codecs.name_of(codec) == name
        assert codecs.get(name, **codecs.options(codec)) == codec
        assert pickle.loads(pickle.dumps(codec)) == codec
        assert hash(codec) == hash(codecs.get(name))


def test_a_users_codec_has_its_class_name() -> None:
    @dataclass(frozen=True)
    class Mine(Codec):
        pass

    assert codecs.name_of(Mine()) == "Mine"


LEARNED = codecs.LearnedLevels(2, levels=(0.0, 0.5, 0.75, 1.0))

REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (QSGD, {}, r"codec=<class.*QSGD\(\.\.\.\), or one of the names identity"),
    (["qsgd"], {}, r"codec=\['qsgd'\]: give a codec object, or one of the names identity"),
    (None, {}, "codec=None: give a codec object"),
    ("qsdg", {}, "^unknown codec 'qsdg': (?!.*aggregator).*identity, fp16, bf16, fp8, qsgd, tern"),
    *(
        (name, {}, f"^{name} is an aggregator: it needs gw.attach or gw.register$")
        for name in registry.REGISTRY
        if name not in codecs.REGISTRY
    ),
    ("exact", {}, "unknown codec"),
    ("qsgd:bits", {}, "expected OPTION=VALUE, found 'bits'"),
    ("qsgd:bits=9", {}, "must be 1 to 8"),
    ("qsgd:color=red", {}, "no option 'color'"),
    (QSGD(), {"bits": 2}, "bits"),
    ("qsgd", {"bit": 4}, "'bit'.*bits, block, scale, rounding, metadata"),
    ("fp16", {"dtype": "bf16"}, "'dtype'.*takes none"),
    ("identity", {"bits": 4}, "'bits'.*takes none"),
    ("qsgd", {"bits": 9}, "bits=9.*1 to 8"),
    ("qsgd", {"bits": 0}, "bits=0.*1 to 8"),
    ("qsgd", {"bits": 2.5}, "bits=2.5"),
    ("qsgd", {"bits": True}, "bits=True"),
    ("qsgd", {"bits": 1, "scale": "max"}, "bits=1.*2 to 8"),
    ("qsgd", {"block": 0}, "block=0.*1 to 65536"),
    ("qsgd", {"block": 10**6}, "block=1000000"),
    ("qsgd", {"scale": "mean"}, "scale='mean'.*'minmax', 'max' or 'l2'"),
    ("qsgd", {"rounding": "up"}, "rounding='up'.*'stochastic' or 'nearest'"),
    ("qsgd", {"metadata": "fp16"}, "metadata='fp16'.*'bf16' or 'fp32'"),
    ("terngrad", {"bits": 9}, "bits=9.*1 to 8"),
    ("terngrad", {"form": "ternary", "bits": 3}, "bits=3.*2 for form='ternary'"),
    ("terngrad", {"form": "binary"}, "form='binary'.*'minmax' or 'ternary'"),
    ("onebit", {"block": 0}, "OneBit: block=0.*1 to 65536"),
    ("onebit", {"block": "all"}, "block='all'"),
    ("tbq", {"threshold": 0}, "threshold=0.*at least 1e-37"),
    ("tbq", {"threshold": float("nan")}, "threshold=nan.*: give a number"),
    ("tbq", {"threshold": 1e-45}, "threshold=1e-45"),
    ("learnedlevels", {"levels": 5}, "levels=5 must be 16 ascending"),
    ("threelc", {"sparsity": 2.0}, "sparsity=2.0.*at least 1 and below 2"),
    ("threelc", {"sparsity": 0.9}, "sparsity=0.9"),
    ("topk", {"density": 0.0}, "density=0.0.*above 0 and at most 1: use 1e-06 or more"),
    ("topk", {"density": True}, "density=True.*: give a number"),
    ("topk", {"density": np.True_}, "density=np.True_.*: give a number"),
    ("topk", {"density": np.array([0.5])}, r"density=array\(\[0.5\]\).*: give a number"),
    ("qsgd", {"bits": np.float64(4)}, r"bits=np.float64\(4.0\) must be a whole number"),
    ("topk", {"density": torch.empty((), device="meta")}, "density=tensor.*meta.*: give a number"),
    (
        "qsgd",
        {"bits": torch.empty((), device="meta")},
        "bits=tensor.*meta.* must be a whole number",
    ),
    ("qsgd", {"scale": np.zeros((), [("a", "i4")])[()]}, "scale=np.void.*'minmax', 'max' or 'l2'"),
    ("qsgd", {"bits": torch.nn.Parameter(torch.tensor(4.0))}, "bits=Parameter .* must be a whole"),
    ("topk", {"values": "bf16"}, "values='bf16'.*'fp16' or 'fp32'"),
    ("mstopk", {"density": 1.5}, "MSTopK: density=1.5.*: use 1$"),
    ("dgc", {"density": "1%"}, "DGC: density='1%'.*: give a number"),
    ("graddrop", {"values": "fp64"}, "GradDrop: values='fp64'"),
    ("hardthreshold", {"threshold": -1.0}, "HardThreshold: threshold=-1.0"),
    ("hardthreshold", {"density": 0}, "HardThreshold: density=0.*: use 1e-06 or more"),
    ("adacomp", {"block": 40_000}, "AdaComp: block=40000.*1 to 32768"),
    ("randomk", {"density": 1e-6}, "RandomK: density=1e-06.*at least 1.5"),
    ("randomk", {"density": 0.0}, "RandomK: density=0.0.*: use 1.52588e-05 or more"),
    ("randomk", {"unbiased": 1}, "RandomK: unbiased=1.*False or True"),
    ("fp8", {"block": 0}, "Float8: block=0.*1 to 65536"),
    ("randomshift", {"bits": 0}, "RandomShift: bits=0.*1 to 8"),
    ("learnedlevels", {"bits": 7}, "LearnedLevels: bits=7.*2 to 6"),
    ("rotated", {"rotation": "half"}, "rotation='half'.*'block' or 'full'"),
    ("rotated", {"block": 2.0}, "Rotated: block=2.0"),
    ("saturating", {"bits": 1}, "Saturating: bits=1.*2 to 8"),
    ("saturating", {"bits": 9}, "Saturating: bits=9.*2 to 8"),
    ("lowrank", {"rank": 0}, "LowRank: rank=0.*1 to 256"),
    ("lowrank", {"rank": 9, "columns": 8}, "rank=9 must be 1 to 8 for columns=8"),
    ("lowrank", {"values": "fp16"}, "values='fp16'.*'bf16' or 'fp32'"),
    *(
        ("learnedlevels", {"bits": 2, "levels": levels}, "4 ascending numbers")
        for levels in (
            (0.0, 0.5, 1.0), (0.0, 0.5, 0.4, 1.0), (-0.1, 0.5, 0.6, 1.0), (0.0, 0.5, 0.6, math.nan),
            (0.0, 0.5, 0.6, "1"),
        )
    ),
    (
        "learnedlevels",
        {"bits": 2, "levels": (0.0, 0.5, 0.6, 0.9), "rounding": "stochastic"},
        "end with 1",
    ),
]  # fmt: skip


def test_errors_name_what_is_allowed() -> None:
    for name, options, message in REFUSED:
        with pytest.raises(ConfigError, match=message):
            codecs.get(name, **options)
        if isinstance(name, str) and not options:  # a label of a wheel's kernels
            with pytest.raises(ConfigError, match=message):
                variants.prebuilt([name])
    with pytest.raises(ConfigError, match="Cast: dtype='fp8'"):
        codecs.Cast("fp8")


def test_options_are_plain_numbers_whatever_they_are_given_as() -> None:
    """Ranks compare codecs by their text, and plans in files are text."""
    for given, plain in (
        (TopK(np.float64(0.1)), TopK(0.1)),
        (TopK(np.float32(0.125)), TopK(0.125)),
        (TopK(torch.tensor(0.125)), TopK(0.125)),
        (TopK(1), TopK(1.0)),
        (TopK(np.int64(1)), codecs.get("topk:density=1")),
        (codecs.ThreeLC(1, np.array(80)), codecs.ThreeLC(1.0, 80)),  # type: ignore[arg-type]
        (QSGD(np.uint8(2), torch.tensor(64), np.str_("max")), QSGD(2, 64, "max")),  # type: ignore[arg-type]
        (codecs.RandomK(0.1, unbiased=np.True_), codecs.RandomK(0.1, unbiased=True)),  # type: ignore[arg-type]
        (codecs.LearnedLevels(2, levels=(0, np.float64(0.5), 0.75, 1)), LEARNED),
        (codecs.LearnedLevels(2, levels=torch.tensor(LEARNED.levels)), LEARNED),  # type: ignore[arg-type]
    ):
        assert given == plain, given
        assert repr(given) == repr(plain)
        for option in fields(given):  # type: ignore[arg-type]
            assert type(getattr(given, option.name)) in (int, float, bool, str, tuple)
    for name in ("lwtopk", "artopk", "globaltopk", "dgc"):
        made = registry.get(f"{name}:density=1")
        assert repr(made) == repr(registry.get(name, density=np.float32(1))), name
    text = np.str_
    aggregators: list[tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = [
        (agg.PowerSGD, (torch.tensor(2), np.True_, text("qr")), (2, True, "qr")),
        (agg.ARTopK, (1, np.array("auto"), text("layer"), text("fp32")),
         (1, "auto", "layer", "fp32")),
        (agg.THC, (np.uint8(6), torch.tensor(4), text("full"), np.int64(64), np.False_),
         (6, 4, "full", 64, False)),
        (agg.TopKC, (4, np.int64(64), text("bf16"), np.True_, text("model")),
         (4.0, 64, "bf16", True, "model")),
        (agg.LWTopK, (1, text("fp32")), (1.0, "fp32")),
        (agg.Compressed, (TopK(), text("ring"), np.array("model")), (TopK(), "ring", "model")),
        (agg.DeepGradientCompression, (0.1, 0, 1, np.int64(3), text("fp32")),
         (0.1, 0.0, 1.0, 3, "fp32")),
    ]  # fmt: skip
    for made, options, plains in aggregators:
        assert made(*options) == made(*plains)
        assert repr(made(*options)) == repr(made(*plains))
    for wrong in (np.zeros(1), np.array(["auto"]), np.zeros((), [("a", "i4")])[()]):
        with pytest.raises(ConfigError, match=r"^ARTopK: leader=.*, 'variance' or 'auto'$"):
            agg.ARTopK(leader=wrong)  # type: ignore[arg-type]


def test_listing() -> None:
    rows = {row["codec"]: row for row in codecs.listing()}
    assert list(rows) == list(codecs.REGISTRY)
    assert rows["qsgd"]["operators"] == ["random", "reduce", "map", "concat", "extract"]
    assert rows["qsgd"]["options"]["bits"] == 4
    assert rows["fp16"]["options"] == {}


# a cast is only concat and extract
TRIVIAL = ("identity", "fp16", "bf16")


def test_a_codec_takes_3_to_6_operators_and_20_lines() -> None:
    """HiPress Table 5, for encode and decode, as in `gradwire codec list`."""
    rows = codecs.listing()
    assert statistics.median(row["lines"] for row in rows) <= 20
    for row in rows:
        assert row["lines"] <= 25
        least = 2 if row["codec"] in TRIVIAL else 3
        assert least <= len(row["operators"]) <= 6, row["codec"]


def test_a_codec_has_20_lines_with_what_it_calls() -> None:
    """The same for all methods and properties, except the checks of options."""
    lines = {}
    for name, (made, _) in codecs.REGISTRY.items():
        parts = [getattr(part, "fget", part) for part in vars(made).values()]
        traced = [
            part for part in parts
            if inspect.isfunction(part) and not part.__name__.startswith("_")
            and inspect.getsourcefile(part) == inspect.getsourcefile(made)
        ]  # fmt: skip
        lines[name] = sum(code_lines(part) for part in traced)
    assert statistics.median(lines.values()) <= 20
    assert max(lines.values()) <= 40, lines


def test_every_stage_can_be_shown() -> None:
    for name in codecs.REGISTRY:
        codec = codecs.get(name)
        assert re.search("(store|patch) residual", show(codec, "ir")), name
        shown = "every target interprets" if name == "lowrank" else "int reduce_encode_ef("
        assert shown in show(codec, "c"), name
        with pytest.raises(ConfigError, match="ir, c, triton"):
            show(codec, "ptx")


@dataclass
class Loose(Codec):
    bits: int = 4


class Undecorated(Codec):
    pass


class Handmade(Codec):
    def __init__(self, bits: int = 4) -> None:
        self.bits = bits


class WithAnotherField(QSGD):
    more: int = 1


@dataclass(frozen=True, eq=False)
class ByIdentity(Codec):
    bits: int = 4


def test_a_codec_is_a_frozen_dataclass() -> None:
    for made in (Loose, Undecorated, Handmade, WithAnotherField, ByIdentity):
        with pytest.raises(ConfigError, match=rf"{made.__name__}: .*@dataclass\(frozen=True\)"):
            made()


def test_a_subclass_without_options_of_its_own_needs_no_decoration() -> None:
    class Renamed(QSGD):
        pass

    assert Renamed(bits=2) == Renamed(bits=2) != Renamed(bits=3)
