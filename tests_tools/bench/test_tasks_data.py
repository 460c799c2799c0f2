"""The tasks' data: sources, errors, and announced substitutes."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from bench_runs import refused

from gradwire_tools.bench.tasks import image_data, text


def test_source_is_split_by_file_and_leaves_tests_out(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"module{number}.py").write_text(f"# {number}\n")
    for folder in ("test", "site-packages", "package/tests"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "unwanted.py").write_text("# unwanted\n")
    (tmp_path / "notes.txt").write_text("unwanted")
    found = text.read(tmp_path)
    train, validation = (bytes(part.tolist()) for part in (found.train, found.validation))
    assert b"unwanted" not in train + validation
    sides = [set(part.split(b"\0")) - {b""} for part in (train, validation)]
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == 60
    assert 0 < len(sides[1]) < 20
    (tmp_path / "module_new.py").write_text("# new\n")
    after = text.read(tmp_path)  # the other files stay on their side
    assert sides[1] <= set(bytes(after.validation.tolist()).split(b"\0"))
    (tmp_path / "empty").mkdir()
    refused(text.read, [(tmp_path / "empty", "not enough Python source")])


def text_of(train: bytes, validation: bytes) -> text.SourceText:
    parts = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (train, validation))
    return text.SourceText(*parts, origin="here")


def test_tokens_give_back_their_text() -> None:
    train = b"def f(x):\n    return x\n\n    return\xff y # x \t return"
    found = text.encode(text_of(train, b"def g():\r\n    return 10"), 259)
    # The most frequent piece first; of others, the first in the text.
    pieces = {256: b"\n    ", 257: b"return", 258: b" x"}
    for tokens, whole in ((found.train, train), (found.validation, b"def g():\r\n    return 10")):
        assert b"".join(pieces.get(t, bytes([t % 256])) for t in tokens.tolist()) == whole
    assert found.train.max() == 258
    assert found.origin == "here, 259 tokens"
    refused(
        lambda size: text.encode(text_of(b"a b", b"c"), size),
        [(100, "256 tokens are bytes"), (300, "the text has 1 pieces; give 257 at most")],
    )


def test_the_standard_library_fills_32768_tokens() -> None:
    source = text.standard_library()
    assert source.train.numel() > 4 * source.validation.numel() > 10**6
    assert "Python" in source.origin
    tokens = text.tokens(32768)
    assert tokens.train.max() == 32767
    assert tokens.train.numel() < source.train.numel() / 3


def idx(values: np.ndarray) -> bytes:
    header = b"\0\0\x08" + bytes([values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    return header + values.astype(np.uint8).tobytes()


def fashion_files(folder: Path, train: int = 12, test: int = 5) -> None:
    for prefix, count in (("train", train), ("t10k", test)):
        images = np.arange(count * 28 * 28).reshape(count, 28, 28) % 256
        labels = np.arange(count) % 10
        (folder / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (folder / f"{prefix}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))


def test_fashion_is_read_from_its_files(tmp_path: Path) -> None:
    fashion_files(tmp_path)
    for name in ("fashion", "auto"):
        data = image_data.load(name, tmp_path)
        assert data.origin == "Fashion-MNIST"
        assert data.train_images.shape == (12, 1, 28, 28)
        assert data.test_labels.tolist() == [0, 1, 2, 3, 4]
        first = (0 / 255 - 0.286) / 0.353
        assert data.train_images[0, 0, 0, 0].item() == pytest.approx(first)


def test_digits_are_an_announced_substitute(tmp_path: Path) -> None:
    data = image_data.load("auto", tmp_path)
    assert "in place of Fashion-MNIST" in data.origin
    assert data.side == 8
    assert len(data.test_labels) == 300
    assert image_data.load("digits", tmp_path).origin == "digits"
    refused(
        lambda name: image_data.load(name, tmp_path),
        [("fashion", "dataset-fashion-mnist"), ("cats", "use one of auto, fashion, digits")],
    )


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "labels.gz"

    def read(raw: bytes) -> None:
        path.write_bytes(raw)
        image_data.read_idx(path)

    cases = [
        (b"not gzip at all", "cannot read"),
        (gzip.compress(b"\0\0\x08\x01" + b"\0\0\0\x05" + b"1234"), "truncated"),
        (gzip.compress(b"\0\0\x08\x03\0\0"), "truncated"),
        (gzip.compress(b"\0\0\x0d\x01\0\0\0\0"), "not an idx file"),
        (gzip.compress(b""), "not an idx file"),
        (gzip.compress(idx(np.zeros(100)))[:-12], "cannot read"),
    ]
    refused(read, [(raw, f"(?s)(?=.*labels.gz).*{told}") for raw, told in cases])
