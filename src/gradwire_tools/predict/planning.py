"""`gradwire plan`: which gradients are worth compressing, and the fastest setting, on a network.

The network is given by --net, or that between torchrun's ranks, which measure it.

Rows, with the costs of this machine's kernels (or of a file of curves):

    part "layer"    numel, count, compress, partitions, seconds, uncompressed_seconds (bf16),
                    compressed_seconds: of each size of matrices, by itself (HIPRESS Eqs. 1 and 2),
                    in the algorithm of the best setting of the first codec; not of aggregators
    part "setting"  method, algorithm, segments, coalesce_bytes, least, seconds, wire_bytes,
                    of_limit, saves (of the time of the best without a codec): the best setting of
                    each method, simulated (gradwire_tools.sim.choice), the fastest first
    part "verdict"  compress, method, detail: what to use, in a sentence, and the line to write
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch.distributed as dist

from gradwire import groups
from gradwire.aggregators import registry
from gradwire.collectives import Options
from gradwire.errors import ConfigError
from gradwire.lang import Codec
from gradwire.planner.files import PlanFile
from gradwire.planner.links import Links, measure_links
from gradwire_tools.bench import workers
from gradwire_tools.bench.network.world import World, started_by_torchrun
from gradwire_tools.bench.progress import progress
from gradwire_tools.bench.provenance import stamped
from gradwire_tools.bench.rows import Row
from gradwire_tools.lab import Network
from gradwire_tools.predict import simulate
from gradwire_tools.predict.sim_sweep import Point
from gradwire_tools.sim import Curves, Net, models
from gradwire_tools.sim.choice import FULL, HALF, Setting, Situation, choose, name, plain, scenario
from gradwire_tools.sim.selective import decisions

METHODS = ("qsgd:bits=4", "powersgd:rank=8")
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class WantedPlan:
    """The command line's request.

    Attributes:
        model, per_node, cores, backward: see gradwire_tools.sim.Scenario.
        shapes: a plan's file, which has names and shapes of parameters, in place of `model`.
        net: as the command line has it; None: torchrun's ranks measure theirs.
        codecs: codecs or aggregators, NAME or NAME:OPTION=VALUE:..., from the most exact to the
            least.
        ranks: None: 4, or as many as torchrun has started.
        threads, file, fresh: as of gradwire_tools.predict.simulate.WantedCollectives.
        save: where the best setting is written as a plan, for `gw.attach(model, plan=FILE)`.

    Raises:
        ConfigError: arguments that do not go together, or a file that is no plan.
    """

    model: str | None
    shapes: Path | None
    net: str | None
    codecs: Sequence[str] = METHODS
    ranks: int | None = None
    per_node: int = 1
    cores: float | None = None
    backward: float = 0.0
    threads: int = 1
    file: Path | None = None
    fresh: bool = False
    save: Path | None = None

    def __post_init__(self) -> None:
        if None not in (self.model, self.shapes):
            raise ConfigError("plan: --model and --shapes are both given: leave one of them out")
        if (self.model or self.shapes) is None or (self.net or self.world) is None:
            raise ConfigError(
                "plan: give --model or --shapes, and --net, as in --model resnet50 --net 1gbit,1ms"
                "; or let torchrun start it (docs/how-to/automatic.md)"
            )
        if self.world is not None and self.per_node != 1:
            raise ConfigError(
                f"--per-node {self.per_node}: under torchrun the ranks' machines are known; leave "
                "it out"
            )
        if self.save is not None and self.shapes is None:
            raise ConfigError(
                f"--save {self.save}: a plan has the names of parameters: give --shapes, a file "
                "that handle.plan.save wrote, in place of --model"
            )

    @property
    def world(self) -> World | None:
        """The ranks that torchrun has started; None: it has not."""
        if started_by_torchrun(os.environ) == 1:
            return None
        return World.of(self.ranks, self.net or "none", os.environ)

    @property
    def parameters(self) -> Mapping[str, models.Shape]:
        """Of a file, the shapes by name."""
        return {} if self.shapes is None else PlanFile.read(self.shapes).every_shape(self.shapes)

    def situation(self) -> Situation:
        """Without curves; on a network that is to be measured, without its links.

        Raises:
            ConfigError: an unknown name or a number out of range.
        """
        given = self.parameters.values() if self.model is None else models.shapes(self.model)
        shapes = tuple(shape for shape in given if math.prod(shape))
        ranks, net = Point().ranks(4 if self.ranks is None else self.ranks), Net("as it is")
        if self.world is not None:
            ranks = self.world.count
        elif self.net is not None:
            network = Network.parse(self.net, emulated=False)
            net = Net(self.net, network.rate_bits_per_s, network.latency_s)
        cores = math.inf if self.cores is None else self.cores
        of = ranks, net, simulate.NO_CURVES, self.per_node, cores, self.backward
        return Situation(shapes, *of)


@stamped
def run(wanted: WantedPlan) -> Iterator[Row]:
    """Yield the rows; at the end, write the plan.

    Raises:
        ConfigError: an unknown name or a number out of range; it is raised before anything is
            measured.
        TransportError: torchrun's ranks cannot be joined.
    """
    chosen = [simulate.method(text) for text in wanted.codecs]
    where, world = wanted.situation(), wanted.world
    matrices = [shape for shape in where.shapes if len(shape) > 1]
    if tuple(wanted.codecs) == METHODS and matrices:  # without what shrinks no matrix
        chosen = [one for one in chosen if not all(map(registry.get(one).impossible, matrices))]
    priced = [of for one in chosen for of in scenario(where, plain(one, where)[0]).priced]
    found = None if world is None else join(world)
    known = simulate.known_curves([FULL, HALF, *priced], wanted.threads, wanted.file, wanted.fresh)
    for of in priced:  # what has no curves is refused before work begins
        known.seconds(of, "encode", 0, 0) if isinstance(of, Codec) else known.of_aggregator(of)
    where = replace(where, curves=known) if found is None else measured(where, known, *found)
    choice = choose(where, chosen, progress)
    context = {
        "model": wanted.model or str(wanted.shapes),
        "ranks": where.ranks,
        "net": where.net.text,
    }
    for codec in [one for one in chosen if isinstance(one, Codec)][:1]:
        algorithm = choice.of(codec).setting.options.algorithm
        for one in decisions(where, codec, algorithm):
            yield {
                "part": "layer", **context, **asdict(one.decision), "method": name(codec),
                "algorithm": algorithm, "numel": one.numel, "count": one.count,
            }  # fmt: skip
    settings = {}
    for ranked in choice.of_codec:
        setting, limit = ranked.setting, ranked.limit_seconds
        settings[ranked] = {
            "part": "setting", **context,
            "method": name(setting.codec),
            "algorithm": setting.options.algorithm,
            "coordinated": setting.options.coordinated,
            "segments": setting.options.segments,
            "coalesce_bytes": setting.coalesce_bytes,
            "least": setting.least,
            "seconds": ranked.seconds,
            "wire_bytes": ranked.wire_bytes,
            "of_limit": None if limit is None else limit / ranked.seconds,
            "saves": 1 - ranked.seconds / choice.uncompressed.seconds,
        }  # fmt: skip
    yield from settings.values()
    yield {
        "part": "verdict", **context, "compress": choice.compresses,
        "method": name(choice.best.setting.codec),
        "detail": f"{choice.verdict}\n{line_of(choice.best.setting, wanted.save)}",
    }  # fmt: skip
    if wanted.save is not None:
        plan_of(settings[choice.best], wanted.parameters, where).save(wanted.save)


def join(world: World) -> tuple[Links, Sequence[int]]:
    """As one of torchrun's ranks: the links between all, and each rank's machine."""
    (found,) = workers.measured(world, _TIMEOUT_S, measure)
    return found["links"], found["machines"]


def measure() -> list[Row]:
    """One row, alike on all ranks."""
    progress("links", 0, 1)
    comm = groups.communicator()
    found = {"links": measure_links(comm), "machines": comm.topology.machines}
    assert dist.group.WORLD is not None
    groups.release(dist.group.WORLD)  # before rank 0, which has the store, may end
    return [found]


def measured(where: Situation, known: Curves, links: Links, machines: Sequence[int]) -> Situation:
    """With the links as the simulator knows them: what software takes is in `links` already."""
    each = set(Counter(machines).values())  # ranks per machine
    per_node = each.pop() if len(each) == 1 else 1
    software = replace(known.link, goodput=1.0, shared=0.98)
    net, cores = where.net, where.cores
    if per_node == where.ranks:
        memory = 1 / max(links.typical_beta, 1e-12)
        software = replace(software, memory=memory, overhead=links.typical_alpha, stack=0.0)
        cores = min(cores, float(len(os.sched_getaffinity(0))))
    else:
        latency = max(links.worst_alpha - software.overhead, 0.0)
        net = Net(net.text, 8 / max(links.worst_beta, 1e-12), latency)
    curves = replace(known, link=software)
    return replace(where, net=net, curves=curves, per_node=per_node, cores=cores)


def line_of(best: Setting, saved: Path | None) -> str:
    """What to write in a script, for a setting that may have been saved as a plan."""
    if saved is not None:
        return f'Write: gw.attach(model, plan="{saved}")'
    if best.codec == FULL:
        return "Nothing to write: leave the script as it is."
    usual, how = Options(), best.options
    given = [
        f"{key}={getattr(how, key)!r}"
        for key in ("algorithm", "segments", "coordinated")
        if getattr(how, key) != getattr(usual, key)
    ]
    given += [f"coalesce_bytes={best.coalesce_bytes}"] if best.coalesce_bytes else []
    options = f", options=gw.Options({', '.join(given)})" if given else ""
    return f'Write: gw.attach(model, "{name(best.codec)}"{options})'


def plan_of(best: Row, shapes: Mapping[str, models.Shape], where: Situation) -> PlanFile:
    """The plan in which all parameters are sent by a row's setting, and what it lets expect."""
    rows, method = {}, registry.get(best["method"])
    keeps = method.needs_feedback and not method.own_feedback
    for key, shape in shapes.items():
        numel = math.prod(shape)
        coded = len(shape) > 1 and numel >= max(best["least"], 1) and not method.impossible(shape)
        row = {"gradient": best["method"] if coded else "none", "error_feedback": coded and keeps}
        rows[key] = {**row, "numel": numel, "shape": list(shape)}
    same = ("algorithm", "segments", "coordinated", "coalesce_bytes", "seconds", "ranks")
    net = str(Network(where.net.rate_bits_per_s, where.net.latency_s))
    planned = {**{key: best[key] for key in same}, "backward_seconds": where.backward, "net": net}
    return PlanFile(rows, planned)
