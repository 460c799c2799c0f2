"""The links do what their description says: rate, latency, both at once, and no loss."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from gradwire.lab import Lab, Network, launch

PROBE = Path(__file__).with_name("network_probe.py")


def _netem() -> bool:
    with Lab(1, Network.parse("1gbit,1ms")) as lab:
        return lab.latency_by == "netem"


@pytest.mark.lab
@pytest.mark.parametrize(
    ("net", "latency_by"),
    [
        ("1gbit,1ms", "line"),
        ("200mbit,5ms", "line"),
        ("50mbit,20ms", "line"),
        ("500mbit", None),
        ("200mbit,5ms", "netem"),
    ],
)
def test_rate_and_latency(net: str, latency_by: str | None) -> None:
    if latency_by == "netem" and not _netem():
        pytest.skip("this kernel has no netem")
    network = Network.parse(net)
    payload = int(network.rate_bits_per_s / 8)  # a second's worth
    said = io.StringIO()
    codes = launch(
        [sys.executable, str(PROBE), str(payload)],
        3,
        network,
        timeout=30,
        stdout=said,
        latency_by=latency_by,
    )
    assert codes == [0, 0, 0], said.getvalue()
    rows = dict(line[6:].split("] ", 1) for line in said.getvalue().splitlines())
    seen = json.loads(rows["0"])
    print(net, latency_by, said.getvalue())
    assert 2 * network.latency_s <= seen["rtt_s"] <= 2 * network.latency_s + 1e-3
    assert 0.9 <= seen["alone"] / network.rate_bits_per_s <= 1.05
    # Two senders share the receiver's rate; each clock starts at its own first byte.
    assert 0.85 <= seen["shared"] / network.rate_bits_per_s <= 1.15
    # A queue that overflows loses hundreds; one or two may be the accounting's end of the stream.
    assert all(json.loads(rows[rank])["lost"] <= 3 for rank in "12")
