"""What commands refuse, each with its complaint; test_bad_input.py walks all their options."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest
import torch

from command_line import refused, wrongly_refused
from gradwire_tools.bench.adapt import record
from gradwire_tools.bench.adapt.record import Recording
from gradwire_tools.bench.paper import adapt
from machines import curves

RECORD = "record --output made --task gpt --ranks 2 --steps 2 --quick"
BENCH = [
    ("kernels --codec nope", "unknown codec 'nope'"),
    ("kernels --codec qsgd:bit=4", "no option 'bit'"),
    ("kernels --target cuda", "unknown target 'cuda'"),
    ("kernels --target triton", "unknown target 'triton' on cpu: use one of c, eager"),
    ("kernels --target c --device cuda", "'c' on cuda: use one of triton"),
    ("kernels --device tpu", "unknown device 'tpu'"),
    ("kernels --numel 0", "numel=0"),
    ("kernels --threads 0", "--threads 0"),
    ("aggregators --methods torch-powersgd:rank=0", "torch-powersgd:rank=0"),
    ("aggregators --methods torch-powersgd:rank=x", "torch-powersgd:rank=x"),
    ("aggregators --methods torch-powersgd:warm=1", "torch-powersgd:warm=1"),
    ("aggregators --methods magic", "magic"),
    ("aggregators --methods thc:bits=2:code=2:saturate=false", "saturate=false' on 2 ranks"),
    ("aggregators --ranks 1", "one rank sends nothing"),
    ("aggregators --task chess", "chess"),
    ("collectives --net none --numel 0", "--numel 0"),
    (f"collectives --net none --numel {10**14}", "and this machine has"),
    ("collectives --net none --per-node 0", "--per-node 0"),
    ("collectives --net none --per-node 3", "divides the 4 ranks"),
    ("transports --bytes 0", "--bytes 0"),
    ("transports --bytes 64,1k", "--bytes 1k"),
    ("adapt --policies x", "unknown policy 'x'"),
    ("adapt --policies accordion:eta=0.2", "its levels are given: write accordion"),
    ("adapt --references fp16", "reference 'fp16': use one of qsgd, topk, powersgd"),
    ("adapt --references qsgd:scale=l2", "qsgd has no option 'scale': use one of bits"),
    ("adapt --references qsgd:bits=9", "reference 'qsgd:bits=9': Bits: choices"),
    ("adapt --references powersgd:rank=a", "reference 'powersgd:rank=a'"),
    ("adapt --references qsgd --families mixed", "have none"),
    ("adapt --families x", "--families x: use one of bits, topk, rank, mixed"),
    ("adapt --models x", "neither a model nor a size"),
    ("adapt --sigmas -1", "--sigmas -1.0"),
    ("adapt --alpha 0", "--alpha 0.0"),
    ("adapt --seed -1", "--seed -1"),
    ("adapt --metrics x", "metric='x'"),
    ("adapt --blocks 0", "block"),
    ("adapt recorded --at 1", "recorded has the points 0, 3"),
    ("adapt recorded --run-steps 3", "only --sensitivity loss has runs"),
    ("adapt recorded --sensitivity x", "--sensitivity x: use one of error, loss"),
    ("adapt recorded --sensitivity loss --run-steps 0", "--run-steps 0"),
    ("adapt recorded --sensitivity loss --policies threshold", "unknown policy 'threshold'"),
    ("adapt --sensitivity loss", "give its folder"),
    ("record --output made --task poem", "unknown task 'poem'"),
    (f"{RECORD} --at ''", "--at is empty"),
    (f"{RECORD} --at -1", "--at -1"),
    (f"{RECORD} --at 0,1", "the point after 0 is 2 or later, not 1"),
    (f"{RECORD} --at 3,0", "not 0"),
    (f"{RECORD} --steps 0", "--steps 0"),
    (f"{RECORD} --ranks 0", "--ranks 0"),
    (f"{RECORD} --ranks {1 << 40}", "--ranks"),
    (f"{RECORD} --steps {1 << 40} --at 0", "do not fit"),
    (f"{RECORD} --seed -1", "--seed -1"),
    (f"{RECORD} --seed {2**63}", "seeds are below 2^63"),
    ("error recorded --methods qsgd,no-such-thing", "'no-such-thing': unknown codec or aggreg"),
    ("error recorded --methods torch-powersgd", "unknown codec or aggregator"),
    ("error recorded --methods qsgd,qsgd:bits=99", "method 'qsgd:bits=99': "),
    ("error recorded --methods qsgd:bitten=4", "bitten"),
    ("error recorded --methods qsgd:algorithm=pigeon", "pigeon"),
    ("error recorded --methods qsgd:error_feedback=2", "error_feedback"),
    ("error recorded --methods topk:density=0", "density"),
    ("error recorded --at 7", "recorded has the points 0, 3"),
    ("error", "gradwire bench record"),
    ("error nowhere", "gradwire bench record"),
    ("error alone", "1 rank"),
    ("planner --nets none --bytes 3", "bytes of fp32"),
    ("planner --nets none --ranks 1", "one rank"),
    ("ablation --no-lab --compute 0", "seconds above 0"),
    ("ablation --no-lab --turns 0", "--turns 0: give 1 to 1000"),
    ("grid --net none --grid bytes", "--grid bytes: use one of bits, low, learned, blocks, fake"),
    ("grid --net none --nodes 1", "one node sends nothing"),
    ("grid --net none --steps 0", "train 1 step or more"),
    ("grid --net none --seeds ''", "--seeds is empty"),
    ("grid --net none --task-option layers", "write NAME=VALUE"),
    ("grid --net none --resume", "give its --json FILE"),
    ("collectives --methods magic", "magic"),
    ("collectives --net 1gbyte", "1gbyte"),
    ("collectives --ranks 1 --net none", "one rank sends nothing"),
    ("profile --ranks 1", "one rank sends nothing"),
    ("collectives --codec qsdg --net none", "qsdg"),
    ("collectives --methods gradwire:qsgd:bits=99", "bits=99"),
    ("kernels --threads 99999", "--threads 99999"),
    ("collectives --ranks 4 --per-node 4", "share one machine"),
    ("profile --numel 29", "--numel 29"),
    ("profile --methods gradwire:powersgd", "several collectives"),
    ("aggregators --methods powersgd:rank=0", "rank=0"),
    ("train --nodes 1", "one node sends nothing"),
    ("kernels --threads ''", "--threads is empty"),
    ("train --seeds ''", "--seeds is empty"),
    ("train --methods ,", "--methods is empty"),
    ("train --net ''", "network ''"),
    ("kernels --threads a", "'a' is not a whole number"),
    ("kernels --threads 1,1.5", "'1.5' is not a whole number"),
    ("train --seeds 0,x", "--seeds 0,x: 'x'"),
    ("profile --bucket-mb -1", "--bucket-mb -1"),
    ("profile --numel 0", "--numel 0"),
    ("train --task-option layers", "--task-option layers: write NAME=VALUE"),
    ("train --task-option layers=1 --task-option layers=2", "layers is given twice"),
    ("train --compose", "--nets is missing"),
    ("train --nets 1gbit,1ms", "--compose is missing"),
    ("train --compose --nets ' ; '", "--nets is empty"),
    ("train --compose --nets 1gbit,1ms --net none", "--net none"),
    ("train --resume", "give its --json FILE"),
    ("train --resume --json -", "give its --json FILE"),
    ("train --nodes 0", "--nodes 0: one node sends nothing; use 2 nodes or more"),
    ("kernels --numel 1e6", "'--numel': '1e6': Input should be"),
    ("error recorded --quick", "--quick makes a recording of its own: give no folder"),
    ("error --quick --methods 'qsgd,thc, qsgd'", "--methods names qsgd twice"),
    ("collectives --methods 'qsgd,thc, qsgd'", "--methods names qsgd twice"),
    ("train --methods 'qsgd,thc, qsgd'", "--methods names qsgd twice"),
    ("collectives --numel 0 --net none --json rows", "--numel 0"),  # keeps older rows
    ("train --net none --json ended --resume", "a run that ended"),
    ("train --net none --methods fsdp-fp32", "trains under FSDP2: give --sharded, too"),
    ("train --net none --device tpu", "unknown device 'tpu': use one of cpu, cuda"),
    ("train --compose --nets none --device cuda", "no step can be timed: leave --compose out"),
    ("train --net none --device cuda", "torch finds no GPU on this machine"),
    ("train --net none --pause 5", "--pause saves beside the rows: give their --json FILE"),
    ("train --net none --accumulate 2", "micro-batches need --sharded"),
    ("train --net none --sharded --accumulate 0", "accumulate is 0, must be at least 1"),
    (
        "train --net none --sharded --task image --task-option channels_last=true",
        "FSDP2 shards contiguous parameters",
    ),
    ("nonsense", "--help"),
]
SIM = [
    ("--model resnet51", "resnet51"),
    ("--model 0", "at least 1"),
    ("--model 1e999", "--model '1e999': more than 1e+13 values"),
    ("--ranks 0", "--ranks 0"),
    ("--ranks 1", "--ranks 1: one rank sends nothing; use 2 ranks or more"),
    ("--sweep ranks=1,2", "--sweep ranks=1: one rank sends nothing"),
    ("--per-node 0", "per_node=0"),
    ("--cores 0", "cores"),
    ("--backward -1", "backward"),
    ("--codec qsdg", "qsdg"),
    ("--codec qsgd:algorithm=ring", "--algorithm"),
    ("--codec none", "leave it out here"),
    ("--codec powersgd --model 64x64", "no curves for powersgd:rank=8, error feedback"),
    ("--codec powersgd", "rank=8 does not shrink a matrix of 1 x 10000"),
    ("--codec topkc --model llama-7b", "a scope of more than 1073741824 values"),
    ("--codec qsgd:error_feedback=3", "error_feedback"),
    ("--codec ''", "--codec is empty"),
    ("--algorithm star", "star"),
    ("--codec tbq --algorithm ring", "not defined in the algorithm 'ring'"),
    (
        "--codec randomk:unbiased=true:error_feedback=true --algorithm all_gather",
        "not defined with error feedback",
    ),
    ("--net 1gbyte", "1gbyte"),
    ("--net 0gbit", "zero"),
    ("--sweep ranks", "NAME=VALUE"),
    ("--sweep ranks=two", "two"),
    ("--sweep colour=red", "colour"),
    ("--sweep rank=2", "--sweep rank: did you mean 'ranks'? Else use one of ranks, rate, lat"),
    ("--sweep rate=1gbit --net none", "needs a network"),
    ("--segments 0", "segments"),
    ("--partitions 2", "parameter_server"),
    ("--plot plot.pdf", "plot.pdf"),
    ("--plot 'no such folder/plot.png'", "existing folder"),
    ("--codec terngrad", "no curve"),
    ("--sharded --methods gradwire:w=bf16:g=powersgd", "FSDP2 scatters through a single"),
    ("--sharded --codec qsgd", "give --methods, as in qsdp:w=8:g=8"),
    ("--sharded --methods torch-fp32", "unknown method 'torch-fp32'"),
    ("--sharded --methods qsdp:w=8", "write qsdp:w=BITS:g=BITS"),
    ("--sharded --methods ''", "--methods is empty"),
    ("--sharded --algorithm ring", "ring"),
    ("--sharded --ranks 1", "--ranks 1: one rank sends nothing"),
    ("--sharded --sweep bits=2,4", "sweep one of ranks, rate"),
    ("--sharded --forward -1", "forward=-1"),
    ("--sharded --coordinated", "leave --validate, --partitions and --coordinated out"),
    ("--methods fsdp-fp32", "--methods fsdp-fp32: write outer:PRESET:every=N, or give --sharded"),
    ("--forward 1", "--forward: is of a whole step: give --sharded, --cross-barrier or"),
    ("--blocking", "--blocking: is for a step under FSDP2"),
]
PLAN = [
    ("--model resnet50", "give --model or --shapes, and --net"),
    ("--net 1gbit", "give --model or --shapes, and --net"),
    ("--model resnet50 --net quick", "network 'quick'"),
    ("--model resnet --net 1gbit", "neither a model nor a size"),
    ("--model 1e6 --net 1gbit --ranks 1", "one rank sends nothing"),
    ("--model 1e6 --net none --ranks 9999999", "ranks=9999999: 65536 at most"),
    ("--shapes s.json", "or let torchrun start it (docs/how-to/automatic.md)"),
    ("--model 1e6 --net 1gbit --per-node 3", "divides the 4 ranks"),
    ("--model 1e6 --net 1gbit --save p", "--save p: a plan has the names of"),
    ("--save p", "give --model or --shapes, and --net"),
    ("--model 1e6 --net 1gbit --codec zip", "zip"),
    ("--model 1e6 --net 1gbit --codec none", "leave it out here"),
    ("--model 1e6 --net 1gbit --codec qsgd:bits=2", "no curve for encode"),
    ("--model 1e3x1e3 --net 1gbit --codec powersgd", "no curves for powersgd"),
    ("--model 1e6 --net 1gbit --codec powersgd:rank=8", "rank=8 does not shrink a matrix of 1"),
]
OTHERS = [
    ("nonsense", "--help"),
    ("codec show", "--help"),
    ("report", "--help"),
    ("report empty", "empty holds no rows"),
    ("report text", "text, line 1 is not JSON"),
    ("report bytes", "bytes, line 1 is not UTF-8 text"),
    ("report list", "list, line 1 is not a JSON object"),
    ("report twice", "twice, line 2 is the same as line 1"),
    ("report rows --gains", "--gains: is for a table: give --table"),
    ("report rows --task gpt", "--task: is for a table: give --table"),
    ("sim --model 1e4 --curves rows", "it has no key 'codecs'"),
    ("sim --model 1e4 --curves null", "a JSON object is needed, with codecs, not NoneType"),
    ("codec show qsdg", "qsdg"),
    ("codec show qsgd:bitz=2", "bitz"),
    ("codec show ''", "'': expected NAME or NAME:OPTION=VALUE:..."),
    ("codec show powersgd:rank=2 --ir", "aggregator, which has no stages"),
    ("lab run --net none --timeout -1 -- true", "timeout=-1"),
    ("doctor --ranks 1", "one rank sends nothing"),
    ("sim --threads 0", "--threads 0"),
    ("report no-such-file", "no-such-file"),
    ("report rows -o rows", "--output rows is one of the files that rows are read from"),
    ("report ./rows --svg linked", "--svg linked is one of the files that rows are read from"),
    ("lab run --net none --length 5 -- true", "--length 5: is for a schedule by share"),
    ("lab run --net x.yaml -- true", "schedule x.yaml: cannot be read (there is no file x.yaml)"),
    ("codec build --codec fp16 -o rows", "rows is a file, not a folder"),
    ("plan show alone", "alone is a directory"),
    ("plan show no-such-file", "there is no file no-such-file"),
    ("probe --ranks 1", "--ranks 1: one rank sends nothing"),
    ("probe --net 1gbit,1parsec", "parsec"),
    ("probe --seconds 0", "--seconds 0: give seconds above 0"),
    ("probe --codec 'none such'", "none such"),
    (f"probe --ranks {10**9}", "and this machine has"),
    ("doctor --numel 5", "--numel belongs to the measured step: give --ranks too"),
    ("doctor --net 1gbit", "--net belongs to"),
    ("doctor --ranks 2 --numel 0", "--numel 0"),
    ("doctor --ranks 2 --numel 5 --model resnet50", "give one of them"),
    ("doctor --ranks 2 --model resnet51", "resnet51"),
    ("doctor --ranks 2 --compute 0", "--compute 0"),
    (f"doctor --ranks 2 --numel {10**14}", "and this machine has"),
]


FILES = {
    "rows": b'{"a": 1}\n', "ended": b'{"row": "summary"}\n', "empty": b"", "text": b"no json\n",
    "bytes": b"\xff\xfe", "list": b"[1]\n", "twice": 2 * b'{"a": 1}\n', "null": b"null\n",
}  # fmt: skip


def test_each_is_refused_in_one_line_and_leaves_no_file(
    recorded: tuple[Path, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    alone = Recording(tmp_path / "alone", "gpt", {}, 0, 1, (0,), 1, (("a", (40, 30)),), {})
    alone.folder.mkdir()
    alone.save(0, 0, [torch.ones(alone.numel)])
    alone.write()
    curves(call=1e-5, value=3e-10).save(tmp_path / "curves")
    (tmp_path / "recorded").symlink_to(recorded[0])
    (tmp_path / "linked").symlink_to("rows")
    (tmp_path / "ended.state").mkdir()  # of which the deletion was killed
    (tmp_path / "ended.state" / "ended").touch()
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    there = sorted(tmp_path.rglob("*"))
    lines = [(f"bench {line}", told) for line, told in BENCH] + OTHERS
    lines += [(f"sim --model 1e4 --curves curves {line}", told) for line, told in SIM]
    lines += [(f"plan {line} --curves curves", told) for line, told in PLAN]
    faults = wrongly_refused((shlex.split(line), told) for line, told in lines)
    assert not faults, "\n".join(faults)
    assert sorted(tmp_path.rglob("*")) == there
    assert {name: (tmp_path / name).read_bytes() for name in FILES} == FILES


def test_no_points_and_points_of_the_quick_recording(
    recorded: tuple[Path, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(lambda at: list(record.run("made", at=at)), [((), "--at : give steps of 0 or more")])

    def copied(made: Path, **_: object) -> list[None]:
        shutil.copytree(recorded[0], made, dirs_exist_ok=True)
        return []

    monkeypatch.setattr(record, "run", copied)
    told = r"^--at 5: the quick recording has the points \d"
    refused(lambda at: list(adapt.run(config=adapt.Config(at=at), quick=True)), [((5,), told)])
