"""The rows of `gradwire bench kernels`, and its errors."""

from __future__ import annotations

import pytest

from gradwire.bench import kernels
from gradwire.errors import ConfigError

KEYS = {
    "codec", "options", "target", "device", "threads", "numel", "op", "seconds", "gbps",
    "limit_seconds", "of_limit", "copy_gbps",
}  # fmt: skip


def test_rows() -> None:
    rows = list(kernels.run(["qsgd:bits=2", "fp16"], None, 5000, [1, 2], quick=True))
    assert len(rows) == 2 * 2 * 2 * 4
    for row in rows:
        assert set(row) == KEYS
        assert row["seconds"] > 0
        assert row["of_limit"] == pytest.approx(row["limit_seconds"] / row["seconds"])
        assert row["gbps"] == pytest.approx(4 * 5000 / row["seconds"] / 1e9)
    assert [r["op"] for r in rows[:4]] == ["encode", "encode_ef", "decode", "decode_add"]
    assert rows[0]["options"]["bits"] == 2
    assert rows[0]["codec"] == "qsgd"


def test_limits_count_bytes_read_and_written() -> None:
    rows = {r["op"]: r for r in kernels.run(["identity"], ["c"], 4096, [1], quick=True)}
    moved = {op: r["limit_seconds"] * r["copy_gbps"] * 1e9 for op, r in rows.items()}
    n = 4 * 4096
    assert moved["encode"] == pytest.approx(2 * n)
    assert moved["encode_ef"] == pytest.approx(4 * n)
    assert moved["decode"] == pytest.approx(2 * n)
    assert moved["decode_add"] == pytest.approx(3 * n)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["nope"], None, 10, [1]), "unknown codec 'nope'"),
        ((["qsgd:bit=4"], None, 10, [1]), "no option 'bit'"),
        ((None, ["cuda"], 10, [1]), "unknown target 'cuda'"),
        ((None, None, 0, [1]), "numel=0"),
        ((None, None, 10, [0]), "threads=0"),
    ],
)
def test_errors(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        list(kernels.run(*arguments))  # type: ignore[arg-type]
