"""Every task: equal keys give equal data, equal seeds equal models, and parts add up."""

from __future__ import annotations

import math
from dataclasses import astuple
from typing import Any

import pytest
import torch
from bench_runs import refused

from gradwire_tools.bench import tasks

GPT: dict[str, Any] = {
    "layers": 1, "width": 32, "heads": 2, "context": 16, "validation_sequences": 37
}  # fmt: skip
IMAGE: dict[str, Any] = {"data": "digits", "network": "cnn", "channels": 4, "hidden": 16}
IMAGE |= {"test_images": 101}
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("gpt", GPT),
    "gpt-32k": ("gpt-32k", {**GPT, "vocabulary": 600, "peak_learning_rate": 0.02}),
    "image": ("image", IMAGE),
    "vgg": ("image", {**IMAGE, "network": "vgg", "hidden": 32, "peak_learning_rate": 0.02}),
    "resnet": ("image", {**IMAGE, "network": "resnet", "hidden": 0}),
    "image-resnet50": ("image-resnet50", {"data": "digits", "channels": 4, "test_images": 101}),
}


def small(name: str) -> tasks.Task:
    task, options = SMALL[name]
    return tasks.get(task, **options)


@pytest.mark.parametrize("name", SMALL)
def test_a_task_keeps_the_contract(name: str) -> None:
    """Data depend on seed, rank and step alone, models on the seed alone; scores of all parts of
    the validation data add up; the loss falls along its gradient, and the optimizer steps."""
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
    for 1000 classes, of which 2.05 million in the dense layer and 0.009 in the stem. A large
    vocabulary is tied to the embedding, and tied weights are one parameter."""
    shapes = dict(tasks.shapes(tasks.get("image-resnet50")))
    convolutions = [shape for shape in shapes.values() if len(shape) == 4]
    assert len(convolutions) == 53
    assert len(shapes) == 53 + 2 * 53 + 2
    assert sum(map(math.prod, shapes.values())) == 25_557_032 - 990 * 2049 - 64 * (3 * 49 - 9)
    shapes = dict(tasks.shapes(tasks.get("gpt-32k")))
    assert shapes["embedding.weight"] == (32768, 256)
    assert "output.weight" not in shapes
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
            (("speech", {}), r"unknown task 'speech': use one of gpt, gpt-32k, image"),
            (("gpt", {"depth": 3}), r"no option 'depth': use one of .*layers"),
            (("gpt", {"split": "by-class"}), "the data of task 'gpt' have no classes"),
            (("image", {"split": "by-name"}), "split=by-name: use one of iid, by-class"),
            (("image", {"network": "alexnet"}), "network=alexnet: use one of cnn, vgg, resnet"),
            (("image", {"network": "resnet", "hidden": 64}), "resnet has no hidden dense layer"),
            (("image", {"channels": -1}), "channels=-1"),
            (
                ("image", {"images": "many"}),
                "images=many of task 'image': give a whole number",
            ),
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
