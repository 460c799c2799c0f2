"""Rows as benchmarks write them, for tests of the report; made up where bench/results has none."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "bench" / "results"
METHODS = ("torch-fp32", "torch-fp16-hook", "gradwire-qsgd4")
RUN = {
    "command": "gradwire bench train --seeds 0", "gradwire": "0.1.0", "commit": None,
    "machine": "a machine", "torch": "2.13.0", "python": "3.11.7", "load": 0.5,
    "date": "2026-01-01T00:00:00+00:00",
}  # fmt: skip


def stored(name: str, count: int = 1) -> list[dict[str, Any]]:
    """The first rows of a file of bench/results."""
    with (RESULTS / f"{name}.jsonl").open() as lines:
        return [json.loads(line) for line in itertools.islice(lines, count)]


def train_rows(
    net: str = "300mbit,1ms",
    step: float = 0.2,
    spread: float | None = 0.05,
    losses: tuple[float, ...] = (3.0,),
    baseline: tuple[float, ...] | None = None,
    composed: bool = False,
) -> list[dict[str, Any]]:
    """Rows of `bench train`: gradwire takes `step` per step, with quartiles `spread` around it, and
    ends with `losses`, one per seed; the others with `baseline`."""
    common = {"task": "gpt", "net": net, "ranks": 4, "parameters": 10, "metric_name": "bits"}
    common["run"] = RUN
    seconds = dict(zip(METHODS, (1.0, 0.5, step), strict=True))
    seeds = range(len(losses))
    last = {name: baseline or (3.0,) * len(losses) for name in METHODS} | {METHODS[2]: losses}
    rows: list[dict[str, Any]] = [
        {
            **common, "composed": composed, "row": "evaluation", "method": method, "seed": seed,
            "step": at, "seconds": at * seconds[method], "metric": 1.0,
            "loss": 5.0 + (last[method][seed] - 5.0) * at / 20, "wire_bytes": at,
            "link_bytes": None, "peak_extra_bytes": None,
        }
        for method in METHODS
        for seed in seeds
        for at in (0, 10, 20)
    ]  # fmt: skip
    for method in METHODS:
        whole = seconds[method]
        times = [20 * whole if loss <= 3.03 else None for loss in last[method]]
        summary = {
            **common, "composed": composed, "row": "summary", "method": method,
            "seeds": list(seeds), "steps": 20, "target": 3.03, "target_from": "torch-fp32",
            "time_to_target": None if None in times else 20 * whole,
            "time_to_target_by_seed": times, "final_metric": 1.0,
            "final_loss": sum(last[method]) / len(losses), "final_loss_by_seed": list(last[method]),
            "seconds": 20 * whole, "step_seconds": whole,
            "step_seconds_quartiles": spread and [whole - spread, whole + spread],
            "ideal_step_seconds": 0.1, "kernel_seconds": 0.03 if method == METHODS[2] else None,
            "exposed_seconds": 0.08 if method == METHODS[2] else None,
            "wire_bytes": 2_350_000_000, "link_bytes": None, "peak_extra_bytes": None,
        }  # fmt: skip
        rows.append(summary)
    return rows


_SHARDED = {"torch-fp32": "fsdp-fp32", "torch-fp16-hook": "fsdp-bf16", METHODS[2]: "qsdp:w=8:g=8"}


def sharded_rows(mixed: float = 0.4, **given: Any) -> list[dict[str, Any]]:
    """Rows of `bench train --sharded`: fsdp-mixed takes `mixed` of fsdp-bf16's 0.5 s per step and
    more bytes, qsdp a sixth of its bytes; other arguments as of `train_rows`."""
    found = []
    for row in train_rows(**given):
        more = {"sharded": True, "policy": "param fp32, reduce fp32", "accumulate": 1}
        sent = {"torch-fp32": 4, "torch-fp16-hook": 2}.get(row["method"], 1) * 600_000_000
        kinds = {"weights_wire_bytes": 2 * sent // 3, "gradients_wire_bytes": sent // 3}
        mine = {**row, **more, **kinds, "wire_bytes": sent, "method": _SHARDED[row["method"]]}
        found.append(mine)
        if mine["method"] == "fsdp-bf16":
            found.append(_mixed(mine, mixed))
    return found


def _mixed(row: dict[str, Any], step: float) -> dict[str, Any]:
    """A row of fsdp-bf16 as fsdp-mixed's, which takes `step` seconds per step."""
    sent = {"wire_bytes": 2_000_000_000, "weights_wire_bytes": 1_600_000_000}
    kinds = {**sent, "gradients_wire_bytes": 400_000_000}
    return {**scaled(row, step / 0.5), **kinds, "method": "fsdp-mixed"}


def scaled(row: dict[str, Any], scale: float) -> dict[str, Any]:
    """A row of `bench train` with times that are as many times as long."""
    found = dict(row)
    for key in ("seconds", "step_seconds", "time_to_target"):
        if row.get(key) is not None:
            found[key] = row[key] * scale
    for key in ("step_seconds_quartiles", "time_to_target_by_seed"):
        if row.get(key):
            found[key] = [None if one is None else one * scale for one in row[key]]
    return found


TRIED = [
    {"setting": "qsgd by sra", "seconds": 0.1, "expected_seconds": 0.11, "used": True},
    {"setting": "bf16 by sra", "seconds": 12.0, "expected_seconds": None, "used": False},
]
DECISION: dict[str, Any] = {
    "row": "decision", "task": "gpt", "task_options": {}, "net": "300mbit,1ms", "ranks": 4,
    "parameters": 10, "method": "auto", "seed": 0, "step": 9, "line": "bf16 by sra <measured>",
}  # fmt: skip
COMPARED: dict[str, Any] = {
    "row": "validation", "task": "gpt", "task_options": {}, "net": "300mbit,1ms", "ranks": 4,
    "parameters": 10, "method": "gradwire-qsgd4", "steps": 60, "composed_seconds": 9.8,
    "whole_seconds": 10.0, "error": -0.02, "composed_time_to_target": 8.0,
    "whole_time_to_target": 8.1, "composed_final_loss": 3.01, "whole_final_loss": 3.01,
}  # fmt: skip
_PROBED = {"ranks": 2, "net": "1gbit,1ms", "cached": True}
_LINK = {**_PROBED, "measured": "2026-01-01T00:00:00"}
PROBED: list[dict[str, Any]] = [
    {"part": "pair", "from": 0, "to": 1, "alpha": 1e-3, "beta": 8e-9, "bandwidth": 1e9, **_LINK},
    {"part": "pair", "from": 1, "to": 0, "alpha": 2e-3, "beta": 4e-9, "bandwidth": 2e9, **_LINK},
    {"part": "send", "bytes": 1000, "seconds": 1e-3, **_LINK},
    {"part": "send", "bytes": 1_000_000, "seconds": 9e-3, **_LINK},
    *(
        {
            "part": "curve", "codec": "qsgd:bits=4", "form": form, "call": 1e-5, "value": 1e-9,
            "payload": 2e-9, "threads": 1, **_PROBED,
        }
        for form in ("encode", "decode", "decode_add")
    ),
]  # fmt: skip
CHOSEN, ABLATED, AGGREGATED = (stored(name)[0] for name in ("planner", "ablation", "aggregators"))
CHECKED, KERNEL = (stored("2026-11-26-nvidia-h100", 200)[at] for at in (0, 141))
ERRORS = stored("error-gain", 4)  # of two methods, without and with error feedback
LAYERS = [
    {**ERRORS[0], "row": "layer", "layer": layer, "nmse": nmse, "wire_bytes": None}
    for layer, nmse in (("wte.weight", 0.014), ("head.weight", 0.5))
]
AGGREGATORS = [
    {**AGGREGATED, "method": "torch-powersgd:rank=4", "seconds": 0.05},
    {**AGGREGATED, "method": "powersgd:rank=4", "orthogonal_share": 0.25},
]
_PLANS = [  # uniform and lgreco around two references; of two layers
    {**row, "bits_by_layer": dict(list(row["bits_by_layer"].items())[:2])}
    for row in stored("adapt-layers", 8)
    if row["policy"] in ("uniform", "lgreco")
]
SEEDED = {**_PLANS[0], "at": None, "sigma": 2.0, "seed": 0}
UNSOLVED = {
    **_PLANS[0],
    **dict.fromkeys(
        ("ratio", "uniform_ratio", "of_uniform", "error", "budget", "error_l2", "error_squared",
         "global_error", "solve_seconds", "bits_by_layer")
    ),
    "policy": "bayes", "fallback": "bayes needs optuna",
}  # fmt: skip
ADAPTED = [
    *_PLANS, {**_PLANS[0], "policy": "accordion", "of_uniform": 1.5, "budget": None},
    {**_PLANS[0], "policy": "threshold", "of_uniform": 0.9, "bits_by_layer": None}, UNSOLVED,
]  # fmt: skip


def error_row(method: str, **given: Any) -> dict[str, Any]:
    return {**ERRORS[0], "method": method, **given}


COLLECTIVE: dict[str, Any] = {
    "method": "gradwire-qsgd4", "algorithm": "sra", "transport": "torch_p2p", "ranks": 4,
    "per_node": 1, "net": "1gbit,1ms", "numel": 25_000_000, "seconds": 0.2,
    "seconds_quartiles": [0.19, 0.22], "wire_bytes": 19_000_000, "limit_seconds": 0.15,
    "of_limit": 0.75, "nmse": 0.01,
}  # fmt: skip
SIMULATED: dict[str, Any] = {
    "method": "gradwire:qsgd", "codec": "qsgd", "algorithm": "sra", "ranks": 4, "per_node": 1,
    "net": "1gbit,1ms", "model": "resnet50", "numel": 25_000_000, "seconds": 0.3,
    "wire_bytes": 19_000_000, "limit_seconds": 0.2, "backward_seconds": 0.0, "buckets": 5,
    "messages": 60, "machine": "a processor",
}  # fmt: skip
SWEPT = [
    {**SIMULATED, "ranks": n, "sweep": "ranks", "value": n, "seconds": n / 10} for n in (2, 8, 32)
]
SIMULATED_OUTER: dict[str, Any] = {
    "outer": True, "method": "outer:average:every=30", "model": "gpt2", "numel": 124_000_000,
    "algorithm": "sra", "ranks": 4, "per_node": 1, "net": "1gbit,1ms", "seconds": 0.4,
    "forward_seconds": 0.1, "backward_seconds": 0.2, "every": 30, "delay": 1, "needed_delay": 12,
    "meeting_seconds": [3.2], "meeting_bytes": [370_000_000], "hidden_seconds": 0.3,
    "exposed_seconds": 2.9, "wire_bytes": 370_000_000, "gain": 16.0, "limit_seconds": 0.39,
    "machine": "a processor",
}  # fmt: skip
SIMULATED_SHARDED: dict[str, Any] = {
    "sharded": True, "method": "qsdp:w=8:g=8", "model": "gpt2", "numel": 124_000_000,
    "algorithm": "sra", "ranks": 4, "per_node": 1, "net": "1gbit,1ms", "groups": 14,
    "seconds": 2.3, "forward_seconds": 0.1, "backward_seconds": 0.2, "blocking": False,
    "compute_seconds": 0.15, "wire_bytes": 250_000_000, "weights_wire_bytes": 160_000_000,
    "gradients_wire_bytes": 90_000_000, "ratio": 4.0, "limit_seconds": 2.0, "of_limit": 0.87,
    "messages": 500, "exact": True, "machine": "a processor",
}  # fmt: skip
VALIDATED: dict[str, Any] = {
    "ranks": 2, "net": "1gbit,1ms", "method": "gradwire:qsgd", "algorithm": "sra",
    "numel": 2_500_000, "measured_seconds": 0.1, "simulated_seconds": 0.11, "error": 0.1,
    "of_limit": 0.5, "runs": 2, "spread": 0.2,
}  # fmt: skip
TRANSPORT = [
    {"transport": name, "bytes": size, "latency_us": us * size / 64, "gbps": 1.5}
    for name, us in (("shm", 2.0), ("gloo", 30.0))
    for size in (64, 4096)
]
PROFILE = [
    {"method": "gradwire-qsgd4", "part": part, "seconds": 0.001, "steps": 10, "ranks": 2,
     "net": "none", "numel": 6_553_600}
    for part in ("hook", "kernels")
]  # fmt: skip
DOCTOR: list[dict[str, Any]] = [
    {"part": "gradwire", "available": True, "detail": "0.1.0"},
    {"part": "network", "available": True, "detail": "100 Mbit/s", "ranks": 2,
     "net": "100mbit,1ms", "card": "eth0", "card_bits_per_s": 1e9, "bandwidth": 1e8,
     "alpha": 1e-3, "slowest": [0, 1]},
    {"part": "kernels", "available": True, "detail": "12 ms per step", "codec": "qsgd:bits=4",
     "numel": 5_000_000, "kernel_seconds": 0.012},
    *(
        {"part": f"step {method}", "available": True, "detail": "a step", "method": method,
         "ranks": 2, "net": "100mbit,1ms", "numel": 5_000_000, "step_seconds": step,
         "compute_seconds": 0.1, "communication_seconds": step, "exposed_seconds": step - 0.1,
         "turn_seconds": [step, 1.1 * step, 0.9 * step]}
        for method, step in zip(METHODS, (1.7, 0.9, 0.3), strict=True)
    ),
    {"part": "verdict", "available": True, "detail": "Compression pays here: <so>."},
]  # fmt: skip
RECORDED: dict[str, Any] = {
    "task": "gpt", "at": 100, "steps": 8, "ranks": 4, "numel": 10, "loss": 2.5,
    "gradient_norm": 0.5, "nbytes": 1280, "seconds": 1.5, "output": "recorded", "run": RUN,
}  # fmt: skip
UNKNOWN = [{"x": 1, "y": None}, {"a": [1, 2], "b": True}]
EVERYTHING: list[dict[str, Any]] = [
    *train_rows(), DECISION, COMPARED, *ERRORS, *LAYERS, *AGGREGATORS, COLLECTIVE, KERNEL,
    *SWEPT, VALIDATED, *TRANSPORT, *PROFILE, *DOCTOR, RECORDED, CHECKED, *UNKNOWN,
]  # fmt: skip
SHAPES = (  # kinds of rows that no file has, and parts of sections
    *EVERYTHING, *ADAPTED, *PROBED, *train_rows("1gbit,1ms", losses=(3.0, 3.01, 3.02)),
    {**DECISION, "step": 1009, "line": "qsgd:bits=4 by ring"}, {**DECISION, "method": "policy=it"},
    {**COMPARED, "method": "torch-fp32", "error": 0.25},
    ABLATED, {**ABLATED, "part": "b", "cut": -0.25},
    *(
        error_row(f"qsgd:bits={b}", at=at, packed_bits=b, nmse=at / 1e3)
        for b in (3, 5) for at in (1, 3)
    ),
    *(error_row(f"codec{at}", packed_bits=1 + at) for at in range(12)),
    error_row("far", nmse=1.3), error_row("thc", nmse_of_sum=0.1),
    error_row("thc", error_feedback=True, nmse_of_sum=0.2),
    {**AGGREGATED, "seconds": -0.001, "ms_per_million": -0.2, "ranks": 4}, SEEDED,
    *({**row, "net": "as it is"} if "net" in row else row for row in DOCTOR), DOCTOR[0], DOCTOR[-1],
    {**COLLECTIVE, "method": METHODS[1], "net": "none"}, {**COLLECTIVE, "ranks": 8, "nmse": 1.2},
    {**COLLECTIVE, "method": METHODS[1], "seconds": 0.1, "seconds_quartiles": [0.1, 0.11]},
    {**COLLECTIVE, "net": "2gbit,1ms"}, {**COLLECTIVE, "net": "2gbit,1ms", "method": METHODS[1]},
    SIMULATED, SIMULATED_SHARDED, {**SIMULATED_SHARDED, "net": "2gbit,1ms", "ratio": None},
    *({**SIMULATED, "sweep": "bits", "value": f"w{bits}"} for bits in (4, 8)),
    *(
        {**SIMULATED, "sweep": "rate", "value": net.split(",")[0], "net": net}
        for net in ("1gbit,1ms", "10gbit,1ms")
    ),
    {**COMPARED, "run": {**RUN, "date": "later"}},  # another run; another recording, and commit
    {**ERRORS[0], "run": {**RUN, "commit": "a"}}, {**ERRORS[0], "recorded": {**RUN, "commit": "a"}},
    *(
        {**KERNEL, "run": {**RUN, "machine": "a processor, 2 cores", "load": load}}
        for load in (1.5, 2.0, 14.39, None)  # one is of a busy machine
    ),
)  # fmt: skip
_FINE = (3.0, 3.0, 3.01)
TRAININGS = {  # what may be said of a method: rows of a task of this name
    "near": train_rows(step=0.47, losses=(2.99, 3.02, 2.995), baseline=(3.0, 3.01, 3.0)),
    "worse": train_rows(step=0.8, losses=(3.5, 3.51, 3.49), baseline=_FINE),
    "few": train_rows(losses=(3.1, 3.5, 3.8), baseline=(3.0, 3.0, 3.0), spread=None),
    "lower": train_rows(losses=(2.5,), composed=True),
    "ended": [
        {**row, "steps_by_seed": [20, 40], "wire_bytes_per_step": 3_750_000,
         "target_from": "torch-fp32 at 0.6 of its run", "timing_only": row["method"] == METHODS[1]}
        for row in train_rows(losses=(3.0, 3.5)) if row["row"] == "summary"
    ],
    "near sharded": sharded_rows(0.4, losses=_FINE),
    "few sharded": sharded_rows(0.6, losses=_FINE),
}  # fmt: skip

_OF_TABLE = {
    "task": "gpt", "at": 300, "steps": 50, "ranks": 2, "family": "rank",
    "reference": "powersgd:rank=4",
}  # fmt: skip
SENSITIVITY: list[dict[str, Any]] = [
    {"row": "cell", **_OF_TABLE, "group": "blocks.0", "method": "powersgd:rank=2", "numel": 786432,
     "nbytes": 30720, "error": 0.4, "loss_change": -0.002},
    {"row": "correlation", **_OF_TABLE, "groups": 9, "cells": 63, "pearson": 0.5, "spearman": None,
     "spearman_of_choices": 0.6, "spearman_of_groups": 0.1, "loss": 2.5, "bf16_loss_change": 1e-4},
    {"row": "plan", **_OF_TABLE, "policy": "lgreco", "sensitivity": "loss", "ratio": 70.5,
     "of_uniform": 1.6, "error_l2": 1.4, "loss_change": 0.01, "loss_expected": 0.02,
     "choices": {"blocks.0": "powersgd:rank=2"}, "fallback": None},
]  # fmt: skip
LATENCY = {**SIMULATED, "sweep": "latency", "value": "1ms"}
RATE = {**SIMULATED, "sweep": "rate", "value": "1gbit"}
SWEEP = {"sweep": "backward", "value": 0.2}
CHANGED: dict[str, tuple[list[dict[str, Any]], list[int]]] = {  # rows, and which to change
    "train": (train_rows(losses=(3.0, 3.1)), [0, 20]),
    "networks": ([*train_rows(losses=(3.0, 3.1)), *train_rows("none", losses=(3.0, 3.1))], [7, 20]),
    "sharded": (sharded_rows(losses=(3.0, 3.1)), [0, 6, -3]),
    "validation": ([COMPARED, {**COMPARED, "net": "none"}], [0]),
    "decisions": ([DECISION, {**DECISION, "step": 50}], [0]),
    "adapt": ([*ADAPTED, SEEDED], [0, 2, 4, 6, 7]),
    "sensitivity": (SENSITIVITY, [0, 1, 2]),
    "probe": (PROBED, [0, 2, 4]),
    "planner": ([CHOSEN, {**CHOSEN, "nbytes": 1 << 20, "partition_ratio": 1.01}], [0, 1]),
    "ablation": ([ABLATED, {**ABLATED, "part": "kernels", "cut": 0.5}], [0, 1]),
    "error": ([*ERRORS, *LAYERS], [0, 3, 4]),
    "aggregators": (AGGREGATORS, [0, 1]),
    "collectives": ([{**COLLECTIVE, "method": "torch-fp16-hook"}, COLLECTIVE], [0, 1]),
    "kernels": ([KERNEL], [0]),
    "sim": ([SIMULATED], [0]),
    "sweep": (SWEPT, [0]),
    "rate": ([RATE, {**RATE, "net": "2gbit,1ms"}], [0]),
    "latency": ([LATENCY, {**LATENCY, "net": "1gbit,2ms"}], [0]),
    "sharded step": ([SIMULATED_SHARDED, {**SIMULATED_SHARDED, **SWEEP}], [0, 1]),
    "replicas step": ([SIMULATED_OUTER, {**SIMULATED_OUTER, **SWEEP}], [0, 1]),
    "validated": ([VALIDATED], [0]),
    "transports": (TRANSPORT, [0]),
    "profile": (PROFILE, [0]),
    "doctor": (DOCTOR, [0, 1, 2, 3, len(DOCTOR) - 1]),
    "recorded": ([RECORDED], [0]),
    "checked": ([CHECKED], [0]),
}
