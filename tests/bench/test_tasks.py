"""Every task: equal keys give equal data, equal seeds equal models, and parts add up."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from gradwire.bench import tasks
from gradwire.bench.tasks.schedule import warm_up_then_decay
from gradwire.errors import ConfigError

SMALL: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 1, "width": 32, "heads": 2, "context": 16, "validation_sequences": 37},
    "gpt-32k": {
        "layers": 1,
        "width": 32,
        "heads": 2,
        "context": 16,
        "validation_sequences": 37,
        "vocabulary": 600,
        "peak_learning_rate": 0.02,
    },
    "image-resnet50": {"data": "digits", "channels": 4, "test_images": 101},
    "image": {
        "data": "digits",
        "network": "cnn",
        "channels": 4,
        "hidden": 16,
        "test_images": 101,
    },
}
NETWORKS: dict[str, dict[str, Any]] = {
    "vgg": {"network": "vgg", "hidden": 32, "peak_learning_rate": 0.02},
    "resnet": {"network": "resnet", "hidden": 0},
}


@pytest.fixture(params=[*sorted(SMALL), *NETWORKS])
def task(request: pytest.FixtureRequest) -> tasks.Task:
    if request.param in NETWORKS:
        return tasks.get("image", **{**SMALL["image"], **NETWORKS[request.param]})
    return tasks.get(request.param, **SMALL[request.param])


def test_every_task_of_the_table_is_tested_and_keeps_the_contract(task: tasks.Task) -> None:
    assert set(SMALL) == set(tasks.REGISTRY)
    assert isinstance(task, tasks.Task)
    assert task.describe()
    assert task.metric


def test_a_batch_depends_on_seed_rank_and_step_alone(task: tasks.Task) -> None:
    first = task.batch(3, 1, 5)
    torch.manual_seed(99)  # global state has no effect
    again = task.batch(3, 1, 5)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    for other in ((4, 1, 5), (3, 0, 5), (3, 1, 6)):
        assert not torch.equal(first[0], task.batch(*other)[0]), other


def test_a_model_depends_on_the_seed_alone_and_leaves_the_global_generator(
    task: tasks.Task,
) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = task.model(7)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    same, other = task.model(7), task.model(8)
    ours = torch.nn.utils.parameters_to_vector(one.parameters())
    assert torch.equal(ours, torch.nn.utils.parameters_to_vector(same.parameters()))
    assert not torch.equal(ours, torch.nn.utils.parameters_to_vector(other.parameters()))


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8])
def test_scores_of_all_parts_add_up(task: tasks.Task, parts: int) -> None:
    model = task.model(0).eval()
    whole = task.evaluate(model, 0, 1)
    sums = sum(task.evaluate(model, part, parts).tensor() for part in range(parts))
    assert isinstance(sums, torch.Tensor)
    total = tasks.Score.from_tensor(sums)
    assert total.count == whole.count
    assert total.mean_loss == pytest.approx(whole.mean_loss, rel=1e-4)
    assert task.metric_of(total) == pytest.approx(task.metric_of(whole), rel=1e-2)


def test_more_parts_than_data_leave_some_empty() -> None:
    task = tasks.get("gpt", **{**SMALL["gpt"], "validation_sequences": 2})
    assert task.evaluate(task.model(0), 3, 4).count == 0


def test_training_lowers_the_loss(task: tasks.Task) -> None:
    model = task.model(0)
    optimizer = task.optimizer(model)
    before = task.evaluate(model.eval(), 0, 1).mean_loss
    model.train()
    for step in range(20):
        task.loss(model, task.batch(0, 0, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert task.evaluate(model.eval(), 0, 1).mean_loss < 0.9 * before


def test_channels_last_gradients_keep_their_strides() -> None:
    task = tasks.get("image", **{**SMALL["image"], "channels_last": True})
    model = task.model(0)
    task.loss(model, task.batch(0, 0, 0)).backward()
    gradient = next(p.grad for p in model.parameters() if p.dim() == 4 and p.shape[1] > 1)
    assert gradient is not None
    assert gradient.is_contiguous(memory_format=torch.channels_last)
    assert not gradient.is_contiguous()


def test_tied_weights_are_one_parameter() -> None:
    tied, untied = (tasks.get("gpt", **{**SMALL["gpt"], "tied": t}).model(0) for t in (True, False))
    counts = [sum(p.numel() for p in model.parameters()) for model in (tied, untied)]
    assert counts[1] - counts[0] == 256 * 32


def test_resnet50_has_the_papers_layers() -> None:
    """He et al., Table 1: 53 convolutions with BatchNorm and one dense layer; 25.6 million values
    for 1000 classes, of which 2.05 million in the dense layer and 0.009 in the stem."""
    shapes = dict(tasks.shapes(tasks.get("image-resnet50")))
    convolutions = [shape for shape in shapes.values() if len(shape) == 4]
    assert len(convolutions) == 53
    assert len(shapes) == 53 + 2 * 53 + 2
    assert sum(map(math.prod, shapes.values())) == 25_557_032 - 990 * 2049 - 64 * (3 * 49 - 9)


def test_a_large_vocabulary_is_tied_to_the_embedding() -> None:
    shapes = dict(tasks.shapes(tasks.get("gpt-32k")))
    assert shapes["embedding.weight"] == (32768, 256)
    assert "output.weight" not in shapes


def test_unknown_tasks_and_options_are_named() -> None:
    with pytest.raises(ConfigError, match=r"unknown task 'speech'; known: gpt, gpt-32k, image"):
        tasks.get("speech")
    with pytest.raises(ConfigError, match=r"no option 'depth'; it has: .*layers"):
        tasks.get("gpt", depth=3)


def test_the_schedule_rises_then_falls_to_its_floor() -> None:
    factors = [warm_up_then_decay(step, 10, horizon=100) for step in range(150)]
    assert factors[:10] == sorted(factors[:10])
    assert factors[9] == 1.0
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[100:] == [pytest.approx(0.1)] * 50


def test_by_class_gives_ranks_disjoint_classes_that_are_all_classes() -> None:
    for ranks in (2, 4, 10):
        task = tasks.get("image", **{**SMALL["image"], "split": "by-class", "images": 200})
        classes = [set(task.batch(0, rank, 3, ranks)[1].tolist()) for rank in range(ranks)]
        assert sum(map(len, classes)) == 10
        assert set.union(*classes) == set(range(10))
    assert set(task.batch(0, 11, 3, 12)[1].tolist()) == {1}


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("gpt", {"split": "by-class"}, "the data of task 'gpt' have no classes"),
        ("image", {"split": "by-name"}, "split=by-name: use one of iid, by-class"),
        ("image", {"network": "alexnet"}, "network=alexnet: use one of cnn, vgg, resnet"),
        ("image", {"network": "resnet", "hidden": 64}, "resnet has no hidden dense layer"),
        ("image", {"channels": -1}, "channels=-1"),
        ("image", {"images": "many"}, "option images=many of task 'image': give a whole number"),
        ("image", {"momentum": "no"}, "give a number"),
        ("gpt", {"tied": 3}, "give true or false"),
    ],
)
def test_wrong_task_options_are_refused(name: str, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        tasks.get(name, **options)


def test_a_method_with_momentum_of_its_own_takes_that_of_the_optimizer_off() -> None:
    image, gpt = (tasks.get(name, **SMALL[name]) for name in ("image", "gpt"))
    for momentum, expected in ((None, 0.9), (0.0, 0.0)):
        assert image.optimizer(image.model(0), momentum).param_groups[0]["momentum"] == expected
        assert gpt.optimizer(gpt.model(0), momentum).param_groups[0]["betas"][0] == expected
