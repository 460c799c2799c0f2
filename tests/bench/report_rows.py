"""Rows as benchmarks write them, for tests of the report."""

from __future__ import annotations

from typing import Any

METHODS = ("torch-fp32", "torch-fp16-hook", "gradwire-qsgd4")
RUN = {
    "command": "gradwire bench train --seeds 0",
    "gradwire": "0.1.0",
    "commit": None,
    "machine": "a machine",
    "torch": "2.13.0",
    "python": "3.11.7",
    "load": 0.5,
    "date": "2026-01-01T00:00:00+00:00",
}


def train_rows(
    net: str = "300mbit,1ms",
    step: float = 0.2,
    spread: float | None = 0.05,
    losses: tuple[float, ...] = (3.0,),
    baseline: tuple[float, ...] | None = None,
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
            **common,
            "row": "evaluation",
            "method": method,
            "seed": seed,
            "step": at,
            "seconds": at * seconds[method],
            "metric": 1.0,
            "loss": 5.0 + (last[method][seed] - 5.0) * at / 20,
            "wire_bytes": at,
            "link_bytes": None,
            "peak_extra_bytes": None,
        }
        for method in METHODS
        for seed in seeds
        for at in (0, 10, 20)
    ]
    for method in METHODS:
        whole = seconds[method]
        times = [20 * whole if loss <= 3.03 else None for loss in last[method]]
        mean = sum(last[method]) / len(losses)
        rows.append(
            {
                **common,
                "row": "summary",
                "method": method,
                "seeds": list(seeds),
                "steps": 20,
                "target": 3.03,
                "target_from": "torch-fp32",
                "time_to_target": None if None in times else 20 * whole,
                "time_to_target_by_seed": times,
                "final_metric": 1.0,
                "final_loss": mean,
                "final_loss_by_seed": list(last[method]),
                "seconds": 20 * whole,
                "step_seconds": whole,
                "step_seconds_quartiles": spread and [whole - spread, whole + spread],
                "ideal_step_seconds": 0.1,
                "wire_bytes": 2_350_000_000,
                "link_bytes": None,
                "peak_extra_bytes": None,
            }
        )
    return rows


COLLECTIVE: dict[str, Any] = {
    "method": "gradwire-qsgd4",
    "algorithm": "sra",
    "transport": "torch_p2p",
    "ranks": 4,
    "per_node": 1,
    "net": "1gbit,1ms",
    "numel": 25_000_000,
    "seconds": 0.2,
    "seconds_quartiles": [0.19, 0.22],
    "wire_bytes": 19_000_000,
    "limit_seconds": 0.15,
    "of_limit": 0.75,
    "nmse": 0.01,
}
KERNEL: dict[str, Any] = {
    "codec": "qsgd",
    "options": {"bits": 4},
    "target": "c",
    "device": "cpu",
    "threads": 1,
    "numel": 1 << 24,
    "op": "encode",
    "seconds": 0.0057,
    "gbps": 11.8,
    "limit_seconds": 0.003,
    "of_limit": 0.5,
    "copy_gbps": 20.0,
}
SIMULATED: dict[str, Any] = {
    "method": "gradwire:qsgd",
    "codec": "qsgd",
    "algorithm": "sra",
    "ranks": 4,
    "per_node": 1,
    "net": "1gbit,1ms",
    "model": "resnet50",
    "numel": 25_000_000,
    "seconds": 0.3,
    "wire_bytes": 19_000_000,
    "limit_seconds": 0.2,
    "backward_seconds": 0.0,
    "buckets": 5,
    "messages": 60,
    "machine": "a processor",
}
SWEPT = [
    {**SIMULATED, "ranks": n, "sweep": "ranks", "value": n, "seconds": n / 10} for n in (2, 8, 32)
]
VALIDATED: dict[str, Any] = {
    "ranks": 2,
    "net": "1gbit,1ms",
    "method": "gradwire:qsgd",
    "algorithm": "sra",
    "numel": 2_500_000,
    "measured_seconds": 0.1,
    "simulated_seconds": 0.11,
    "error": 0.1,
    "of_limit": 0.5,
    "runs": 2,
    "spread": 0.2,
}
TRANSPORT = [
    {"transport": name, "bytes": size, "latency_us": us * size / 64, "gbps": 1.5}
    for name, us in (("shm", 2.0), ("gloo", 30.0))
    for size in (64, 4096)
]
PROFILE = [
    {
        "method": "gradwire-qsgd4",
        "part": part,
        "seconds": 0.001,
        "steps": 10,
        "ranks": 2,
        "net": "none",
        "numel": 6_553_600,
    }
    for part in ("hook", "kernels")
]
DOCTOR: list[dict[str, Any]] = [
    {"part": "gradwire", "available": True, "detail": "0.1.0"},
    *(
        {
            "part": f"step {method}",
            "available": True,
            "detail": "a step",
            "method": method,
            "ranks": 2,
            "net": "100mbit,1ms",
            "numel": 5_000_000,
            "step_seconds": step,
            "compute_seconds": 0.1,
            "communication_seconds": step,
            "exposed_seconds": step - 0.1,
            "turn_seconds": [step, 1.1 * step, 0.9 * step],
        }
        for method, step in zip(METHODS, (1.7, 0.9, 0.3), strict=True)
    ),
    {"part": "verdict", "available": True, "detail": "Compression pays here: <so>."},
]
UNKNOWN = [{"x": 1, "y": None}, {"a": [1, 2], "b": True}]
EVERYTHING: list[dict[str, Any]] = [
    *train_rows(),
    COLLECTIVE,
    KERNEL,
    *SWEPT,
    VALIDATED,
    *TRANSPORT,
    *PROFILE,
    *DOCTOR,
    *UNKNOWN,
]
