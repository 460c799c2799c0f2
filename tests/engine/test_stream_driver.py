"""The driver on a stream: the host does not wait, and all work is ordered on streams.

Links here never deliver, and streams record the calls made on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch

from gradwire import QSGD, Codec, CodecError, Options
from gradwire.algorithms import REGISTRY
from gradwire.codecs import Identity, TopK
from gradwire.collectives import Item, prepare
from gradwire.engine import Communicator, Graph, Issue, Outcome
from gradwire.lang import Kernels, rng
from gradwire.lang.call import Mark, Verdict
from gradwire.partition import Spec
from gradwire.transport import Hub
from gradwire.transport.link import Posting
from ranks import raises
from rooms.collectives import OrderedJob
from rooms.engine import Pools, StreamFuture, Topology, Wave, lower

KEYS = rng.Keys(0, 0)
CPU = torch.device("cpu")


class Nowhere:
    """A link that accepts everything and never delivers; `log` records its calls."""

    def __init__(self, log: list[str] | None = None, world_size: int = 2) -> None:
        self.log = [] if log is None else log
        self.rank, self.world_size = 0, world_size
        self.posted = 0
        self.failed: list[int] = []
        self.interrupted = 0

    def post(self, batch: Sequence[Posting]) -> Any:
        number, self.posted = self.posted, self.posted + 1
        self.log.append(f"post {number}")
        for message in batch:
            if message.incoming:
                message.memory.zero_()  # a payload that every codec here decodes
        log = self.log

        class Pending:
            def wait(self) -> None:
                log.append(f"wait {number}")

        return Pending()

    def fail(self, peer: int) -> None:
        self.failed.append(peer)

    def interrupt(self) -> None:
        self.interrupted += 1


class Symbols:
    """A job that consists of its schedule."""

    kernel_calls = 0

    def __init__(
        self,
        stages: Sequence[Wave],
        log: list[str],
        verdicts: Sequence[Any] = (),
        graph: Graph | None = None,
    ) -> None:
        self.graph = graph or Graph(())
        self.schedule = stages
        self.log = log
        self.left = verdicts

    def start(self) -> None:
        self.log.append("start")

    def memory(self, buffer: int) -> torch.Tensor:
        return torch.zeros(10, dtype=torch.uint8)

    def compute(self, task: int) -> None:
        self.log.append(f"compute {self.graph.kind[task].value} {self.graph.segment[task]}")

    def verdicts(self) -> Sequence[Any]:
        return self.left

    def finish(self) -> None:
        self.log.append("finish")


def over(link: Nowhere) -> Communicator:
    return Communicator(Hub(1).transport(0), links=lambda device: link)


def submit(comm: Communicator, work: Any) -> Future[Outcome]:
    """One round, in its own ticket."""
    stream = comm.stream(CPU)
    assert stream is not None
    ticket = comm.calls.ticket()
    ticket.next_round(Issue(0, "a test"))
    running = ticket.begin_in_order(stream, lambda: work)
    ticket.close()
    return running


def alone(link: Nowhere) -> Communicator:
    """Rank 0 of two, whose peer agrees with everything, and never sends."""
    comm = Communicator(Hub(2).transport(0), links=lambda device: link)
    comm._topology = Topology(0, 2, (0, 0), in_memory=True)
    agreed: Future[int] = Future()
    agreed.set_result(0)
    comm.agreement = lambda *_: agreed  # type: ignore[method-assign]
    return comm


def stages_of(graph: Graph, rank: int, n: int, name: str) -> tuple[Wave, ...]:
    return lower(graph, rank, lambda *message: REGISTRY[name].hop(*message, n))


def test_kernels_and_batches_are_queued_stage_by_stage() -> None:
    """SRA on 2 ranks, 3 segments: encoding runs ahead of the batch in flight."""
    log: list[str] = []
    graph = REGISTRY["sra"].build(0, 2, [[16, 16]] * 3)
    work = Symbols(stages_of(graph, 0, 2, "sra"), log, graph=graph)
    submit(over(Nowhere(log)), work).result(0)
    expected = """
        start
        compute encode 0, post 0,
        compute encode 1, post 1,
        wait 0, compute encode 2, compute merge 0, post 2,
        wait 1, compute merge 1, post 3,
        wait 2, compute merge 2, compute decode 0, post 4,
        wait 3, compute decode 1,
        wait 4, compute decode 2,
        finish
    """
    assert log == [step.strip() for step in expected.replace("\n", ",").split(",") if step.strip()]


def test_memory_is_given_back_behind_all_batches() -> None:
    for name, rank in product(REGISTRY, range(4)):
        log: list[str] = []
        graph = REGISTRY[name].build(rank, 4, [[16] * REGISTRY[name].chunks(4)] * 2)
        link = Nowhere(log, 4)
        work = Symbols(stages_of(graph, rank, 4, name), log, graph=graph)
        submit(over(link), work).result(0)
        waits = [step for step in log if step.startswith("wait")]
        assert waits == [f"wait {i}" for i in range(link.posted)]
        assert log[-1] == "finish"


def test_the_host_waits_for_nothing() -> None:
    """A collective whose peers never answer is queued to its end; no device is queried."""
    names, codecs = ("sra", "ring", "tree", "all_gather"), (Identity(), QSGD(), TopK())
    for name, codec in product(names, codecs):
        with pytest.MonkeyPatch.context() as patch:
            waits_for_nothing(name, codec, patch)


def waits_for_nothing(name: str, codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    comm = alone(Nowhere())
    options = Options(algorithm=name, segments=2)
    collective = prepare(comm.calls, [Spec("w", 5000, torch.float32, codec, True)], options)
    item = Item(torch.randn(5000), KEYS, 0, torch.zeros(5000))

    def never(*_: object, **__: object) -> None:
        raise AssertionError("the host waits for a device")

    for owner, names in (
        (torch.cuda, ("synchronize",)),
        (torch.cuda.Stream, ("synchronize",)),
        (torch.cuda.Event, ("synchronize",)),
        (torch.Tensor, ("item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__float__")),
        (Mark, ("check",)),
    ):
        for what in names:
            monkeypatch.setattr(owner, what, never)
    for _ in range(3):
        future = collective.start([item])
        assert future.done()
        assert future.result(0).wire_bytes == collective.prepared[0][0].wire_bytes
    monkeypatch.undo()
    comm.close()


# ---- streams


class Stream:
    """A stand-in for a CUDA stream."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.device, self.events = name, log, torch.device("cpu"), 0

    def record_event(self) -> str:
        self.events += 1
        self.log.append(f"{self.name} records {self.events}")
        return f"{self.name} {self.events}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Stream, list[str]]]:
    """The side stream, and the log; the caller's stream is current at first."""
    log: list[str] = []
    current = [Stream("caller", log)]

    @contextmanager
    def stream(which: Stream) -> Iterator[None]:
        current.append(which)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
    yield Stream("side", log), log
    assert len(current) == 1


def test_a_future_has_the_streams_wait_but_for_an_error(streams: tuple[Any, list[str]]) -> None:
    side, log = streams
    future: StreamFuture[int] = StreamFuture(side)

    def early(_: object) -> None:
        log.append(f"early on {torch.cuda.current_stream().name}")  # type: ignore[attr-defined]

    future.add_done_callback(early)
    future.set_result(7)
    assert future.result() == 7
    future.add_done_callback(lambda f: log.append(f"late {f.result()}"))
    assert log == [
        "side records 1",
        "early on side",
        "caller waits for side 1",
        "side waits for side 1",  # within the callback: of no effect
        "late 7",
    ]
    log.clear()
    future = StreamFuture(side)
    future.set_exception(CodecError("bad"))
    raises(CodecError, future.result, "bad")
    assert log == []


def test_a_collective_runs_on_the_side_stream_behind_the_callers(
    streams: tuple[Any, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    side, log = streams
    monkeypatch.setattr(Pools, "stream", lambda pools, device: side)
    recorded: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, s: recorded.append(t))
    run = Kernels.run

    def logged(kernels: Kernels, form: str, *args: Any, **options: Any) -> None:
        log.append(f"{form} on {torch.cuda.current_stream().name}")
        run(kernels, form, *args, **options)

    monkeypatch.setattr(Kernels, "run", logged)
    comm = alone(Nowhere(log))
    collective = prepare(
        comm.calls, [Spec("w", 500, torch.float32, QSGD(), True)], Options(target="eager")
    )
    values, residual = torch.randn(500), torch.zeros(500)
    stream, ticket = comm.stream(CPU), comm.calls.ticket()
    assert stream is not None
    item = Item(values, KEYS, 0, residual)
    job = OrderedJob(collective.prepared[0][0], [item], ticket)
    job.ready = torch.cuda.current_stream().record_event()
    ticket.next_round(collective.issue)
    ticket.begin_in_order(stream, lambda: job).result(0)
    assert log == [
        "caller records 1",
        "side waits for caller 1",
        "encode_ef on side",
        "post 0",
        "wait 0",
        "reduce_encode_ef on side",
        "post 1",
        "wait 1",
        "decode on side",
        "side records 1",
        "caller waits for side 1",
    ]
    # Neither may be reused before the side stream has finished with it.
    assert {t.data_ptr() for t in recorded} == {values.data_ptr(), residual.data_ptr()}
    comm.close()


# ---- verdicts, which a GPU reports later


class Later:
    """A verdict that becomes known later."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.is_known = False

    def known(self) -> bool:
        return self.is_known

    def check(self) -> None:
        assert self.is_known, "the host waits"
        if self.error is not None:
            raise self.error


def test_a_bad_payload_breaks_the_group_once_it_is_known() -> None:
    link = Nowhere()
    comm = over(link)
    verdicts = [Later(), Later(CodecError("row 3: malformed payload for TopK")), Later()]
    for verdict in verdicts:
        submit(comm, Symbols((), [], [verdict])).result(0)
    verdicts[1].is_known = True  # but it is behind the first
    submit(comm, Symbols((), [])).result(0)
    verdicts[0].is_known = True
    for _ in range(2):
        raises(CodecError, lambda: submit(comm, Symbols((), [])).result(0), "row 3")
    assert link.failed == [0]


def test_a_verdict_is_taken_where_the_stream_is_and_says_it_once() -> None:
    failed = torch.zeros(1, dtype=torch.int32)
    good = Verdict(TopK(), failed)
    failed.fill_(4)
    bad = Verdict(TopK(), failed)
    assert good.known()
    good.check()
    raises(CodecError, bad.check, "row 3")
    Verdict(TopK(), failed).check()


def test_an_error_in_the_middle_breaks_the_group() -> None:
    class Broken(Symbols):
        def compute(self, task: int) -> None:
            raise CodecError("no such payload")

    link = Nowhere()
    comm = over(link)
    graph = REGISTRY["sra"].build(0, 2, [[16, 16]])
    future = submit(comm, Broken(stages_of(graph, 0, 2, "sra"), [], graph=graph))
    assert isinstance(future.exception(0), CodecError)
    assert link.failed == [0]
    assert link.interrupted == 1  # whoever finds the failure: a wait of the link may block another
    raises(CodecError, lambda: submit(comm, Symbols((), [])), "no such payload")
