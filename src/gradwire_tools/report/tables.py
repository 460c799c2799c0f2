"""`gradwire report FILE... --table`: tables in Markdown, which `pages` fills into README and docs.

Of trainings there is one per run, task and number of ranks. Times to the target and gains are those
of the page, by the same rules (`gain`): nothing within noise is called a gain. Losses stand in a
table as gains do. The commands behind the rows follow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from gradwire.errors import ConfigError
from gradwire_tools.bench.paper.ablation import part_gain
from gradwire_tools.bench.quantities import (
    DASH,
    digits,
    network,
    percent,
    plural,
    rate,
    seconds,
    size,
    times,
)
from gradwire_tools.bench.train.rows import FULL, TARGETS, Baselines, length, per_step
from gradwire_tools.report import learning, predictions
from gradwire_tools.report.gain import Gain, Standing, of_summaries
from gradwire_tools.report.rows import Row, grouped, read, sort, split
from gradwire_tools.report.training import MODEL, networks

Kinds = dict[str, list[Row]]  # rows by the name of their kind
Runs = Sequence[Sequence[Row]]
TableLines = Callable[[Runs], list[str]]

_COST = 0.01  # of fp32's metric, that is no loss
_LEGEND = (
    "A number is the gain. Bold: faster than the best 16-bit baseline (*1*); plain: within noise, "
    "or too few seeds to judge."
)
_LEGEND_OF_THREE = (
    "Gains at three targets: fp32's loss after 60 % of its run, after 80 %, and its last loss "
    "plus 1 %. Bold: faster than the best 16-bit baseline (*1*) at the first two; plain: at one of "
    "them slower, within noise, or too few seeds to judge."
)


def table(files: Iterable[Path], kinds: Sequence[str] = (), task: str | None = None) -> str:
    """The tables of rows of files.

    Args:
        kinds: of `KINDS`, one at most; else a line per network and method.
        task: of its rows alone.

    Raises:
        ConfigError: a file cannot be read, there are no rows for the table, or the arguments do not
            go together.
    """
    for kind in kinds[1:]:
        raise ConfigError(f"--{kinds[0]} and --{kind} are both given: leave one of them out")
    kind = kinds[0] if kinds else ""
    if task and kind in ("choices", "parts"):
        raise ConfigError(f"--{kind} has rows of no task: leave --task out")
    found = sort(read(*files))
    for name in ("bench train", "decisions"):
        found[name] = [row for row in found[name] if task in (None, row["task"])]
    made, lacking = KINDS[kind]
    if text := made(found):
        return text
    which = "" if task is None else f" of the task {task!r}"
    raise ConfigError(f"there are no {lacking.format(which)}")


def _by_training(kinds: Kinds, lines: TableLines, keys: Sequence[str] = ("run",)) -> str:
    """A method is compared with the baselines of its own run, not with those of another's seeds;
    where `keys` lack the run, with those of the same training, named if there are several."""
    made = []
    for mine in grouped(kinds["bench train"], *MODEL, *keys).values():
        if runs := _by_network(mine):
            made.append((_about(mine), _with_commands(lines(runs), mine)))
    if len(made) == 1 and "run" not in keys:
        return made[0][1]
    return "\n\n".join(f"{about}\n\n{told}" for about, told in made)


def _by_network(rows: Sequence[Row]) -> Runs:
    """The rows of each network, slow ones first; those without summaries are left out."""
    runs = [mine for mine in grouped(rows, "net", "composed").values() if split(mine)[0]]
    return sorted(runs, key=lambda mine: rate(mine[0]["net"]))


def _about(rows: Sequence[Row]) -> str:
    first, *_ = summaries = split(rows)[0]
    said = f"Task `{first['task']}`, {first['ranks']} ranks"
    if first.get("replicas"):
        batches = plural(first["accumulate"], "micro-batch", "es")
        said += f" on {first['replicas']} machines, {batches} per step"
    if first.get("parameters"):
        said += f", {first['parameters']:,} parameters"
    if seeds := dict.fromkeys(seed for row in summaries for seed in row.get("seeds") or ()):
        said += f", seeds {', '.join(map(str, seeds))}"
    return f"{said}, {length(summaries)}:"


def _lines(runs: Runs) -> list[str]:
    """A line per network and method."""
    cells = []
    for run in runs:
        summaries, evaluations = split(run)
        gains, full = of_summaries(summaries, evaluations), _full(summaries)
        net = network(run[0]["net"]) + (", composed" if run[0].get("composed") else "")
        for row in summaries:
            told = ["for timing only", *[DASH] * 3]
            if not row.get("timing_only"):
                told = [learning.time_reached(row), _gain(gains[row["method"]])]
                told += _learned(row, full)
            cells.append([net, f"`{row['method']}`", seconds(row["step_seconds"]), *told])
            net = ""
    heads = ("network", "method", "step", "time to target", "gain", "last loss", "against fp32")
    return _table(heads, cells)


def _grid(runs: Runs) -> list[str]:
    """A line per method: its gain on each network, at each target that the rows have; then what it
    learned, on the slowest."""
    columns = [split(run) for run in runs]
    every = [row.get("times_to_by_seed") or {} for summaries, _ in columns for row in summaries]
    three = all(times.keys() >= TARGETS.keys() for times in every)
    targets: list[str | None] = [*TARGETS] if three else [None]
    gains = [[of_summaries(*column, target) for target in targets] for column in columns]
    summaries, cells = columns[0][0], []
    full = _full(summaries)
    for row in summaries:
        if not row.get("timing_only"):
            at = [[one.get(row["method"]) for one in column] for column in gains]
            line = [_three(mine) if three else _gain(mine[0], True) for mine in at]
            learned = [*_learned(row, full), digits(row.get("final_metric"), 4)]
            cells.append([f"`{row['method']}`", *line, *learned])
    heads = ["method", *networks(runs), "last loss", "against fp32", "last metric"]
    return [*_table(heads, cells), "", _LEGEND_OF_THREE if three else _LEGEND]


def _three(gains: Sequence[Gain | None]) -> str:
    """Gains at `TARGETS`; bold where the first two are more than noise."""
    words = {Standing.NEVER: "never", Standing.BAR: "*1*"}
    known = [one or Gain(Standing.UNKNOWN) for one in gains]
    told = [words.get(one.standing, digits(one.ratio)) for one in known]
    both, last = " / ".join(told[:2]), told[2]
    if all(one.standing is Standing.GAIN for one in known[:2]):
        both = f"**{both}**"
    return f"{both} / {last}"


def _full(summaries: Sequence[Row]) -> Row | None:
    return next((row for row in summaries if row["method"] == FULL), None)


def _learned(row: Row, full: Row | None) -> list[str]:
    """The last loss, and how it compares with fp32's."""
    if row["final_loss"] is None:
        return ["not finite", DASH]
    return [digits(row["final_loss"], 4), learning.loss_verdict(row, full)[1]]


def _gain(gain: Gain | None, short: bool = False) -> str:
    """A gain bold, a loss named, all else with its verdict; `short`: if it is more than noise."""
    if gain is None or gain.standing is Standing.NEVER:
        return DASH if gain is None else "loses"
    if gain.ratio is None:
        return gain.text
    if short and gain.standing is Standing.BAR:
        return "*1*"
    told = times(gain.ratio)
    if gain.standing is Standing.GAIN:
        return f"**{told}**"
    if short and gain.standing in (Standing.NOISE, Standing.UNJUDGED):
        return told
    return f"{told}, {'loses' if gain.standing is Standing.LOSS else gain.standing.value}"


def _best(kinds: Kinds) -> str:
    """Networks x tasks: the three methods with the highest gains, among those whose last metric is
    nowhere more than `_COST` worse than fp32's; and in how many cells each leads. Of several runs
    with a method the newest counts: the highest would be one that chance had favoured."""
    cells: dict[tuple[str, str], dict[str, tuple[float, float]]] = {}
    lost = set()
    runs = grouped(kinds["bench train"], *MODEL, "run", "net", "composed").values()
    for mine in sorted(runs, key=lambda rows: (rows[0].get("run") or {}).get("date") or ""):
        summaries, evaluations = split(mine)
        gains, full = of_summaries(summaries, evaluations), _full(summaries)
        for row in summaries:
            of_cell = cells.setdefault((row["net"], row["task"]), {})
            ratio, cost = gains[row["method"]].ratio, _cost(row, full)
            if ratio is None or cost is None or cost > _COST:
                lost.add(row["method"])
            else:
                of_cell[row["method"]] = ratio, cost
    if not any(cells.values()):
        return ""
    tasks = [*dict.fromkeys(row["task"] for row in kinds["bench train"])]
    lines, leads = [], Counter[str]()
    for net in sorted({net for net, _ in cells}, key=rate):
        line = [network(net)]
        for name in tasks:
            of_cell = cells.get((net, name), {})
            kept = (method for method in of_cell if method not in lost)
            found = sorted(kept, key=of_cell.__getitem__, reverse=True)
            leads.update(found[:1])
            told = [f"`{m}` {times(of_cell[m][0])} ({-100 * of_cell[m][1]:+.1f} %)" for m in found]
            line.append("; ".join(told[:3]) or DASH)
        lines.append(line)
    said = ", ".join(f"`{name}` {number}" for name, number in leads.most_common())
    return "\n".join([*_table(["network", *tasks], lines), "", f"Highest gains: {said or 'none'}."])


def _cost(row: Row, full: Row | None) -> float | None:
    """How much worse than fp32's a last metric is; None of torch's own methods, and where one of
    the two is not known, or fp32's is 0."""
    mine, bar = row.get("final_metric"), (full or {}).get("final_metric")
    if mine is None or not bar or row["method"].startswith("torch-") or row.get("timing_only"):
        return None
    better = 1 if row.get("metric_name") == "accuracy" else -1
    return float(better * (1 - mine / bar))


def _steps(runs: Runs) -> list[str]:
    """Methods x networks: medians of steps, in brackets how many times faster than the best 16-bit
    baseline's on the network. Of several runs, unlike for gains, the first with a method counts.
    With replicas (HSDP) also what crosses between machines, and the last loss on the first
    network."""
    columns = [split(run)[0] for run in runs]
    bars = [Baselines.of_rows(column).best(column, "step_seconds") or {} for column in columns]
    cells = []
    for method in dict.fromkeys(row["method"] for column in columns for row in column):
        mine = [next((r for r in column if r["method"] == method), {}) for column in columns]
        first = next(filter(None, mine))
        cells.append([f"`{method}`", size(first.get("wire_bytes_per_step"))])
        took = [[row.get("step_seconds") for row in rows] for rows in (mine, bars)]
        cells[-1] += map(_beside, *took)
        if first.get("replicas"):
            cells[-1][2:2] = [size(per_step(first, "replicas_wire_bytes"))]
            cells[-1].append(digits(first["final_loss"], 4))
    heads = ["method", "sent per step", *networks(runs)]
    if columns[0][0].get("replicas"):
        heads[2:2] = ["to other machines"]
        heads.append("last loss")
    return _table(heads, cells)


def _choices(kinds: Kinds) -> str:
    """Of the rows of `bench planner`; what is expected is bold where it is off by much."""
    found, cells = kinds["bench planner"], []
    for (net,), mine in grouped(found, "net").items():
        name = network(net)
        for row in mine:
            off = percent(1 + row["error"])
            line = [name, size(row["nbytes"]), f"`{row['method']}` by {row['algorithm']}"]
            line += [seconds(row["seconds"]), seconds(row["expected_seconds"])]
            line += [off if abs(row["error"]) <= predictions.TRUE else f"**{off}**"]
            line += [f"`{row['best_method'].removeprefix('gradwire:')}`", times(row["ratio"])]
            cells.append(line)
            name = ""
    heads = ["network", "gradient", "choice", "took", "expected", "off by", "fastest", "ratio"]
    return _with_commands(_table(heads, cells), found) if found else ""


def _parts(kinds: Kinds) -> str:
    """Of the rows of `bench ablation`: parts x models, in the lab and in the simulator; in brackets
    how many times faster than without the part."""
    found = kinds["bench ablation"]
    columns = grouped(found, "model", "net", "ranks", "where")
    heads = ["part", *(f"{model}, {net}, {n} ranks, {where}" for model, net, n, where in columns)]
    told = [{row["part"]: _part(row) for row in of} for of in columns.values()]
    parts = dict.fromkeys(row["part"] for row in found)
    cells = [[part, *(of.get(part, DASH) for of in told)] for part in parts]
    return _with_commands(_table(heads, cells), found) if found else ""


def _part(row: Row) -> str:
    gain = part_gain(row)
    return seconds(row["synchronisation_seconds"]) + (f" ({times(gain)})" if gain else "")


def _auto(kinds: Kinds) -> str:
    """Two tables of automatic mode. Methods x networks: means of steps after the first evaluation
    that follows its last decision, in brackets how many times faster than those of the fastest that
    was chosen by hand.
    And what it tried: what a pass took; a star marks what it then used."""
    decided = [row for row in kinds["decisions"] if row.get("tried")]
    decided.sort(key=lambda row: rate(row["net"]))
    if not decided:
        return ""
    of_run = ("task", "net", "run", "seed")
    runs = grouped(split(kinds["bench train"])[1], *of_run)
    columns = []
    for place, (*_, last) in grouped(decided, *of_run).items():
        columns.append((last, _settled(runs.get(place, []), last["step"])))
    heads = ["method", *(f"{row['task']}, {network(row['net'])}" for row, _ in columns)]
    fastest = [
        min((took for name, took in of.items() if not name.startswith("auto")), default=None)
        for _, of in columns
    ]
    cells = []
    for method in dict.fromkeys(name for _, of in columns for name in of):
        mine = [of.get(method) for _, of in columns]
        cells.append([f"`{method}`", *map(_beside, mine, fastest)])
    lines, cells = [*_table(heads, cells), ""], []
    for row in decided:
        at = [row["task"], network(row["net"])]
        for one in row["tried"]:
            star = "\\*" if one["used"] else ""
            cells.append([*at, one["setting"] + star, seconds(one["seconds"])])
            at = ["", ""]
    return _with_commands([*lines, *_table(["task", "network", "tried", "took"], cells)], decided)


def _settled(run: Sequence[Row], decided: int) -> dict[str, float]:
    """Seconds of a step by method, of those with two evaluations since. Methods take turns: they
    share what else the machine did."""
    found = {}
    for (method,), mine in grouped([r for r in run if r["step"] >= decided], "method").items():
        steps = sorted(mine, key=lambda row: int(row["step"]))
        first, last = steps[0], steps[-1]
        if count := last["step"] - first["step"]:
            found[str(method)] = (last["seconds"] - first["seconds"]) / count
    return found


def _beside(took: float | None, other: float | None) -> str:
    """Seconds, in brackets how many times faster than another."""
    if not took:
        return seconds(took)
    return seconds(took) + (f" ({times(other / took)})" if other else "")


def _table(heads: Sequence[str], cells: Iterable[Sequence[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *cells]
    return [f"| {' | '.join(one.replace('|', chr(92) + '|') for one in line)} |" for line in lines]


def _with_commands(lines: Iterable[str], rows: Sequence[Row]) -> str:
    """A table, and the commands behind its rows."""
    made = []
    for run in (row["run"] for row in rows if isinstance(row.get("run"), dict)):
        commit = run.get("commit") or "no git checkout"
        made.append(f"- `{run.get('command')}` at {commit}, {run.get('machine')}")
    return "\n".join([*lines, "", *dict.fromkeys(made)])


_TRAINED = "summary rows of `gradwire bench train`"
_OTHERS = (
    f"{_TRAINED}{{}}: --choices and --parts print rows of the planner and of the ablation, "
    "`gradwire report` all others"
)
# By option: what makes a table, and what there is none of where it is empty.
KINDS: dict[str, tuple[Callable[[Kinds], str], str]] = {
    "": (partial(_by_training, lines=_lines), _OTHERS),
    "gains": (partial(_by_training, lines=_grid), _OTHERS),
    "best": (_best, f"{_TRAINED} with gains"),
    "steps": (partial(_by_training, lines=_steps, keys=("sharded", "accumulate")), _TRAINED),
    "choices": (_choices, "rows of `gradwire bench planner`"),
    "parts": (_parts, "rows of `gradwire bench ablation`"),
    "auto": (_auto, "rows in which automatic mode tried settings"),
}
