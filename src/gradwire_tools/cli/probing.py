"""`gradwire probe`."""

from __future__ import annotations

import os
from typing import Annotated, Any

from typer import Option

from gradwire_tools.cli import options
from gradwire_tools.cli.options import Text, Whole, names, number
from gradwire_tools.cli.output import output


def probe(
    ranks: Annotated[Whole, Option(help="Number of ranks; 2, or as torchrun has started.")] = None,
    net: options.Net = "none",
    codec_name: Annotated[
        Text, Option("--codec", help="Of which kernels are measured; qsgd,topk.")
    ] = None,
    seconds: Annotated[float, number("That the links should take; slow ones take longer.")] = 5.0,
    fresh: Annotated[bool, Option("--fresh", help="Measure anew.")] = False,
    json_file: options.Json = None,
) -> None:
    """Latency and bandwidth between all ranks, and what codecs' kernels cost here.

    Under torchrun it joins the ranks that torchrun has started, so it measures the network between
    them. Results are kept: a later call shows them, until --fresh measures anew.
    """
    from gradwire_tools.bench.network import probe as probing

    chosen = names("--codec", codec_name) or probing.CODECS
    wanted = probing.plan(ranks, net, chosen, seconds, fresh)
    if wanted.world.joins and os.environ["RANK"] != "0":
        wanted.measured()  # rank 0 has the rows
        return
    with output(json_file) as out:
        rows = out.measured(probing.run(wanted), [])
        tables = {
            "pair": ["from", "to", "alpha", "beta", "bandwidth"],
            "send": ["bytes", "seconds"],
            "curve": ["codec", "form", "call_seconds", "ms_per_million", "ms_per_million_payload"],
        }
        for part, columns in tables.items():
            out.table([_plain(row) for row in rows if row["part"] == part], columns)
        if rows[0]["cached"]:
            out.say(
                f"Links and sends are from the cache, as measured at {rows[0]['measured']}; "
                "--fresh measures anew."
            )


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """With the units of people: a kernel's costs by value are in seconds."""
    per_value = {"ms_per_million": "value", "ms_per_million_payload": "payload"}
    costs = {new: row[key] * 1e9 for new, key in per_value.items() if key in row}
    return {**row, **costs, **({"call_seconds": row["call"]} if "call" in row else {})}
