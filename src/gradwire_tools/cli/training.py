"""`gradwire bench train`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from gradwire.errors import ConfigError
from gradwire_tools.cli import options
from gradwire_tools.cli.options import Real, Text, Whole, names, number, numbers
from gradwire_tools.cli.output import Output, output

if TYPE_CHECKING:
    from gradwire_tools.bench.train.config import TrainConfig


def bench_train(
    task: options.Task = "gpt",
    task_option: options.TaskOption = None,
    split: Annotated[str, Option(help="iid, or by-class: some classes per rank.")] = "iid",
    net: Annotated[
        Text, Option(help=f"{options.SCHEDULED} 1gbit,1ms unless given; quick: 100mbit,1ms.")
    ] = None,
    nodes: options.Nodes = None,
    method_names: Annotated[
        Text,
        Option(
            "--methods",
            help="Names, or CODEC:OPTION=VALUE:...; torch's fp32, fp16, bf16 and PowerSGD, and "
            "gradwire's fp16, qsgd4 and terngrad unless given; quick: fp32, fp16 and qsgd4.",
        ),
    ] = None,
    seeds: options.Seeds = "0",
    steps: options.Steps = None,
    patience: Annotated[
        Whole, Option(help="End a method when its rolling loss did not improve for N evaluations.")
    ] = None,
    target: Annotated[Real, number("Validation loss to reach.")] = None,
    target_at: Annotated[Real, number("Target: fp32's loss at this share.")] = None,
    compose: Annotated[
        bool, Option("--compose", help="Train once; time steps on each of --nets.")
    ] = False,
    nets: Annotated[Text, Option(help="Networks, separated by semicolons.")] = None,
    validate: Annotated[
        bool, Option("--validate", help="Train on each of --nets as a whole, too.")
    ] = False,
    sharded: Annotated[
        bool, Option("--sharded", help="Train under FSDP2: weights are sent, too.")
    ] = False,
    accumulate: Annotated[int, Option(help="With --sharded: micro-batches per step.")] = 1,
    device: Annotated[
        str, Option(help="cpu, or cuda: ranks share the GPU; losses, no times.")
    ] = "cpu",
    pause: Annotated[
        Real, number("Save after so many seconds of training, and end; --resume goes on.")
    ] = None,
    per_node: Annotated[
        int, Option(help="With --sharded: ranks per machine, which shard; machines replicate.")
    ] = 1,
    resume: options.Resume = False,
    quick: options.Quick = False,
    json_file: options.Json = None,
) -> None:
    """Train with several methods; report time to accuracy against 16 bit."""
    from gradwire_tools.bench.train import config, view

    chosen = names("--methods", method_names)
    networks = _networks(compose, nets)
    if pause is not None and json_file in (None, "-"):
        raise ConfigError("--pause saves beside the rows: give their --json FILE")
    with output(json_file) as out:
        planned = config.plan(
            task=task,
            task_options=task_options(task_option, split),
            net=net,
            nodes=nodes,
            methods=None if chosen is None else tuple(chosen),
            seeds=tuple(numbers("--seeds", seeds) or ()),
            steps=steps,
            target=target,
            target_at=target_at,
            patience=patience,
            nets=networks,
            validate=validate,
            sharded=sharded,
            accumulate=accumulate,
            device=device,
            pause_seconds=pause,
            per_node=per_node,
            quick=quick,
        )
        for table in view.tables(trained(planned, out, json_file, resume)):
            out.console.print(table)


def trained(
    config: TrainConfig, out: Output, json_file: str | None, resume: bool
) -> list[dict[str, Any]]:
    """The rows of a run, written as they come."""
    from gradwire_tools.bench.train import view

    state = _state_of(json_file, resume)
    return list(out.each(view.watch(config, out.remarks, state, resume)))


def _networks(compose: bool, text: str | None) -> tuple[str, ...]:
    if compose != (text is not None):
        missing = "--nets" if compose else "--compose"
        raise ConfigError(f"--compose and --nets go together: {missing} is missing")
    found = tuple(part.strip() for part in (text or "").split(";") if part.strip())
    if compose and not found:
        raise ConfigError("--nets is empty: give networks, such as '100mbit,1ms;1gbit,1ms'")
    return found


def task_options(given: list[str] | None, split: str) -> dict[str, Any]:
    """The task's options, as NAME=VALUE."""
    from gradwire.codecs.text import parse

    found: dict[str, Any] = {} if split == "iid" else {"split": split}
    for text in given or ():
        try:
            _, one = parse(f"task:{text}")
        except ConfigError:
            raise ConfigError(f"--task-option {text}: write NAME=VALUE") from None
        twice = next((name for name in one if name in found), None)
        if twice is not None:
            raise ConfigError(f"--task-option {text}: {twice} is given twice")
        found |= one
    return found


def _state_of(json_file: str | None, resume: bool) -> Path | None:
    """The folder beside the rows in which an unfinished run is kept."""
    if json_file in (None, "-"):
        if resume:
            raise ConfigError("--resume continues the run of a file: give its --json FILE")
        return None
    file = Path(str(json_file))
    state = file.with_name(file.name + ".state")
    kept = (state / "config.json").exists()
    if resume and not kept and file.is_file() and '"row": "summary"' in file.read_text():
        raise ConfigError(
            f"--resume: {file} holds the rows of a run that ended, and there is nothing to "
            "continue: leave --resume out to run it again"
        )
    return state
