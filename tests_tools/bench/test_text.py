"""One grammar for methods with options, wherever they are named."""

from __future__ import annotations

import pytest

from gradwire import QSGD, PowerSGD, TopK, all_reduce, codecs
from gradwire.aggregators import Compressed, Dense, registry
from gradwire.codecs import variants
from gradwire.codecs.text import parse
from gradwire.errors import ConfigError
from gradwire_tools.bench.train import methods
from rooms.collectives import codec_of
from rooms.integrations import from_environment

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
    with pytest.raises(ConfigError, match="bits go with a codec's name"):
        registry.get("none", bits=4)


def test_numbers_of_bits_are_whole() -> None:
    with pytest.raises(ConfigError, match=r"bits=4\.0 must be a whole number, 1 to 8"):
        codecs.get("qsgd:bits=4.0")


def test_aggregators_have_options_too() -> None:
    assert registry.get("powersgd:rank=4") == PowerSGD(rank=4)
    assert registry.get("powersgd", rank=4) == PowerSGD(rank=4)


def test_text_that_is_no_method() -> None:
    texts = ("", ":", "qsgd:", ":bits=2", "qsgd:bits", "qsgd:bits=", "qsgd:=2", "qsgd::bits=2")
    for text in texts:
        with pytest.raises(ConfigError, match="expected"):
            parse(text)


def test_an_option_given_twice() -> None:
    with pytest.raises(ConfigError, match="'bits' is given twice"):
        parse("qsgd:bits=2:bits=3")
    for get in (codecs.get, registry.get):
        with pytest.raises(ConfigError, match="'bits' is given twice: in 'qsgd:bits=2' and as a"):
            get("qsgd:bits=2", bits=3)
