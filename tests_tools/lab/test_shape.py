"""The links have their described rate and latency, also together, and lose no packets.

test_settings.py checks without a clock what the links are set to.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from gradwire_tools.lab import Lab, Network, launch

PROBE = Path(__file__).with_name("network_probe.py")


def _netem() -> bool:
    with Lab(1, Network.parse("1gbit,1ms")) as lab:
        return lab.latency_by == "netem"


@pytest.mark.timing
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
    # Other load on the machine slows a measurement, and nothing speeds one up. So the
    # upper bounds hold each time, and the lower bounds hold for the better of two.
    for attempt in (1, 2):
        seen = measure(network, latency_by)
        print(net, latency_by, seen)
        assert seen["rtt_s"] >= 2 * network.latency_s
        assert seen["alone"] <= 1.05
        # Two senders share the receiver's rate; each clock starts at its own first byte.
        assert seen["shared"] <= 1.15
        # A queue that overflows loses hundreds; one or two may be counted at a stream's end.
        assert seen["lost"] <= 3
        quick = seen["rtt_s"] <= 2 * network.latency_s + 1e-3
        if quick and seen["alone"] >= 0.9 and seen["shared"] >= 0.85:
            return
        assert attempt == 1, seen


def measure(network: Network, latency_by: str | None) -> dict[str, float]:
    """The probe's results: `rtt_s`, `lost` segments, and rates as fractions of the network's."""
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
    rows = [json.loads(line.split("] ", 1)[1]) for line in said.getvalue().splitlines()]
    seen: dict[str, float] = {"lost": 0}
    for row in rows:
        for name, value in row.items():
            if name == "lost":
                seen["lost"] += value
            else:
                seen[name] = value if name == "rtt_s" else value / network.rate_bits_per_s
    return seen
