"""The reducer on a real gRPC server: workers average, and learn of every fault."""

from __future__ import annotations

import itertools
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import grpc
import numpy as np
import numpy.typing as npt
import pytest

from andon.protocol import tokens
from andon.protocol.messages import (
    AveragedBlock,
    BlockFault,
    BlockFaultKind,
    BlockGradient,
    OpenRound,
    RoundAborted,
)
from andon.protocol.records import Key
from andon.wire.frames import batch_requests, frame_request
from andon_coordinator.core.defects import in_fault
from andon_coordinator.core.events import Fault, FaultKind
from andon_reducer.config import ReducerConfig
from andon_reducer.transport import averaging
from hostile.http2 import DATA, HALF_CLOSE, PREFACE, SETTINGS, Connection, frame, grpc_message
from integration.harness import wait_until
from integration.reducer_bench import (
    CHUNK,
    RUN,
    SECRET,
    Reducer,
    Stream,
    chunks_of,
    reason_of,
)

pytestmark = pytest.mark.integration

KEY = Key(1, 1)
MIB = 2**20


@pytest.fixture
def reducer() -> Iterator[Reducer]:
    with Reducer() as served:
        yield served


def vector(rank: int, size: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(rank).standard_normal(size).astype(np.float32)


def joined(answers: dict[int, AveragedBlock]) -> bytes:
    return b"".join(answers[offset].payload for offset in sorted(answers))


def exchange(stream: Stream, rank: int, world_size: int, key: Key, size: int) -> bytes:
    """Sends one rank's vector and returns the mean."""
    chunks = chunks_of(rank, vector(rank, size), key=key, world_size=world_size, weight=rank + 1.0)
    stream.send(*chunks)
    return joined(stream.averages(len(chunks)))


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_c_ddp_001_workers_get_the_weighted_mean_the_same_bytes_each(
    reducer: Reducer, workers: int
) -> None:
    size = 2 * MIB + 5
    got: dict[int, list[bytes]] = {}

    def work(rank: int) -> None:
        with Stream(reducer.port, rank) as stream:
            got[rank] = [
                exchange(stream, rank, workers, Key(1, step), size) for step in range(1, 4)
            ]

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len({step for steps in got.values() for step in steps}) == 1
    mean = np.frombuffer(got[0][0], np.float32)
    total = sum(range(1, workers + 1))
    expected = sum((r + 1.0) / total * vector(r, size).astype(np.float64) for r in range(workers))
    np.testing.assert_allclose(mean, expected, rtol=1e-5, atol=1e-6)


def test_c_ddp_001_any_order_of_arrival_gives_the_same_bytes(reducer: Reducer) -> None:
    size = MIB // 4
    seen = set()

    with Stream(reducer.port, 0) as a, Stream(reducer.port, 1) as b, Stream(reducer.port, 2) as c:
        for step, order in enumerate(itertools.permutations(enumerate((a, b, c))), 1):
            for rank, stream in order:
                numbers = vector(rank, size)
                stream.send(
                    *chunks_of(rank, numbers, key=Key(1, step), world_size=3, weight=rank + 0.5)
                )
            seen |= {joined(stream.averages(size // CHUNK)) for _, stream in order}

    assert len(seen) == 1


def test_f_dp_003_a_nan_names_rank_and_element_to_everybody(reducer: Reducer) -> None:
    good, bad = vector(0, 3 * CHUNK), vector(1, 3 * CHUNK)
    bad[CHUNK + 77] = np.nan

    with Stream(reducer.port, 0) as a, Stream(reducer.port, 1) as b:
        a.send(*chunks_of(0, good, key=KEY))
        b.send(*chunks_of(1, bad, key=KEY))
        faults = [
            next(answer for answer in iter(stream.read, None) if isinstance(answer, BlockFault))
            for stream in (a, b)
        ]
        # The round is void, but the streams stay open.
        means = [stream_send(stream, rank, Key(1, 2)) for rank, stream in enumerate((a, b))]
        answers = {joined(stream.averages(means[0])) for stream in (a, b)}

    for fault in faults:
        assert (fault.kind, fault.rank) == (BlockFaultKind.NON_FINITE, 1)
        assert (fault.block, fault.element, fault.value) == (0, CHUNK + 77, "nan")
    assert len(answers) == 1
    assert reducer.metric("andon_reducer_rounds_total", outcome="faulted") == 1


def stream_send(stream: Stream, rank: int, key: Key) -> int:
    chunks = chunks_of(rank, vector(rank, CHUNK), key=key)
    stream.send(*chunks)
    return len(chunks)


def test_ranks_that_disagree_learn_who_and_how(reducer: Reducer) -> None:
    with Stream(reducer.port, 0) as a, Stream(reducer.port, 1) as b:
        a.send(*chunks_of(0, vector(0, 10), key=KEY))
        b.send(*chunks_of(1, vector(1, 11), key=KEY))
        faults = [stream.read() for stream in (a, b)]

    for fault in faults:
        assert isinstance(fault, BlockFault)
        assert fault.kind is BlockFaultKind.INCONSISTENT
        assert sorted((fault.message.count("10"), fault.message.count("11"))) == [1, 1]


def test_a_cancelled_stream_aborts_its_round_for_the_others(reducer: Reducer) -> None:
    with Stream(reducer.port, 0) as a, Stream(reducer.port, 1) as b:
        a.send(*chunks_of(0, vector(0, 2 * CHUNK), key=KEY, world_size=3))
        b.send(*chunks_of(1, vector(1, CHUNK), key=KEY, world_size=3))
        wait_until(lambda: reducer.app.inflight_bytes >= 3 * CHUNK * 4)
        b.call.cancel()
        answer = a.read()

    assert isinstance(answer, RoundAborted)
    assert answer.key == KEY
    assert "worker 1" in answer.message


GRADIENT = chunks_of(0, np.ones(4, np.float32), key=KEY, world_size=1)[0]
FIVE = memoryview(bytes(20))


def test_a_stream_that_is_not_opened_in_time_is_ended() -> None:
    with (
        Reducer(ReducerConfig(opening_s=0.1)) as reducer,
        Stream(reducer.port, 0, opened=False) as stream,
    ):
        assert reason_of(stream.error()) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_MESSAGE")


@pytest.mark.parametrize(
    "wrong",
    [replace(GRADIENT, offset=2), replace(GRADIENT, offset=4, count=5, payload=FIVE)],
    ids=["offset", "count"],
)
def test_c_wire_002_a_chunk_off_the_lines_grid_ends_its_own_stream_only(
    wrong: BlockGradient,
) -> None:
    with (
        Reducer(ReducerConfig(chunk_elements=4)) as reducer,
        Stream(reducer.port, 0) as good,
        Stream(reducer.port, 1) as bad,
        Stream(reducer.port, 1) as again,
    ):
        good.send(replace(GRADIENT, world_size=2))
        bad.send(replace(wrong, rank=1, world_size=2))
        reason = reason_of(bad.error())
        again.send(replace(GRADIENT, rank=1, world_size=2))
        answers = [stream.read() for stream in (good, again)]

    assert reason == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_MESSAGE")
    assert all(isinstance(answer, AveragedBlock) for answer in answers)


def test_a_reducer_that_goes_away_says_so() -> None:
    with Reducer() as reducer, Stream(reducer.port, 0) as stream:
        reducer.call(reducer.app.close)
        assert reason_of(stream.error()) == (grpc.StatusCode.UNAVAILABLE, "SERVICE_LEAVING")


def test_a_worker_that_sends_no_more_ends_its_stream_well(reducer: Reducer) -> None:
    with Stream(reducer.port, 0) as stream:
        stream.send(*chunks_of(0, vector(0, 10), key=KEY, world_size=1))
        assert isinstance(stream.read(), AveragedBlock)
        stream.finish()

        assert list(stream.call) == []
        assert stream.call.code() is grpc.StatusCode.OK


def bound_bytes(window_bytes: int, streams: int, ranks: int) -> int:
    message = CHUNK * 4 + 1024
    return 2 * window_bytes + (2 * streams + ranks + 1) * message


@pytest.mark.parametrize("slow_to", ["send", "read"])
def test_memory_is_bounded_under_a_slow_rank(slow_to: str) -> None:
    window_bytes, size = MIB, 6 * MIB
    held: list[int] = []

    with Reducer(ReducerConfig(window_bytes=window_bytes)) as reducer:
        watching = threading.Event()

        def watch() -> None:
            while not watching.wait(0.001):
                held.append(reducer.app.inflight_bytes)

        watcher = threading.Thread(target=watch)
        watcher.start()
        with Stream(reducer.port, 0) as quick, Stream(reducer.port, 1) as slow:
            chunks = chunks_of(0, vector(0, size), key=KEY)
            quick.send(*chunks)
            if slow_to == "read":
                slow.send(*chunks_of(1, vector(1, size), key=KEY))
            # The reducer reads as much as its window holds, and then stops.
            wait_until(lambda: reducer.app.inflight_bytes > window_bytes - CHUNK * 4)
            moved = "andon_exchange_bytes_total"
            wait_until(lambda: steady(lambda: reducer.metric(moved, direction="up", path="wire")))
            up = reducer.metric(moved, direction="up", path="wire")
            if slow_to == "send":
                slow.send(*chunks_of(1, vector(1, size), key=KEY))
            means = []
            reader = threading.Thread(
                target=lambda: means.append(joined(slow.averages(len(chunks))))
            )
            reader.start()
            means.append(joined(quick.averages(len(chunks))))
            reader.join()
        watching.set()
        watcher.join()

    assert means[0] == means[1]
    assert up < size * 4 * (2 if slow_to == "read" else 1)
    assert max(held) <= bound_bytes(window_bytes, streams=2, ranks=2)


def steady(look: Callable[[], float]) -> bool:
    """Waits until a number stays the same for a while."""
    first = look()
    threading.Event().wait(0.3)
    return look() == first


@pytest.mark.parametrize("batched", [False, True])
def test_metrics_count_what_was_exchanged(reducer: Reducer, *, batched: bool) -> None:
    with Stream(reducer.port, 0) as stream:
        for step in (1, 2):
            [first] = chunks_of(0, vector(0, CHUNK // 2), key=Key(1, step), world_size=1)
            frames = [frame_request(each) for each in (first, replace(first, block=1))]
            for sent in [batch_requests(frames)] if batched else frames:
                stream.send_bytes(sent)
            for _ in frames:
                assert isinstance(stream.read(), AveragedBlock)
    wait_until(lambda: reducer.metric("andon_reducer_streams") == 0)

    assert reducer.metric("andon_reducer_rounds_total", outcome="finished") == 2
    assert reducer.metric("andon_allreduce_seconds_count") == 2
    for direction in ("up", "down"):
        moved = reducer.metric("andon_exchange_bytes_total", direction=direction, path="wire")
        assert 2 * CHUNK * 4 < moved < 2 * CHUNK * 4 + 1024
    assert reducer.metric("andon_inflight_bytes") == 0


def test_a_worker_that_half_closed_and_does_not_read_loses_its_stream() -> None:
    opening = frame_request(OpenRound(RUN, 0, tokens.session_token(SECRET, RUN, 0)))
    refusals = {"service": "reducer", "reason": "peer_gone"}
    with Reducer(ReducerConfig(opening_s=0.2)) as reducer:
        deaf = Connection(f"127.0.0.1:{reducer.port}", polite=False)
        no_window = struct.pack(">HI", 4, 0)  # SETTINGS_INITIAL_WINDOW_SIZE
        deaf.send(PREFACE + frame(SETTINGS, 0, 0, no_window))
        stream = deaf.open("/andon.v1.Reducer/Reduce")
        deaf.send(frame(DATA, HALF_CLOSE, stream, grpc_message(opening)))

        def refused() -> bool:
            deaf.answer()  # It answers pings, so it counts as alive.
            return reducer.registry.get_sample_value("andon_refusals_total", refusals) == 1

        wait_until(refused)
        deaf.close()


def test_a_failure_of_the_reducer_is_no_ranks_fault(
    reducer: Reducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> AveragedBlock:
        raise MemoryError

    monkeypatch.setattr(averaging, "reduce_chunk", fails)
    with Stream(reducer.port, 0) as stream:
        stream.send(*chunks_of(0, vector(0, 8), key=KEY, world_size=1))
        fault = stream.read()

    assert isinstance(fault, BlockFault)
    told = Fault(
        kind=FaultKind.PROTOCOL,
        key=fault.key,
        rank=fault.rank,
        block=fault.block,
        element=fault.element,
        message=fault.message,
    )
    defect = in_fault(told, 0, (0,), None)
    assert defect is not None
    assert defect.worker is None
    assert defect.message == (
        "worker 0 reports: the reducer failed to average element 0 of block 0, through no worker's "
        "fault: its log says why"
    )
