"""Legal combinations: every row of LEGAL works, and everything else is rejected with a reason."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

import gradwire as gw
from gradwire import QSGD, ConfigError
from gradwire.algorithms import OF
from gradwire.collectives import Operation
from gradwire.engine import Communicator
from gradwire.lang import Codec
from gradwire.transport import Hub
from ranks import as_threads, caught
from rooms.collectives import LEGAL, OPS, REDUCING, VERBS, Legal
from typed_values import EVERY_DTYPE, call, check_group, check_reduced, generator, same_bits, values

ODD = [torch.uint16, torch.float8_e4m3fn]  # dtypes that are only copied
ALGORITHMS = list(OF["all_reduce"])
DOCS = Path(__file__).parents[2] / "docs" / "reference" / "algorithms.md"


def called(
    comm: Communicator,
    verb: str,
    op: str,
    tensor: torch.Tensor,
    codec: Codec | None,
    feedback: bool,
    algorithm: str,
) -> torch.Tensor:
    """The result of a public function."""
    reduces = {"op": op, "residual": torch.zeros(tensor.numel()) if feedback else None}
    how = {"group": comm, "algorithm": algorithm, **(reduces if verb in REDUCING else {})}
    return call(verb, tensor, comm.world_size, codec, **how)[0]


@pytest.mark.parametrize("row", LEGAL, ids=lambda row: " ".join(row.columns()[:3:2]))
def test_every_row_works(row: Legal, pytestconfig: pytest.Config) -> None:
    n, made = 3, generator()
    dtypes = row.dtypes or [*EVERY_DTYPE, torch.uint16]
    codecs = [None, QSGD()] if row.codecs else [None]
    cases = list(
        product(
            row.ops or ("",),
            dtypes,
            codecs,
            [False, True] if row.feedback else [False],
            row.algorithms.split(", "),
        )
    )
    if not pytestconfig.getoption("exhaustive") and len(cases) > 60:
        cases = cases[::7]  # prime to the length of every axis, so that each value occurs
    wide = torch.int32  # its values convert to any dtype
    given = [[values(12, dtype if dtype in EVERY_DTYPE else wide, made).to(dtype)
              for _, dtype, *_ in cases] for _ in range(n)]  # fmt: skip

    def body(comm: Communicator) -> list[torch.Tensor]:
        found = []
        for (op, _, *how), mine in zip(cases, given[comm.rank], strict=True):
            found.append(called(comm, row.verb, op, mine.clone(), *how))
        return found

    found = as_threads(n, body)
    for i, (op, _, codec, *_) in enumerate(cases):
        got = [rank[i] for rank in found]
        if row.verb != "reduce_scatter":
            assert all(same_bits(x, got[0]) for x in got), cases[i]
        if codec is None and row.verb == "all_gather":
            assert same_bits(got[0], torch.cat([rank[i] for rank in given])), cases[i]
        elif codec is None and row.verb == "broadcast":
            assert same_bits(got[0], given[n - 1][i]), cases[i]
        else:
            whole = torch.cat(got) if row.verb == "reduce_scatter" else got[0]
            mine = [rank[i] for rank in given]
            if codec is None:
                check_reduced(op, mine, whole, str(cases[i]))
                continue
            # 4 bits of a range of 6 or so, twice over
            expected = torch.cat(mine) if row.verb == "all_gather" else mine[-1]
            if op:
                expected = torch.stack(mine).double().sum(0) / (n if op == "avg" else 1)
            torch.testing.assert_close(whole.double(), expected.double(), rtol=0, atol=2.5)


def test_rows_name_the_algorithms_that_there_are() -> None:
    for row in LEGAL:
        assert set(row.algorithms.split(", ")) == set(OF[row.verb])
        assert set(row.ops) <= set(OPS)
    assert {row.verb for row in LEGAL} == set(VERBS)


def named(verb: str, op: str, dtype: torch.dtype, codec: Codec | None, feedback: bool,
          algorithm: str) -> list[str] | None:  # fmt: skip
    """What the error must say; None if the combination is legal."""
    rows = [r for r in LEGAL if r.verb == verb and (not r.ops or op in r.ops)]
    operation = str(Operation(verb, op, 1 if verb == "broadcast" else 0))
    fitting = [r for r in rows if not r.dtypes or dtype in r.dtypes]
    if not fitting:
        possible = [str(d) for r in rows for d in r.dtypes]
        return [operation, str(dtype), *possible]
    if codec is not None and not any(r.codecs for r in fitting):
        return [operation, str(dtype), str(codec), "codec=None"]
    if feedback and not any(r.feedback for r in fitting):
        return [operation, str(dtype), "leave the residual out"]
    if not any(algorithm in r.algorithms.split(", ") for r in fitting):
        return [operation, repr(algorithm), *OF[verb]]
    return None


@pytest.mark.parametrize("verb", VERBS)
def test_everything_else_is_refused_before_anything_is_sent(verb: str) -> None:
    """Each rank rejects it without its peers; the error has the tensor, the combination and what is
    possible; and the group continues to work."""
    ops = (*OPS,) if verb in REDUCING else ("",)
    feedback = [False, True] if verb in REDUCING else [False]
    dtypes = [*EVERY_DTYPE, *ODD]
    cases = product(ops, dtypes, [None, QSGD()], feedback, ALGORITHMS)
    refused = [case for case in cases if named(verb, *case) is not None]
    assert len(refused) > 50
    messages: list[object] = []

    def spy(*message: object) -> None:
        messages.append(message)

    def body(comm: Communicator) -> list[tuple[Any, BaseException | None]]:
        found = [
            (case, caught(lambda case=case: called(comm, verb, case[0],  # type: ignore[misc]
                                                   torch.zeros(4, dtype=case[1]), *case[2:])))
            for case in refused
        ]  # fmt: skip
        assert not messages
        assert comm.calls.core.issued == 0
        comm.agree("a test", ["all have come so far"])
        check_group(comm)
        return found

    for found in as_threads(2, body, Hub(2, corrupt=spy)):
        for case, error in found:
            assert isinstance(error, ConfigError), case
            missing = [w for w in ("tensor", *(named(verb, *case) or ())) if w not in str(error)]
            assert not missing, f"{case}: {error}"
    assert messages


def test_the_docs_print_the_table() -> None:
    section = DOCS.read_text(encoding="utf-8").split("## What may be combined")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    assert rows[2:] == [row.columns() for row in LEGAL]


TORCHS = {"sum": ReduceOp.SUM, "avg": ReduceOp.AVG, "min": ReduceOp.MIN, "max": ReduceOp.MAX}


def reduced(comm: Communicator, op: object, codec: str | None) -> list[torch.Tensor]:
    values = torch.randn(301 * comm.world_size, generator=torch.Generator().manual_seed(comm.rank))
    whole, shard = values.clone(), torch.empty(301)
    gw.all_reduce(whole, codec, op=op, group=comm, step=0)  # type: ignore[arg-type]
    gw.reduce_scatter(shard, values, codec, op=op, group=comm, step=0)  # type: ignore[arg-type]
    return [whole, shard]


def test_torchs_op_is_its_name() -> None:
    def body(comm: Communicator) -> None:
        for name, codec in [*((name, None) for name in TORCHS), ("sum", "qsgd:bits=3"),
                            ("avg", "qsgd:bits=3")]:  # fmt: skip
            ops = (name, TORCHS[name], ReduceOp(TORCHS[name]))
            named, *others = (reduced(comm, op, codec) for op in ops)
            for other in others:
                assert all(map(torch.equal, named, other)), (name, codec)

    as_threads(3, body)
