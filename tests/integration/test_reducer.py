"""The reducer on a real gRPC server: workers average, and learn of every fault."""

from __future__ import annotations

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
    BlockGradient,
    OpenRound,
)
from andon.protocol.records import Key
from andon.wire.frames import batch_requests, frame_request
from andon_coordinator.core.defects import in_fault
from andon_coordinator.core.events import Fault, FaultKind
from andon_reducer.config import ReducerConfig
from andon_reducer.transport import averaging
from hostile.http2 import DATA, HALF_CLOSE, PREFACE, Connection, frame, grpc_message, window
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
        deaf.send(PREFACE + window(0))
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
