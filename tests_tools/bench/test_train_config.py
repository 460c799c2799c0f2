"""Methods' names, the configuration's checks, and `plan`."""

from __future__ import annotations

from typing import Any

import pytest
from bench_runs import refused

from gradwire_tools import lab
from gradwire_tools.bench.train import methods, train
from gradwire_tools.bench.train.train_config import TrainConfig
from gradwire_tools.demo import RATES, fastest


def test_methods_are_parsed() -> None:
    for name in methods.NAMED:
        method = methods.parse(name)
        assert method.name == name
        method.check()
    # Options are parsed with their types.
    method = methods.parse("gradwire:qsgd:bits=2:error_feedback=true:scale=max:x=0.5")
    assert method.options == {
        "codec": "qsgd", "bits": 2, "error_feedback": True, "scale": "max", "x": 0.5,
    }  # fmt: skip


WRONG_METHODS = (
    ("nccl", "unknown method 'nccl': use one of torch-fp32"),
    ("gradwire", "unknown method"),
    ("gradwire:", "unknown method"),
    ("gradwire:qsgd:bits", "expected OPTION=VALUE, found 'bits'"),
    ("gradwire:qsgd:=4", "expected OPTION=VALUE"),
    ("gradwire:qsgd:bits=4:bits=2", "'bits' is given twice"),
    ("gradwire:qsdg", "unknown codec or aggregator 'qsdg'"),
    ("qsdg:bits=4", "unknown method 'qsdg:bits=4'.*auto, flexible.*`gradwire codec list`"),
    ("gradwire:qsgd:bitz=4", "no option 'bitz'"),
    ("qsgd:algoritm=ring", r"use one of .* \(did you mean 'algorithm'\?\)"),
    ("qsgd:policy=lgreco:evry=50", r"\(did you mean 'every'\?\)"),
    ("qsgd:scale=foo:policy=lgreco", "must be .*'l2'$"),
    ("qsgd:policy=lgreco:every=-1", "method 'qsgd:policy=lgreco:every=-1': Replan: every=-1"),
    ("gradwire:qsgd:bits=99", "bits"),
    ("truncate:ratio=0.5", "write truncate:ratio=N, with a number of 1 or more"),
    ("truncate:ratio=nan", "write truncate:ratio=N"),
    ("truncate:ratio=many", "write truncate:ratio=N"),
    ("truncate", "write truncate:ratio=N"),
    ("truncate:bits=4", "write truncate:ratio=N"),
    ("torch-powersgd:rank=1.5", "write torch-powersgd:rank=N, with a whole number"),
    ("torch-powersgd:rank=0", "with a whole number of 1 or more"),
    ("torch-powersgd:rank", "expected OPTION=VALUE"),
)
WRONG_FIELDS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"task": "speech"}, "unknown task"),
    ({"task_options": {"depth": 1}}, "no option 'depth'"),
    ({"methods": ()}, "no methods"),
    ({"methods": ("thc", "torch-fp32", "thc")}, "methods contain duplicates: thc$"),
    ({"seeds": ()}, "no seeds"),
    ({"seeds": (1, 1)}, "seeds contain duplicates"),
    ({"nets": ("1gbit,1ms", "1000mbit,1ms")}, "nets contain duplicates: 1gbit,1ms$"),
    ({"target_at": 0.04}, r"target_at is 0.04: with 200 steps .*; give 0.05 or more"),
    ({"target_at": 0.01, "steps": 900}, "give 0.0112 or more"),
    ({"target_at": 0.5, "steps": 5}, "give 1 or more"),
    ({"target_at": 0.1, "patience": 2}, "with 20 steps .*; give 0.5 or more"),
    ({"target_at": 0.4, "budget_seconds": 9.0}, "with 20 steps .*; give 0.5 or more"),
    ({"seeds": (1, 2**63)}, f"seed {2**63}: seeds are below 2\\^63"),
    ({"methods": ("thc:bits=2:code=2:saturate=false",)}, "saturate=false' on 4 ranks: "),
    ({"methods": ("qsgd:seed=-1",)}, "seed"),
    ({"methods": ("qsgd:coalesce_bytes=-1",)}, "coalesce_bytes=-1"),
    ({"methods": ("qsgd:include=weight",)}, "give a list of patterns"),
    ({"methods": ("powersgd:rank=5000",)}, "rank"),
    ({"nodes": 0}, "nodes is 0, must be at least 1"),
    ({"steps": -1}, "steps is -1"),
    ({"evaluate_every": 0}, "evaluate_every is 0"),
    ({"budget_seconds": 9.0, "evaluate_every": 50}, "must not exceed the task's warm-up"),
    ({"target_at": 1.5}, "target_at is 1.5"),
    ({"target_at": 0.6, "target": 2.0}, "exclude each other"),
    ({"patience": 0}, "patience is 0, must be at least 1"),
    ({"validate": True}, "give nets to compose"),
    ({"nets": ("1gbit,1hour",)}, "1hour"),
)


def test_wrong_fields_are_refused_before_anything_starts() -> None:
    methods = [({"methods": (text,)}, told) for text, told in WRONG_METHODS]
    refused(lambda fields: TrainConfig(**fields).check(), [*methods, *WRONG_FIELDS])
    for fields in (
        {"target_at": 0.05}, {"target_at": 1.0, "steps": 5}, {"target_at": 0.0112, "steps": 900},
    ):  # fmt: skip
        TrainConfig(methods=("torch-fp32",), **fields).check()  # the least share


def test_the_default_network_without_a_lab_is_announced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lab, "available", lambda: "no right to make namespaces")
    said: list[str] = []
    assert train.plan(quick=True, announce=said.append).net == "none"
    assert "no right to make namespaces" in said[0]
    monkeypatch.setattr(lab, "available", lambda: None)
    said.clear()
    assert train.plan(announce=said.append).net == "1gbit,1ms"
    assert train.plan(net="none", announce=said.append).net == "none"
    assert not said


def test_a_plan_holds_what_is_given() -> None:
    assert train.plan(nets=(" 1000MBIT,1000us",)).nets == ("1gbit,1ms",)
    # Arguments override quick.
    config = train.plan(
        quick=True, net="none", nodes=3, steps=7, methods=("torch-fp32",), task_options={"width": 8}
    )
    assert (config.nodes, config.steps, config.methods) == (3, 7, ("torch-fp32",))
    assert config.task_options["width"] == 8
    assert config.budget_seconds is None


def test_the_demo_takes_the_fastest_network_that_shows_communication() -> None:
    parameters, nodes = 5_000_000, 4
    sent = methods.ring_bytes(parameters, 2, nodes)
    for ideal in (0.001, 0.01, 0.05, 0.2, 1.0):
        net, reason = fastest(ideal, parameters, nodes)
        rate, _, latency = net.partition(",")
        bits = {r: lab.Network.parse(r + ",1ms").rate_bits_per_s for r in RATES}
        long_enough = [r for r in RATES if sent * 8 / bits[r] >= 5 * ideal]
        assert (rate, latency) == ((long_enough or RATES[-1:])[0], "1ms")
        assert rate in reason
        assert "hide" not in reason  # what was not measured is not claimed
        assert "on a faster network the gain is smaller" in reason
    # Ring bytes.
    assert methods.ring_bytes(1000, 4, 1) == 0
    assert methods.ring_bytes(1000, 4, 2) == 4000
    assert methods.ring_bytes(1000, 2, 4) == 3000
