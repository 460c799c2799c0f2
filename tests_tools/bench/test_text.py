"""One grammar for methods with options, wherever they are named."""

from __future__ import annotations

from functools import partial

from command_line import refused
from gradwire import QSGD, PowerSGD, TopK, all_reduce, codecs
from gradwire.aggregators import Compressed, Dense, registry
from gradwire.codecs import variants
from gradwire.codecs.text import parse
from gradwire_tools.bench.train import methods
from rooms.backend import from_environment
from rooms.collectives import codec_of

TEXTS = {
    "qsgd": QSGD(),
    "qsgd:bits=2": QSGD(bits=2),
    "qsgd:bits=2:block=64": QSGD(bits=2, block=64),
    "qsgd:bits=2,block=64": QSGD(bits=2, block=64),
    " qsgd : bits = 2 , block=64": QSGD(bits=2, block=64),
    "topk:density=0.05": TopK(density=0.05),
}


def test_every_user_of_the_grammar_reads_the_same() -> None:
    for text, codec in TEXTS.items():
        assert codecs.get(text) == codec
        assert registry.get(text) == Compressed(codec)
        assert from_environment({"GRADWIRE_CODEC": text}).codec == codec
        for method in (f"gradwire:{text}", text):
            assert methods.parse(method).how()[0] == codec
        assert (text.split(":")[0].strip(), codec) in [
            (label.split(":")[0].strip(), found) for label, found in variants.prebuilt([text])
        ]


def test_none_is_no_compression_everywhere() -> None:
    assert registry.get("none") == Dense()
    assert from_environment({"GRADWIRE_CODEC": "none"}).codec is None
    assert codec_of(all_reduce, "none", {}) is None


def test_aggregators_have_options_too() -> None:
    assert registry.get("powersgd:rank=4") == PowerSGD(rank=4)
    assert registry.get("powersgd", rank=4) == PowerSGD(rank=4)


def test_what_is_no_method_is_refused() -> None:
    texts = ("", ":", "qsgd:", ":bits=2", "qsgd:bits", "qsgd:bits=", "qsgd:=2", "qsgd::bits=2")
    twice = "'bits' is given twice"
    refused(
        lambda call: call(),
        [
            *((partial(parse, text), "expected") for text in texts),
            (partial(parse, "qsgd:bits=2:bits=3"), twice),
            (partial(codecs.get, "qsgd:bits=2", bits=3), f"{twice}: in 'qsgd:bits=2' and as a"),
            (partial(registry.get, "qsgd:bits=2", bits=3), f"{twice}: in 'qsgd:bits=2' and as a"),
            (partial(codecs.get, "qsgd:bits=4.0"), r"bits=4\.0 must be a whole number, 1 to 8"),
            (partial(registry.get, "none", bits=4), "bits go with a codec's name"),
        ],
    )
