"""Network: parsing is the inverse of str, and other text is a clear error."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from command_line import refused
from gradwire_tools.lab import Network

TEXTS = [
    ("1gbit,1ms", 1e9, 1e-3, "1gbit,1ms"),
    ("200mbit,5ms", 2e8, 5e-3, "200mbit,5ms"),
    ("0.5GBIT, 500us", 5e8, 5e-4, "500mbit,500us"),
    ("2500mbit,1500us", 2.5e9, 1.5e-3, "2.5gbit,1.5ms"),
    ("64000bit,1s", 64e3, 1.0, "64kbit,1s"),
    ("10gbit", 1e10, 0.0, "10gbit,0ms"),
    ("none", math.inf, 0.0, "none"),
]


def test_reads_and_writes() -> None:
    for text, rate, latency, spelled in TEXTS:
        net = Network.parse(text)
        assert (net.rate_bits_per_s, net.latency_s, str(net)) == (rate, latency, spelled)
        assert net.shaped == (text != "none")


@given(st.integers(64 * 10**3, 10**11), st.integers(0, 10**10))
def test_text_round_trips(rate: int, latency_ns: int) -> None:
    net = Network(float(rate), latency_ns / 10**9)
    assert Network.parse(str(net)) == net
    assert net.latency_ns == latency_ns


FAULTS = [
    ("", "not a number"),
    ("fast", "not a number"),
    ("1gbit,", "latency '' is not"),
    ("1gbit,1ms,1", "3 parts"),
    ("1gbps,1ms", "unit 'gbps' is not one of gbit"),
    ("1gbit,1min", "unit 'min' is not one of s"),
    ("-1gbit,1ms", "not a number"),
    ("1kbit,1ms", "from 64kbit to 100gbit"),
    ("0gbit,1ms", "from 64kbit"),
    ("1gbit,11s", "up to 10s"),
    ("none,1ms", "rate 'none' is not"),
]


def test_faults_are_named() -> None:
    refused(Network.parse, FAULTS)
    refused(Network.parse, [(text, "RATE,LATENCY") for text, _ in FAULTS])
