"""Curves and scenarios for tests: round numbers, no measurement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradwire import codecs
from gradwire.collectives import Options
from gradwire.lang import Codec
from gradwire.planner.kernel_costs import FORMS
from gradwire_tools.sim import Curves, Net, Scenario
from gradwire_tools.sim.curves import Curve, Software
from gradwire_tools.sim.models import Shapes
from gradwire_tools.sim.rank import Overheads

QSGD = codecs.get("qsgd")
IDENTITY = codecs.get("identity")
GRADDROP = codecs.get("graddrop")  # its payload length depends on data
GBIT = Net("1gbit,1ms", 1e9, 1e-3)


def priced(prices: Mapping[Codec, Curve], **costs: Any) -> Curves:
    """The same curve for all forms of a codec."""
    known = {repr(codec): dict.fromkeys(FORMS, curve) for codec, curve in prices.items()}
    return Curves("a test", 1, known, **costs)


def curves(call: float = 0.0, value: float = 0.0, payload: float = 0.0, **costs: Any) -> Curves:
    """The same curve for all forms of qsgd, identity and graddrop; all other costs are 0."""
    return priced(dict.fromkeys((QSGD, IDENTITY, GRADDROP), (call, value, payload)), **costs)


FREE = curves()
USUAL = curves(
    call=1e-5,
    value=3e-10,
    payload=1e-10,
    engine=Overheads(start=5e-4, task=5e-5, post=5e-6, check=4e-6, check_byte=2e-11),
    link=Software(overhead=4e-5, stack=2e-10, memory=1e10),
)


def scenario(ranks: int, model: str | Shapes, algorithm: str = "sra", **given: Any) -> Scenario:
    """QSGD at 1gbit,1ms; `given` are fields of Scenario or of Options."""
    options = {k: given.pop(k) for k in list(given) if k in Options.__dataclass_fields__}
    defaults: dict[str, Any] = {"net": GBIT, "codec": QSGD}
    collective = Options(algorithm=algorithm, **options)
    return Scenario(ranks=ranks, model=model, options=collective, **{**defaults, **given})
