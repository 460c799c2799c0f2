"""Costs by the papers' formulas, against the numbers that the papers print."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch

from gradwire import ConfigError, Options
from gradwire.codecs import QSGD, Identity
from gradwire.controllers.flexible import sparse_collective, sparse_collectives
from gradwire.lang import layout
from gradwire_tools.sim import Curves, Net, Scenario, predict
from gradwire_tools.sim.costs import STRATEGIES, compressed, decide, two_level, uncompressed

NUMEL = 1 << 20

# ARTOPK Table VI: 8 ranks, 1 ms; milliseconds of all-gather, ART-ring and ART-tree at densities
# .1, .01 and .001, for 10, 5 and 1 Gbit/s. Sizes in MB: those of the models, of ViT as its own
# cells imply.
SIZES = {"resnet18": 46.8, "resnet50": 102.2, "alexnet": 244.4, "vit": 527.0}
TABLE = {
    ("resnet18", 10): [(54, 35, 43.2), (7.66, 18.1, 12.2), (3.28, 16.7, 9)],
    ("resnet18", 5): [(107.76, 52.5, 76.3), (13.83, 20.8, 16.1), (4.25, 17.9, 10.1)],
    ("resnet18", 1): [(526.3, 194.7, 345.6), (51.93, 34.1, 41.9), (8.86, 19.5, 12.8)],
    ("resnet50", 10): [(115.1, 52.9, 83.4), (14.35, 20.3, 15.9), (4.65, 18.1, 10)],
    ("resnet50", 5): [(232, 94.7, 156.2), (28.1, 26.1, 24.2), (5.3, 17.8, 10.5)],
    ("resnet50", 1): [(1148, 405.5, 745), (126.5, 58.8, 83.7), (14.35, 21, 16.1)],
    ("alexnet", 10): [(271.8, 106.8, 180.4), (32.73, 25.2, 25.8), (6, 18.6, 11.1)],
    ("alexnet", 5): [(544.5, 200.4, 354.8), (61.75, 34.8, 42.6), (8.92, 19.3, 13.1)],
    ("alexnet", 1): [(2718.7, 964.4, 1778), (282.7, 111.8, 186.8), (31.33, 27, 27.3)],
    ("vit", 10): [(592.77, 238.6, 401.2), (68.48, 36.2, 46.2), (9.15, 19.2, 12.9)],
    ("vit", 5): [(1206, 424.3, 779.1), (127.45, 58, 86.2), (15.3, 21.4, 16.9)],
    ("vit", 1): [(5973, 2047, 3852), (601.8, 222.8, 385.2), (59.68, 36.7, 44.4)],
}
ROWS = [
    (model, gbit, density, cells)
    for (model, gbit), rows in TABLE.items()
    for density, cells in zip((0.1, 0.01, 0.001), rows, strict=True)
]


def test_the_papers_table_and_its_winners() -> None:
    faults = []
    for model, gbit, density, cells in ROWS:
        of = 8, SIZES[model] * 1e6, density, 1e-3, 8 / (gbit * 1e9)
        found = sparse_collectives(*of)
        near = [1e3 * seconds for seconds in found.values()] == pytest.approx(cells, rel=0.11)
        if not near or list(found)[cells.index(min(cells))] != sparse_collective(*of):
            faults.append(f"{model}, {gbit} Gbit/s, {density}: {found}, printed {cells}")
    assert not faults, "\n".join(faults)


def line(fixed: float, per_byte: float) -> object:
    return lambda nbytes: fixed + per_byte * nbytes


def test_the_coefficients_of_hipress() -> None:
    """Table 3, and 6.1 for aggregators beside workers: of N = 5 and K = 3."""
    found = {n: (s.sends(5, 3), s.encodes(5, 3), s.decodes(5, 3)) for n, s in STRATEGIES.items()}
    assert found["ring"] == (8, 5, 5)
    assert found["parameter_server"] == (10, 4, 6)
    assert found["colocated"] == (8, 3, 5)
    assert found["low_rank"] == (8, 1, 1)


def seconds(ranks: int, algorithm: str, encode: float, decode: float, per_node: int) -> float:
    """What the simulator says, of a matrix, on a slow link; by seconds per value."""
    form = {
        "encode": (0.0, encode, 0.0), "decode": (0.0, decode, 0.0),
        "decode_sum": (0.0, 0.0, decode), "reduce_encode": (0.0, encode, decode),
    }  # fmt: skip
    dense = dict.fromkeys(form, (0.0, 0.0, 0.0))
    curves = Curves("none", 1, {repr(QSGD()): form, repr(Identity()): dense})
    options = Options(algorithm=algorithm, segments=1)
    net, size = Net("slow", 8e3), str(NUMEL)
    scenario = Scenario(ranks, net, QSGD(), size, options=options, per_node=per_node, exact=True)
    return float(predict(scenario, curves)["seconds"])


SIMULATED = [
    *product(["ring", "sra", "all_gather"], [2, 3, 4, 5, 8], [1]),
    *product(["tree"], [2, 4, 8], [1]),
    *[("two_level", n, g) for n, g in ((4, 2), (6, 3), (8, 4), (8, 2))],
]


def test_the_graphs_have_these_coefficients() -> None:
    faults = []
    for name, ranks, per_node in SIMULATED:
        strategy = two_level(per_node) if name == "two_level" else STRATEGIES[name]
        algorithm = "hierarchical" if name == "two_level" else name
        parts = 1 if name in ("tree", "all_gather") else ranks
        each = 1e-7 * NUMEL / parts
        base = seconds(ranks, algorithm, 0.0, 0.0, per_node)
        found = (
            base * 1e3 / (layout(QSGD(), torch.float32).nbytes(NUMEL) / parts),
            (seconds(ranks, algorithm, 1e-7, 0.0, per_node) - base) / each,
            (seconds(ranks, algorithm, 0.0, 1e-7, per_node) - base) / each,
        )
        terms = (strategy.sends, strategy.encodes, strategy.decodes)
        expected = tuple(term(ranks, parts) for term in terms)
        near = found[0] == pytest.approx(expected[0], rel=0.03)
        if not near or found[1:] != pytest.approx(expected[1:], rel=0.01):
            faults.append(f"{name}, {ranks} ranks, {per_node} per node: {found}, not {expected}")
    assert not faults, "\n".join(faults)


def test_compression_pays_on_a_slow_link_alone() -> None:
    random.seed(0)
    for strategy in STRATEGIES.values():
        for ranks in (2, 3, 4, 8, 16):
            nbytes, share = 10 ** random.uniform(5, 9), random.uniform(0.01, 0.3)
            kernels = line(1e-5, 1 / 5e9), line(1e-5, 1 / 5e9)
            slow = decide(strategy, ranks, nbytes, share, line(1e-3, 1e-6), *kernels)
            fast = decide(strategy, ranks, nbytes, share, line(1e-7, 1e-13), *kernels)
            assert slow.compress
            assert not fast.compress
            assert slow.seconds == slow.compressed_seconds < slow.uncompressed_seconds
            assert fast.seconds == fast.uncompressed_seconds < fast.compressed_seconds


def test_the_best_number_of_partitions_is_found() -> None:
    random.seed(1)
    for name in ("ring", "parameter_server", "colocated", "low_rank"):
        strategy = STRATEGIES[name]
        for _ in range(50):
            ranks, share = random.randrange(2, 17), random.uniform(0.01, 0.5)
            nbytes = 10 ** random.uniform(3, 9)
            send = line(10 ** random.uniform(-6, -2), 10 ** random.uniform(-10, -7))
            kernels = [line(10 ** random.uniform(-6, -4), 10 ** random.uniform(-10, -8))] * 2
            numbers = range(1, 3 * ranks)
            found = decide(strategy, ranks, nbytes, share, send, *kernels, candidates=numbers)
            of = strategy, ranks, nbytes
            every = [uncompressed(*of, k, send) for k in numbers]
            every += [compressed(*of, k, share, send, *kernels) for k in numbers]
            assert found.seconds == min(every)
            again = compressed if found.compress else uncompressed
            more = (share, send, *kernels) if found.compress else (send,)
            assert again(*of, found.partitions, *more) == found.seconds


def test_impossible_numbers_are_refused() -> None:
    curves = [line(0.0, 1.0)] * 3
    for ranks, nbytes, share in ((1, 8.0, 0.5), (2, 0.0, 0.5), (2, 8.0, 0.0)):
        with pytest.raises(ConfigError, match="2 ranks or more"):
            decide(STRATEGIES["ring"], ranks, nbytes, share, *curves)
    with pytest.raises(ConfigError, match="a density up to 1"):
        sparse_collectives(4, 1e6, 0.0, 1e-3, 1e-9)
