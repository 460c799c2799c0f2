"""What several commands take: types of options, and how their texts are read and checked."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer import Option

from gradwire.errors import ConfigError

Text = str | None
Whole = int | None
Real = float | None
N = TypeVar("N", int, float)
DEVELOPERS = "For developers"  # a group of commands


def group(name: str, help: str, example: str, **settings: Any) -> typer.Typer:
    """Commands below one word, or below gradwire itself, ""; `example` ends the help."""
    settings = {"no_args_is_help": True, **settings}
    return typer.Typer(name=name, help=help, epilog=_epilog(name, example), **settings)


def command(app: typer.Typer, name: str, example: str, **settings: Any) -> Callable[..., Any]:
    """Register a function as a command of `app`: its docstring is the help, whose paragraphs have
    lines as long as the terminal's, and `example` ends it."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        told = (inspect.getdoc(function) or "").split("\n\n")
        said = "\n\n".join(" ".join(paragraph.split()) for paragraph in told)
        epilog = _epilog(str(app.info.name), name, example)
        return app.command(name, help=said, epilog=epilog, **settings)(function)

    return register


def _epilog(*words: str) -> str:
    return " ".join(filter(None, ["Example: gradwire", *words]))


def number(help: str) -> Any:
    """An option of a number that is neither nan nor infinite."""

    def finite(value: float | None) -> float | None:
        if value is not None and not math.isfinite(value):
            raise typer.BadParameter(f"{value} is not a finite number.")
        return value

    return Option(help=help, callback=finite)


Json = Annotated[
    Text, Option("--json", metavar="FILE", help="JSON lines to FILE; - is standard output.")
]
_WITHIN = "End within 45 s on two idle cores"
Quick = Annotated[bool, Option("--quick", help=f"{_WITHIN}, unless the network is slow.")]
QuickAlone = Annotated[bool, Option("--quick", help=f"{_WITHIN}.")]  # without a network
Net = Annotated[str, Option(help="RATE,LATENCY such as 1gbit,1ms; or none.")]
Task = Annotated[str, Option(help="gpt, gpt-32k, gpt-124m, image or image-resnet50.")]
TaskOption = Annotated[
    list[str] | None, Option(help="NAME=VALUE, such as network=resnet; repeatable.")
]
Nodes = Annotated[Whole, Option(help="Emulated machines, one rank each; 4 unless given; quick: 2.")]
Seeds = Annotated[str, Option(help="Such as 0,1,2.")]
Steps = Annotated[Whole, Option(help="Training steps of each method; 200 unless given; quick: 30.")]
Resume = Annotated[bool, Option("--resume", help="Continue a killed run of the same --json FILE.")]
Ranks = Annotated[int, Option(help="Number of ranks.")]
At = Annotated[Text, Option(help="Only these points of recordings, as 0,150.")]
Fresh = Annotated[bool, Option("--fresh", help="Measure kernels anew.")]
PerNode = Annotated[int, Option(help="Ranks per machine; they share its link.")]
Model = Annotated[str, Option(help="resnet50, bert-large, ... or SIZES: 1e6,4096x1024.")]
# of what is simulated
ManyRanks = Annotated[int, Option(help="Number of ranks, to thousands.")]
Cores = Annotated[Real, number("Cores that all ranks share; each has its own unless given.")]
Backward = Annotated[float, number("Seconds in which gradients become ready, one after the other.")]
KernelThreads = Annotated[int, Option(help="Threads per kernel.")]
CurvesFile = Annotated[Path | None, Option(help="What kernels cost; written if missing.")]
SCHEDULED = "RATE,LATENCY; none; or a schedule: c1, c2, c1-small, c2-small or FILE.yaml."


def names(option: str, text: str | None, separator: str = ",") -> list[str] | None:
    """The names of an option that takes several, or None if it is not given.

    Raises:
        ConfigError: it is given, and empty, or names something twice.
    """
    if text is None:
        return None
    found = [part.strip() for part in text.split(separator) if part.strip()]
    if not found:
        raise ConfigError(f"{option} is empty: give one or more, separated by {separator!r}")
    twice = next((name for name, count in Counter(found).items() if count > 1), None)
    if twice is not None:
        raise ConfigError(f"{option} names {twice} twice")
    return found


def numbers(option: str, text: str | None, kind: type[N] = int) -> list[N] | None:
    """The numbers, whole unless `kind` is float, of an option that takes several; None if it is not
    given.

    Raises:
        ConfigError: it is given, and empty, or has another part.
    """
    found = []
    for part in names(option, text) or ():
        try:
            found.append(kind(part))
        except ValueError:
            what = "number" if kind is float else "whole number"
            raise ConfigError(f"{option} {text}: {part!r} is not a {what}") from None
    return None if text is None else found


def writable(option: str, file: Path | None) -> None:
    """Check that a file can be written, before the work that fills it; leaves it as it is.

    Raises:
        ConfigError: it cannot; the message says why.
    """
    if file is None:
        return
    if file.is_dir() or not file.parent.is_dir():
        raise ConfigError(f"{option} {file}: not a file in an existing folder")
    existed = file.exists()
    try:
        with file.open("a"):
            pass
        if not existed:
            file.unlink()
    except OSError as error:
        raise unwritable(option, file, error) from error


def unwritable(option: str, file: Path, error: OSError) -> ConfigError:
    """What to raise where an option's file cannot be written."""
    return ConfigError(f"{option} {file}: cannot be written ({error.strerror})")
