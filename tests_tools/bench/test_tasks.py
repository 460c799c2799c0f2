"""Every task: equal keys give equal data, equal seeds equal models, and parts add up; its data have
sources, errors, and announced substitutes."""

from __future__ import annotations

import gzip
import math
import struct
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from command_line import refused
from gradwire_tools.bench import tasks
from gradwire_tools.bench.tasks import image_data, text

GPT: dict[str, Any] = {
    "layers": 1, "width": 32, "heads": 2, "context": 16, "validation_sequences": 37
}  # fmt: skip
IMAGE: dict[str, Any] = {"data": "digits", "network": "cnn", "channels": 4, "hidden": 16}
IMAGE |= {"test_images": 101}
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("gpt", GPT),
    "gpt-32k": ("gpt-32k", {**GPT, "vocabulary": 600, "peak_learning_rate": 0.02}),
    "gpt-124m": ("gpt-124m", {**GPT, "vocabulary": 600, "peak_learning_rate": 0.02}),
    "image": ("image", IMAGE),
    "vgg": ("image", {**IMAGE, "network": "vgg", "hidden": 32, "peak_learning_rate": 0.02}),
    "resnet": ("image", {**IMAGE, "network": "resnet", "hidden": 0}),
    "image-resnet50": ("image-resnet50", {"data": "digits", "channels": 4, "test_images": 101}),
}


def small(name: str) -> tasks.Task:
    task, options = SMALL[name]
    return tasks.get(task, **options)


@pytest.mark.parametrize("name", SMALL)
def test_a_task_keeps_the_contract(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data depend on seed, rank and step alone, models on the seed alone; scores of all parts of
    the validation data add up; the loss falls along its gradient, and the optimizer steps; a batch
    follows the model to its device."""
    # Tokens of torch's source take half a minute.
    monkeypatch.setattr("gradwire_tools.bench.tasks.gpt.with_torch", text.standard_library)
    task = small(name)
    assert isinstance(task, tasks.Task)
    assert task.describe()
    assert task.metric
    first = task.batch(3, 1, 5)
    torch.manual_seed(99)  # global state has no effect
    again = task.batch(3, 1, 5)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    for other in ((4, 1, 5), (3, 0, 5), (3, 1, 6)):
        assert not torch.equal(first[0], task.batch(*other)[0]), other

    torch.manual_seed(1)
    before = torch.get_rng_state()
    models = [task.model(7)]
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    models += [task.model(7), task.model(8)]
    ours, same, other_seed = (torch.nn.utils.parameters_to_vector(m.parameters()) for m in models)
    assert torch.equal(ours, same)
    assert not torch.equal(ours, other_seed)

    assert task.loss(task.model(0).to("meta"), first).is_meta
    model = task.model(0)
    whole = task.evaluate(model.eval(), 0, 1)
    for parts in (2, 5, 8):
        scores = [astuple(task.evaluate(model, part, parts)) for part in range(parts)]
        total = tasks.Score(*map(sum, zip(*scores, strict=True)))
        assert total.count == whole.count
        assert total.mean_loss == pytest.approx(whole.mean_loss, rel=1e-4)
        assert task.metric_of(total) == pytest.approx(task.metric_of(whole), rel=1e-2)
    # To first order, which no instruction set changes: what 20 steps reach, rounding may change.
    optimizer = task.optimizer(model.train())
    parameters = list(model.parameters())
    loss = task.loss(model, task.batch(0, 0, 0))
    loss.backward()
    square = sum(parameter.grad.double().square().sum() for parameter in parameters)
    fall = 1e-3 * loss.detach()
    with torch.no_grad():
        for parameter in parameters:
            parameter -= parameter.grad * float(fall / square)
        fell = loss - task.loss(model, task.batch(0, 0, 0))
    assert 0.5 * fall < fell < 1.5 * fall
    # Anew, as a branch whose BatchNorm scale begins at zero had no gradient.
    task.loss(model, task.batch(0, 0, 0)).backward()
    was = [parameter.detach().clone() for parameter in parameters]
    optimizer.step()
    assert not any(map(torch.equal, was, parameters))


def test_models_have_the_layers_of_their_papers() -> None:
    """He et al., Table 1: 53 convolutions with BatchNorm and one dense layer; 25.6 million values
    for 1000 classes, of which 2.05 million in the dense layer and 0.009 in the stem. The
    least GPT-2 has 124,439,808 values, with 1024 positions, of which 256 are here. A large
    vocabulary is tied to the embedding, and tied weights are one parameter."""
    shapes = dict(tasks.shapes(tasks.get("image-resnet50")))
    convolutions = [shape for shape in shapes.values() if len(shape) == 4]
    assert len(convolutions) == 53
    assert len(shapes) == 53 + 2 * 53 + 2
    assert sum(map(math.prod, shapes.values())) == 25_557_032 - 990 * 2049 - 64 * (3 * 49 - 9)
    shapes = dict(tasks.shapes(tasks.get("gpt-32k")))
    assert shapes["embedding.weight"] == (32768, 256)
    assert "output.weight" not in shapes
    with torch.device("meta"):
        shapes = dict(tasks.shapes(tasks.get("gpt-124m")))
    assert sum(map(math.prod, shapes.values())) == 124_439_808 - (1024 - 256) * 768
    tied, untied = (tasks.get("gpt", **{**GPT, "tied": t}).model(0) for t in (True, False))
    counts = [sum(p.numel() for p in model.parameters()) for model in (tied, untied)]
    assert counts[1] - counts[0] == 256 * 32


def test_options_of_data() -> None:
    task = tasks.get("gpt", **{**GPT, "validation_sequences": 2})
    assert task.evaluate(task.model(0), 3, 4).count == 0
    # Channels last gradients keep their strides.
    task = tasks.get("image", **{**IMAGE, "channels_last": True})
    model = task.model(0)
    task.loss(model, task.batch(0, 0, 0)).backward()
    gradient = next(p.grad for p in model.parameters() if p.dim() == 4 and p.shape[1] > 1)
    assert gradient is not None
    assert gradient.is_contiguous(memory_format=torch.channels_last)
    assert not gradient.is_contiguous()
    # By class gives ranks disjoint classes that are all classes.
    for ranks in (2, 4, 10):
        task = tasks.get("image", **{**IMAGE, "split": "by-class", "images": 200})
        classes = [set(task.batch(0, rank, 3, ranks)[1].tolist()) for rank in range(ranks)]
        assert sum(map(len, classes)) == 10
        assert set.union(*classes) == set(range(10))
    assert set(task.batch(0, 11, 3, 12)[1].tolist()) == {1}


def test_wrong_tasks_and_options_are_refused() -> None:
    assert {name for name, _ in SMALL.values()} == set(tasks.REGISTRY)
    # Wrong tasks and options are refused.
    refused(
        lambda given: tasks.get(given[0], **given[1]),
        [
            (("speech", {}), r"unknown task 'speech': use one of gpt, gpt-124m, gpt-32k, image"),
            (("gpt", {"depth": 3}), r"no option 'depth': use one of .*layers"),
            (("gpt", {"split": "by-class"}), "the data of task 'gpt' have no classes"),
            (("image", {"split": "by-name"}), "split=by-name: use one of iid, by-class"),
            (("image", {"network": "alexnet"}), "network=alexnet: use one of cnn, vgg, resnet"),
            (("image", {"network": "resnet", "hidden": 64}), "resnet has no hidden dense layer"),
            (("image", {"channels": -1}), "channels=-1"),
            (("image", {"images": "many"}), "images=many of task 'image': give a whole number"),
            (("image", {"momentum": "no"}), "give a number"),
            (("gpt", {"tied": 3}), "give true or false"),
        ],
    )


def test_learning_rate_and_momentum() -> None:
    rises = tasks.get("gpt", **{**GPT, "horizon": 100})
    factors = [rises.learning_rate(step) for step in range(150)]
    assert factors[:10] == sorted(factors[:10])
    assert factors[9] == 1.0
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[100:] == [pytest.approx(0.1)] * 50
    # A method with momentum of its own takes that of the optimizer off.
    image, gpt = small("image"), small("gpt")
    for momentum, expected in ((None, 0.9), (0.0, 0.0)):
        assert image.optimizer(image.model(0), momentum).param_groups[0]["momentum"] == expected
        assert gpt.optimizer(gpt.model(0), momentum).param_groups[0]["betas"][0] == expected


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


def test_torchs_source_follows_that_of_the_standard_library() -> None:
    first, both = text.standard_library(), text.with_torch()
    for ours, whole in ((first.train, both.train), (first.validation, both.validation)):
        assert torch.equal(whole[: ours.numel()], ours)
        assert whole.numel() > 3 * ours.numel()
    assert f"torch {torch.__version__}, " in both.origin


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
