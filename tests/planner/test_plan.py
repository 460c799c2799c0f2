"""Plans: the rules in their order, and clear errors; in files, what is saved is what is attached,
and differences are told."""

from __future__ import annotations

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from command_line import rows_of, run
from gradwire import QSGD, ConfigError, Options, codecs
from gradwire.aggregators import Compressed, Dense, ErrorFeedback, registry
from gradwire.codecs import TernGrad
from gradwire.planner import Plan, Rules, make_plan
from gradwire.planner.files import PlanFile, differences


def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4))


def plan_of(module: nn.Module | None = None, **arguments: Any) -> Plan:
    world_size = arguments.pop("world_size", 4)
    options = arguments.pop("codec_options", {})
    rules = Rules().changed(options, **{"codec": "qsgd", **arguments})
    return make_plan((module or model()).named_parameters(), rules, world_size)


def chosen(plan: Plan) -> dict[str, Any]:
    return {p.name: p.codec for p in plan.parameters}


def test_parameters_of_one_dimension_are_uncompressed() -> None:
    q = QSGD()
    expected = {"0.weight": q, "0.bias": None, "1.weight": None, "1.bias": None}
    assert chosen(plan_of()) == {**expected, "2.weight": q, "2.bias": None}


def test_patterns_override_in_order() -> None:
    found = chosen(
        plan_of(include=["*.bias"], exclude=["1.*", "2.*"], codecs={"2.weight": TernGrad()})
    )
    assert found["0.bias"] == QSGD()
    assert found["1.bias"] is None
    assert found["2.weight"] == TernGrad()
    assert found["2.bias"] is None


def test_patterns_match_every_name_of_a_tied_parameter() -> None:
    weight = nn.Parameter(torch.zeros(4, 4))
    named = [("embed.weight", weight), ("head.weight", weight)]

    def found(**arguments: Any) -> dict[str, Any]:
        return chosen(make_plan(named, Rules().changed(codec="qsgd", **arguments), 2))

    assert found() == {"embed.weight": QSGD()}
    assert found(exclude=["head.*"]) == {"embed.weight": None}
    assert found(codecs={"head.*": "terngrad"}) == {"embed.weight": TernGrad()}


def test_a_single_rank_keeps_no_residual() -> None:
    assert any(p.feedback for p in plan_of(error_feedback=True, world_size=2).parameters)
    assert not any(p.feedback for p in plan_of(error_feedback=True, world_size=1).parameters)


def test_aggregators_follow_the_plan() -> None:
    made = {p.name: p.aggregator for p in plan_of(error_feedback=True).parameters}
    assert isinstance(made["0.weight"], ErrorFeedback)
    assert isinstance(made["0.bias"], Dense)
    made = {p.name: p.aggregator for p in plan_of().parameters}
    assert type(made["0.weight"]) is Compressed


def test_rotations_spread_remainders() -> None:
    module = nn.ParameterList([nn.Parameter(torch.zeros(10)) for _ in range(8)])
    assert [p.rotation for p in plan_of(module).parameters] == [0, 1, 2, 3, 1, 2, 3, 0]


def mixed() -> nn.Module:
    double, pairs = nn.Linear(3, 3).double(), nn.Linear(3, 4, dtype=torch.complex64)
    return nn.Sequential(nn.Linear(3, 3), double, pairs)


def test_other_dtypes_are_uncompressed() -> None:
    plan = plan_of(mixed(), error_feedback=True, exclude=["1.weight"], include=["0.*"])
    how = {p.name: p.how for p in plan.parameters}
    assert how["0.weight"] == how["0.bias"] == repr(QSGD())
    others = {name for name, text in how.items() if text == "dense"}
    assert others == {"1.weight", "1.bias", "2.weight", "2.bias"}
    assert not any(p.feedback for p in plan.parameters if p.how == "dense")
    assert "1.weight: 9 x torch.float64, none" in plan.describe()
    assert all(p.how == "dense" for p in plan_of(nn.Linear(3, 3).double()).parameters)


MISTAKES: list[tuple[str, dict[str, Any]]] = [
    ("bits", {"codec_options": {"bits": 0}}),
    ("bogus", {"codec_options": {"bogus": 1}}),
    ("decoder", {"include": ["decoder.*"]}),
    ("decoder", {"codecs": {"decoder.*": "qsgd"}}),
    (r"exclude=\[1\]: give a list", {"exclude": [1]}),
    (r"codecs=.*which are strings", {"codecs": {3: "qsgd"}}),
    ("no parameter", {"module": nn.Identity()}),
    (
        r"include.*'1\.\*'.*1\.weight.*float64.*exclude=\['1\.weight'\]",
        {"module": mixed(), "include": ["1.*"]},
    ),
    (
        r"codecs.*'2\.bias'.*complex64.*\{'2\.bias': None",
        {"module": mixed(), "codecs": {"2.bias": "identity"}},
    ),
]


def test_mistakes_are_named() -> None:
    for match, arguments in MISTAKES:
        with pytest.raises(ConfigError, match=match):
            plan_of(**arguments)


def test_the_remedies_for_other_dtypes_work() -> None:
    plan_of(mixed(), include=["*"], exclude=["[12].*"])
    plan_of(mixed(), codecs={"[12].*": None, "*": "qsgd"})
    plan_of(mixed(), codec=None, include=["*"])


NAMED = [
    ("conv.weight", torch.empty(8, 4, 3, 3)),
    ("list.[0].weight", torch.empty(64, 32)),
    ("norm.bias", torch.empty(32)),
]


def plan_by(codec: Any = "qsgd", **arguments: Any) -> Any:
    return make_plan(NAMED, Rules().changed(codec=codec, **arguments), 2)


TEXTS = [
    *("none", "qsgd", "qsgd:bits=3", "qsgd:bits=4:block=64:rounding=nearest", "bf16"),
    *("topk:density=0.05", "qsgd:algorithm=ring", "powersgd:rank=2", "artopk:density=0.01"),
    *("randomshift:bits=5", "topkc:scope=layer", "thc:bits=5", "dgc:clip=1.0"),
]


def test_an_aggregator_has_the_text_that_makes_it() -> None:
    for text in TEXTS:
        made = registry.get(text)
        again = registry.text(made)
        assert registry.get(again) == made, text
        assert len(again) <= len(text), text
    for name in (*codecs.REGISTRY, *registry.REGISTRY):
        assert registry.text(registry.get(name)) == name


def test_a_method_prints_as_users_write_it() -> None:
    for text in (
        *("qsgd:bits=4", "qsgd:bits=2:scale=max", "bf16", "identity", "none", "topk:density=0.01"),
        *("topk:density=0.05:algorithm=all_gather:scope=model", "powersgd:rank=4:warm=false"),
        *("dgc:density=0.001:momentum=0.5", "thc:bits=5"),
    ):
        assert str(registry.get(text)) == text
    for name in codecs.REGISTRY:
        codec = codecs.get(name)
        assert codecs.get(str(codec)) == codec
        assert str(Compressed(codec)) == str(codec)
    for name in registry.REGISTRY:
        assert registry.get(str(registry.get(name))) == registry.get(name)
    assert str(ErrorFeedback(Compressed(QSGD(bits=3)))) == "qsgd:bits=3, error feedback"


def test_states_name_methods_by_their_classes() -> None:
    """A method's text in saved states and in files of measurements: old ones have it."""
    assert registry.get("qsgd:algorithm=ring:scope=model").recorded() == (
        "QSGD(bits=4, block=128, scale='minmax', rounding='dithered', metadata='bf16'), ring, "
        "whole model"
    )
    recorded = {
        "none": "dense",
        "powersgd:rank=3:warm=false:orthogonal=qr": "powersgd(rank=3, fresh start, qr)",
        "artopk": "artopk(density=0.01, leader=round_robin, scope=model, values=fp16)",
        "topkc": "topkc(bits=2, chunk=64)",
        "thc": "thc(bits=4, code=4, rotation=partial, chunk=1024)",
        "lwtopk": "lwtopk(density=0.01, values=fp16)",
        "globaltopk": "globaltopk(density=0.01)",
        "dgc": "dgc(density=0.001, momentum=0.9, values=fp16)",
    }
    assert {text: registry.get(text).recorded() for text in recorded} == recorded


def test_what_has_no_text_is_named() -> None:
    codec = codecs.LearnedLevels(bits=2, levels=(0.0, 0.3, 0.7, 1.0))
    for one, named in ((codec, "levels="), (codecs.DGC(), "dgc:density")):  # "dgc" is another's
        with pytest.raises(ConfigError, match=f"{named}.*registered codecs alone"):
            registry.text(registry.get(one))


def test_a_plan_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    overrides = {"conv.*": "powersgd:rank=1", "norm.*": "qsgd:bits=8"}
    plan = plan_by("topk:density=0.1", codecs=overrides, error_feedback=True)
    plan.save(path)
    file = PlanFile.read(path)
    again = make_plan(NAMED, Rules().changed(codec=None, codecs=file.by_name()), 2)
    assert again.parameters == plan.parameters
    assert list(differences(file, PlanFile.of(again))) == []


def test_differences_are_told(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    plan_by("qsgd:bits=4").save(paths[0])
    plan_by("qsgd:bits=4", codecs={"conv.*": "qsgd:bits=2"}, error_feedback=True).save(paths[1])
    rows = rows_of("plan", "diff", *paths)
    assert [row["parameter"] for row in rows] == ["conv.weight", "list.[0].weight"]
    assert rows[0]["a"] == "qsgd:bits=4"
    assert rows[0]["b"] == "qsgd:bits=2, error feedback"
    other = json.loads(Path(paths[0]).read_text())
    other["parameters"]["conv.weight"] |= {"shape": [4, 8, 3, 3]}
    Path(paths[1]).write_text(json.dumps(other))
    (row,) = rows_of("plan", "diff", *paths)
    assert row["a"] == "qsgd:bits=4, shape (8, 4, 3, 3)"
    assert row["b"] == "qsgd:bits=4, shape (4, 8, 3, 3)"
    same = run("plan", "diff", paths[0], paths[0])
    assert same.code == 0
    assert "the plans are equal" in same.out


def test_a_plan_is_shown_with_bits_per_value(tmp_path: Path) -> None:
    path = str(tmp_path / "a.json")
    plan_by("qsgd:bits=4", codecs={"conv.*": "powersgd:rank=2"}, error_feedback=True).save(path)
    rows = {row["parameter"]: row for row in rows_of("plan", "show", path)}
    factors = 4 * 2 * (8 + 4 * 9)  # bytes of two fp32 columns for each side of 8 x 36
    assert rows["conv.weight"]["bits"] == 8 * factors / (8 * 36)
    assert rows["list.[0].weight"]["method"] == "qsgd:bits=4, error feedback"
    assert 4 < rows["list.[0].weight"]["bits"] < 5
    assert rows["norm.bias"]["bits"] == 32
    assert "3 parameters, 2,368 values, " in run("plan", "show", path).out
    saved = json.loads(Path(path).read_text())
    for row in saved["parameters"].values():
        assert row["numel"] == math.prod(row.pop("shape"))  # older files have numel alone
    Path(path).write_text(json.dumps(saved))
    old = rows_of("plan", "show", path)
    assert [(row["numel"], row["bits"]) for row in old] == [(288, None), (2048, None), (32, None)]


OLDER = {
    "algorithm": "ring", "segments": 4, "coordinated": False, "coalesce_bytes": 0,
    "seconds": 0.5, "backward_seconds": 0.25,
}  # fmt: skip
PLANNED = {**OLDER, "ranks": 4, "net": "1gbit,1ms"}


def test_what_was_planned_comes_back_and_yields_to_the_callers_options(tmp_path: Path) -> None:
    """What it expects is of its own options alone."""
    plan = replace(plan_by(), options=Options("ring", segments=4), coalesce_bytes=0)
    for planned, ranks in ((OLDER, 2), (PLANNED, 4)):
        saved = replace(PlanFile.of(plan_by()), planned=planned)
        saved.save(tmp_path / "plan.json")
        file = PlanFile.read(tmp_path / "plan.json")
        assert file == saved
        said = file.expectation(plan, ranks)
        assert said == "the plan expects 500 ms a pass, 250 of them exposed"
    assert file.expectation(plan, 2) == "the plan was made for 4 ranks, and there are 2"
    for other, made, given in (
        ({"options": Options("tree", segments=4)}, "algorithm='ring'", "algorithm='tree'"),
        ({"options": Options("ring")}, "segments=4", "segments=None"),
        ({"coalesce_bytes": 7}, "coalesce_bytes=0", "coalesce_bytes=7"),
    ):
        said = file.expectation(replace(plan, **other), 4)
        assert said == f"the plan was made for {made}, and attach was given {given}"
    assert file.options(Options(threads=2)) == Options("ring", segments=4, threads=2)
    for given in (Options("tree"), Options(segments=2), Options(coordinated=True)):
        assert file.options(given) == given
    assert PlanFile.of(plan_by()).options(Options()) == Options()


def test_files_of_format_1_mean_what_they_meant(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for found, meant in (
        ("powersgd", "powersgd:rank=2"),
        ("powersgd:warm=false", "powersgd:warm=false:rank=2"),
        ("powersgd:rank=8", "powersgd"),
    ):
        rows = {"a": {"gradient": found}}
        path.write_text(json.dumps({"gradwire_plan": 1, "parameters": rows}))
        assert PlanFile.read(path).aggregator("a") == registry.get(meant)
    plan_by("powersgd", error_feedback=True).save(path)
    assert PlanFile.read(path).aggregator("conv.weight").inner.rank == 8


BAD_FILES = [
    (None, "no plan: there is no file "),
    ("{", "no plan: "),
    ("[]", "no plan of format 2"),
    ('{"gradwire_plan": 3, "parameters": {}}', "no plan of format 2"),
    ('{"gradwire_plan": 1, "parameters": {"a": 3}}', "parameter a has no 'gradient'"),
    ('{"gradwire_plan": 1, "parameters": {"a": {"gradient": "qsgd", "shape": 3}}}', "shape 3"),
    (
        '{"gradwire_plan": 1, "parameters": {"a": {"gradient": "qsgx"}}}',
        "parameter a: unknown codec or aggregator 'qsgx'",
    ),
    (
        '{"gradwire_plan": 1, "parameters": {"a": {"gradient": "qsgd", "weight": "x"}}}',
        "parameter a: unknown codec 'x'",
    ),
    ('{"gradwire_plan": true, "parameters": {}}', "no plan of format 2"),
    ("[" * 100_000, "nested too deeply"),
    ('{"gradwire_plan": 1, "parameters": {"a": {}, "a": {}}}', "it has 'a' twice"),
    *(
        (json.dumps({"gradwire_plan": 1, "parameters": {"a": {"gradient": "qsgd", **row}}}), said)
        for row, said in (
            ({"weight": 5}, "parameter a has the weight 5: give a codec in text"),
            ({"weight": None}, "has the weight None"),
            ({"error_feedback": "no"}, "has the error_feedback 'no': give true or false"),
            ({"numel": "12"}, "has the numel '12': give a whole number"),
            ({"numel": True}, "has the numel True"),
            ({"shape": [True]}, "has the shape [True]: give whole numbers"),
            ({"shape": [-1]}, "has the shape [-1]"),
            ({"numel": 13, "shape": [3, 4]}, "has numel 13, and the shape [3, 4]"),
        )
    ),
    *(
        (json.dumps({"gradwire_plan": 1, "parameters": {}, "planned": planned}), said)
        for planned, said in (
            (5, "'planned' is not what gradwire plan --save writes"),
            ({"algorithm": "ring"}, "'planned' is not what gradwire plan --save writes"),
            ({**PLANNED, "algorithm": "rings"}, "planned: unknown algorithm 'rings'"),
            ({**PLANNED, "segments": "4"}, "planned has the segments '4': give a whole number or"),
            ({**PLANNED, "seconds": -1}, "planned has the seconds -1: give seconds"),
            ({**PLANNED, "backward_seconds": None}, "planned has the backward_seconds None"),
            ({**PLANNED, "ranks": "4"}, "planned has the ranks '4': give a whole number"),
            ({**PLANNED, "net": None}, "planned has the net None: give a text"),
            ({"ranks": 4, "net": "none"}, "'planned' is not what gradwire plan --save writes"),
        )
    ),
]


def test_bad_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for text, complaint in BAD_FILES:
        if text is not None:
            path.write_text(text)
        with pytest.raises(ConfigError) as found:
            PlanFile.read(path)
        assert complaint in str(found.value)
        assert "\n" not in str(found.value)
        assert str(path) in str(found.value)


def test_a_plan_of_another_model_is_refused() -> None:
    plan = plan_by()
    file = PlanFile.of(plan)
    named = [(p.name, torch.empty(p.shape, device="meta")) for p in plan.parameters]
    file.check([*named, ("tied", named[0][1])])
    other = torch.empty(3, device="meta")
    with pytest.raises(ConfigError, match="no parameter other"):
        file.check([*named, ("other", other)])
    with pytest.raises(ConfigError, match=r"the module has no parameter list.\[0\].weight"):
        file.check(named[:1])
    with pytest.raises(ConfigError, match=r"conv.weight has the shape \(3,\), and \(8, 4, 3, 3\)"):
        file.check([(named[0][0], other)])


def test_ranks_may_save_one_file_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has written, and none has renamed, when the first renames."""
    written, rename = threading.Barrier(3), Path.replace

    def late(self: Path, target: Path) -> Path:
        written.wait(60)
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", late)
    path, plan = tmp_path / "plan.json", plan_by("qsgd:bits=4")
    with ThreadPoolExecutor(3) as ranks:
        for saved in [ranks.submit(plan.save, path) for _ in range(3)]:
            saved.result()
    assert PlanFile.read(path) == PlanFile.of(plan)
    assert list(tmp_path.iterdir()) == [path]
