"""The table of codecs, its errors, and what `gradwire codec list` shows."""

from __future__ import annotations

import pickle
import re

import pytest

from gradwire import codecs
from gradwire.codecs import QSGD, Cast, Codec, Identity, TernGrad
from gradwire.errors import ConfigError
from gradwire.lang import show


def test_names() -> None:
    assert codecs.get("identity") == Identity()
    assert codecs.get("fp16") == Cast("fp16")
    assert codecs.get("bf16") == Cast("bf16")
    assert codecs.get("qsgd", bits=2) == QSGD(bits=2)
    assert codecs.get("terngrad") == TernGrad()
    assert codecs.get(QSGD(bits=3)) == QSGD(bits=3)


@pytest.mark.parametrize("name", codecs.REGISTRY)
def test_names_and_options_come_back(name: str) -> None:
    codec = codecs.get(name)
    assert codecs.name_of(codec) == name
    assert codecs.get(name, **codecs.options(codec)) == codec
    assert pickle.loads(pickle.dumps(codec)) == codec
    assert hash(codec) == hash(codecs.get(name))


def test_a_codec_of_ones_own_has_its_class_as_name() -> None:
    class Mine(Codec):
        pass

    assert codecs.name_of(Mine()) == "Mine"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("qsdg", {}, "'qsdg'.*identity, fp16, bf16, qsgd, terngrad"),
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
    ],
)
def test_errors_name_what_is_allowed(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        codecs.get(name, **options)


def test_options_go_with_a_name() -> None:
    with pytest.raises(ConfigError, match="bits"):
        codecs.get(QSGD(), bits=2)
    with pytest.raises(ConfigError, match="Cast: dtype='fp8'"):
        Cast("fp8")


def test_listing() -> None:
    rows = {row["codec"]: row for row in codecs.listing()}
    assert list(rows) == list(codecs.REGISTRY)
    assert rows["qsgd"]["operators"] == ["random", "reduce", "map", "concat", "extract"]
    assert rows["qsgd"]["options"]["bits"] == 4
    assert rows["fp16"]["options"] == {}
    # HiPress Table 5: a codec takes 3 to 6 operators and about 20 lines
    for row in rows.values():
        assert row["lines"] <= 25
        assert len(row["operators"]) <= 6


@pytest.mark.parametrize("name", codecs.REGISTRY)
def test_every_stage_can_be_shown(name: str) -> None:
    codec = codecs.get(name)
    assert re.search("(store|patch) residual", show(codec, "ir"))
    shown = "every target interprets" if name == "lowrank" else "int reduce_encode_ef("
    assert shown in show(codec, "c")
    with pytest.raises(ConfigError, match="ir, c"):
        show(codec, "triton")
