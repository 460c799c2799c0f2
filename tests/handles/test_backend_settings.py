"""The backend's environment variables, and the entry point."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import gradwire as gw
from gradwire.lang import gpu
from products import EXHAUSTIVE, one_in
from rooms.backend import autoload, backend, from_environment, lacking


def test_every_variable_is_read() -> None:
    """Defaults are those of attach."""
    settings = from_environment({})
    assert settings.codec == gw.QSGD(bits=4, block=128)
    assert (settings.min_bytes, settings.seed, settings.blob) == (65536, 0, False)
    settings = from_environment(
        {
            "GRADWIRE_CODEC": "qsgd:bits=2:block=64:rounding=nearest",
            "GRADWIRE_MIN_BYTES": "0",
            "GRADWIRE_SEED": "7",
            "GRADWIRE_BLOB": "1",
        }
    )
    assert settings.blob
    assert settings.codec == gw.QSGD(bits=2, block=64, rounding="nearest")
    assert (settings.min_bytes, settings.seed) == (0, 7)
    assert from_environment({"GRADWIRE_CODEC": "none"}).codec is None
    assert from_environment({"GRADWIRE_CODEC": "powersgd:rank=4"}).codec == gw.PowerSGD(rank=4)
    assert from_environment({"GRADWIRE_SEED": str((1 << 64) - 1)}).seed == (1 << 64) - 1


def test_bad_values_name_their_variable() -> None:
    for variable, value, said in (
        ("GRADWIRE_CODEC", "", "expected NAME"),
        ("GRADWIRE_CODEC", "zip", "unknown codec or aggregator 'zip'"),
        ("GRADWIRE_CODEC", "qsgd:bits", "found 'bits'"),
        ("GRADWIRE_CODEC", "qsgd:bits=", "found 'bits='"),
        ("GRADWIRE_CODEC", "qsgd:bits=4:bits=4", "given twice"),
        ("GRADWIRE_CODEC", "qsgd:bits=9", "bits"),
        ("GRADWIRE_CODEC", "qsgd:colour=red", "no option 'colour'"),
        ("GRADWIRE_CODEC", "randomk:unbiased=true", "not defined"),
        ("GRADWIRE_MIN_BYTES", "-1", "'-1'"),
        ("GRADWIRE_MIN_BYTES", "1e6", "'1e6'"),
        ("GRADWIRE_BLOB", "yes", "give 0 or 1"),
        ("GRADWIRE_SEED", "", "''"),
        ("GRADWIRE_SEED", "-1", "'-1'"),
        ("GRADWIRE_SEED", "x", "'x'"),
        ("GRADWIRE_SEED", str(1 << 64), str(1 << 64)),
        ("GRADWIRE_SEED", "1" * 9999, "1"),
    ):
        with pytest.raises(gw.ConfigError) as error:
            from_environment({variable: value})
        assert variable in str(error.value)
        assert said in str(error.value)
    with pytest.raises(gw.ConfigError, match=r"powersgd.* needs parameters"):
        from_environment({"GRADWIRE_CODEC": "powersgd", "GRADWIRE_BLOB": "1"})


# ---- devices


def test_what_cannot_be_compressed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lacking("cpu") is None
    assert "CUDA" in str(lacking("xpu"))
    monkeypatch.setattr(gpu, "missing", lambda: "triton is not installed")
    assert lacking("cuda") == "triton is not installed"
    monkeypatch.setattr(gpu, "missing", lambda: None)
    monkeypatch.setattr(gpu, "interpreting", lambda: False)
    assert lacking("cuda") is None
    monkeypatch.setattr(gpu, "interpreting", lambda: True)
    assert "TRITON_INTERPRET" in str(lacking("cuda"))


def test_ranks_of_which_some_have_no_kernels_are_named() -> None:
    """Otherwise ranks that compress would wait for ranks that do not."""
    store = dist.HashStore()

    def rank(number: int) -> str:
        try:
            backend._agreed(store, number, 2, ("cpu", "xpu")[number])
        except gw.ConfigError as error:
            return str(error)
        return "agreed"

    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(rank, range(2)))
    assert all(
        "rank 1 has" in text and "none on xpu: gradwire has kernels" in text for text in said
    )


# ---- the entry point


@pytest.mark.parametrize(
    "first", one_in(4, ["torch", "gradwire", "gradwire.codecs", "gradwire.handles.attach"])
)
def test_import_torch_makes_the_name_known(first: str) -> None:
    """In any order of imports; and `import torch` loads no other module of gradwire."""
    script = f"""
import {first}, sys, torch.distributed as dist
assert "gradwire" in dist.Backend.backend_list
assert dist.Backend.backend_capability["gradwire"] == ["cpu", "cuda"]
assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
if "{first}" in ("torch", "gradwire"):
    assert "gradwire.lang" not in sys.modules
"""
    _run(script, {})


@EXHAUSTIVE
def test_without_autoloading() -> None:
    script = """
import torch.distributed as dist
assert "gradwire" not in dist.Backend.backend_list
from gradwire.backend.entry import autoload
autoload()
autoload()
assert dist.Backend.backend_list.count("gradwire") == 1
"""
    _run(script, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})


def test_it_is_registered_once(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """In a process where torch has not loaded it."""
    others = [name for name in dist.Backend.backend_list if name != "gradwire"]
    monkeypatch.setattr(dist.Backend, "backend_list", others)
    monkeypatch.delattr(dist.Backend, "GRADWIRE")
    for _ in range(2):
        autoload()
        assert dist.Backend.backend_list.count("gradwire") == 1
    assert not recwarn.list


def _run(script: str, environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_waiting_costs_nothing_once_it_has_ended() -> None:
    from torch.nn.modules import module

    before = len(module._global_forward_pre_hooks)
    model = torch.nn.Linear(8, 8)
    one, other = gw.register(model), gw.register(model)
    assert len(module._global_forward_pre_hooks) == before + 1
    model(torch.zeros(1, 8))  # not wrapped: still waiting
    assert not one.settled
    one.withdraw()
    del model
    torch.nn.Linear(2, 2)(torch.zeros(1, 2))  # the model is gone, so its registration ends
    assert not other.settled
    assert len(module._global_forward_pre_hooks) == before
