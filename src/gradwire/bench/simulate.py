"""`gradwire sim`: rows of predictions for codecs and algorithms, along a sweep of one parameter.

A row: method, codec, algorithm, ranks, per_node, net, model, numel, seconds, compute_seconds,
wire_bytes, limit_seconds, of_limit, backward_seconds, buckets, messages, exact, machine (of the
curves), and sweep and value where a parameter was swept. docs/reference/simulator.md explains them.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradwire import codecs as codec_table
from gradwire.bench import curves as measuring
from gradwire.bench import methods, workers
from gradwire.bench.kernels import check_threads
from gradwire.bench.provenance import stamped
from gradwire.codecs.text import value as value_of
from gradwire.collectives import Options
from gradwire.errors import ConfigError
from gradwire.lab import Network
from gradwire.sim import Curves, Net, Scenario, curves, predict

SWEPT = ("ranks", "rate", "latency", "per_node", "cores", "backward", "segments", "partitions")
_MOST_RANKS = 1 << 16


@dataclass(frozen=True)
class Wanted:
    """The command line's request.

    Attributes:
        codecs: NAME or NAME:OPTION=VALUE:..., where error_feedback=true keeps residuals.
        algorithms: each is combined with each codec.
        ranks, net, model, per_node, cores, backward: see gradwire.sim.Scenario.
        options: fields of gradwire.Options except the algorithm; None leaves the default.
        sweep: NAME=VALUE,VALUE...: one of `SWEPT`, or an option of the codecs.
        threads: threads per kernel.
        file: the file of curves; if it does not exist, curves are measured and written to it. None
            uses the user's cache.
        fresh: measure again.
    """

    codecs: Sequence[str] = ("qsgd",)
    algorithms: Sequence[str] = ("sra",)
    ranks: int = 4
    net: str = "1gbit,1ms"
    model: str = "resnet50"
    per_node: int = 1
    cores: float | None = None
    backward: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)
    sweep: str | None = None
    threads: int = 1
    file: Path | None = None
    fresh: bool = False


@stamped
def run(wanted: Wanted, advance: workers.Advance | None = None) -> Iterator[dict[str, Any]]:
    """Yield a row for each point of the sweep, algorithm and codec.

    `advance` is called before every codec whose kernels are measured.

    Raises:
        ConfigError: an unknown name, an undefined combination or a number out of range. It is
            raised before anything is measured.
    """
    check_threads(wanted.threads)
    points = [
        (name, value, text, scenario)
        for name, value in _sweep(wanted.sweep)
        for text in wanted.codecs
        for algorithm in wanted.algorithms
        for scenario in [_scenario(wanted, text, algorithm, name, value)]
    ]
    if not points:
        raise ConfigError("nothing to simulate: name a codec and an algorithm")
    known = _curves(wanted, [scenario for *_, scenario in points], advance)
    for name, value, text, scenario in points:
        swept = {} if name is None else {"sweep": name, "value": value_of(value)}
        yield {
            "method": f"gradwire:{text}",
            "codec": text,
            **predict(scenario, known),
            "machine": known.machine,
            **swept,
        }


def _curves(
    wanted: Wanted, scenarios: Sequence[Scenario], advance: workers.Advance | None
) -> Curves:
    needed = [scenario.codec for scenario in scenarios]
    if wanted.file is None:
        return measuring.measured(needed, wanted.threads, wanted.fresh, advance)
    if wanted.fresh or not wanted.file.exists():
        if not wanted.file.parent.is_dir():
            raise ConfigError(f"--curves {wanted.file}: not a file in an existing folder")
        measuring.measured(needed, wanted.threads, wanted.fresh, advance).save(wanted.file)
    return curves.load(wanted.file)


def _sweep(text: str | None) -> list[tuple[str | None, str]]:
    """(name, value) of each point; one point with name None if there is no sweep."""
    if text is None:
        return [(None, "")]
    name, equals, values = text.partition("=")
    chosen = [value.strip() for value in values.split(",") if value.strip()]
    if not equals or not name.strip() or not chosen:
        raise ConfigError(f"--sweep {text!r}: expected NAME=VALUE,VALUE..., as in ranks=2,4,8")
    return [(name.strip(), value) for value in chosen]


def _scenario(wanted: Wanted, text: str, algorithm: str, name: str | None, value: str) -> Scenario:
    """One point; `name` and `value` are those of the swept parameter."""
    options: dict[str, Any] = dict(methods.parse(f"gradwire:{text}").options)
    if name is not None and name not in SWEPT:
        options.update(methods.parse(f"gradwire:{text.split(':')[0]}:{name}={value}").options)
    feedback = options.pop("error_feedback", False)
    if not isinstance(feedback, bool):
        raise ConfigError(f"codec {text!r}: error_feedback={feedback!r}: use true or false")
    if "algorithm" in options:
        raise ConfigError(f"codec {text!r}: give algorithms with --algorithm")
    network = _network(wanted.net, name, value)
    given = {key: one for key, one in wanted.options.items() if one is not None}
    if name in ("segments", "partitions"):
        given[name] = _number(name, value, whole=True)
    ranks = _number("ranks", value, whole=True) if name == "ranks" else wanted.ranks
    if ranks < 2:
        given_as = f"--sweep ranks={value}" if name == "ranks" else f"--ranks {ranks}"
        raise ConfigError(f"{given_as}: one rank sends nothing; use 2 ranks or more")
    if ranks > _MOST_RANKS:
        raise ConfigError(f"ranks={ranks}: {_MOST_RANKS} at most")
    per_node = _number("per_node", value, whole=True) if name == "per_node" else wanted.per_node
    cores = _number("cores", value) if name == "cores" else wanted.cores
    backward = _number("backward", value) if name == "backward" else wanted.backward
    return Scenario(
        ranks=int(ranks),
        net=Net(str(network), network.rate_bits_per_s, network.latency_s),
        codec=codec_table.get(**options),
        model=wanted.model,
        options=Options(algorithm=algorithm, **given),
        feedback=feedback,
        per_node=int(per_node),
        cores=math.inf if cores is None else cores,
        backward=backward,
    )


def plotter(file: Path) -> Callable[[Sequence[dict[str, Any]]], None]:
    """A function that draws rows into `file`. Call it first, to find errors before simulating.

    Raises:
        ConfigError: `file` ends in neither .png nor .svg, its folder does not exist, or matplotlib
            is missing.
    """
    if file.suffix not in (".png", ".svg"):
        raise ConfigError(f"--plot {file}: give a name that ends in .png or .svg")
    if not file.parent.is_dir():
        raise ConfigError(f"--plot {file}: not a file in an existing folder")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed: pip install 'gradwire[report]'"
        )
    from gradwire.bench import sim_plot

    return lambda rows: sim_plot.draw(rows, file)


def _network(text: str, name: str | None, value: str) -> Network:
    network = Network.parse(text, emulated=False)
    if name not in ("rate", "latency"):
        return network
    if not network.shaped:
        raise ConfigError(f"--sweep {name}=...: needs a network, as in --net 1gbit,1ms")
    rate, latency = str(network).split(",")
    both = f"{value},{latency}" if name == "rate" else f"{rate},{value}"
    return Network.parse(both, emulated=False)


def _number(name: str, text: str, whole: bool = False) -> Any:
    try:
        return int(text) if whole else float(text)
    except ValueError:
        kind = "a whole number" if whole else "a number"
        raise ConfigError(f"--sweep {name}: {text!r} is not {kind}") from None
