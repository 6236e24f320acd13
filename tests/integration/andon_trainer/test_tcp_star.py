"""A star over TCP lanes: the bits of gRPC, its rules, and gRPC where lanes can't be opened."""

from __future__ import annotations

import logging
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from andon.protocol import tokens
from andon.protocol.messages import Abstain, OpenRound, RoundOpened
from andon.protocol.reasons import Reason
from andon.protocol.records import Key
from andon.tcp.connecting import connect
from andon.tcp.connection import TcpConnection
from andon.tcp.framing import prefixed
from andon.tcp.proof import CAPABILITY, LaneDirection, LaneSession
from andon.tcp.receiving import TcpReceiver
from andon.tcp.sending import TcpSender
from andon.wire.frames import split_request
from andon.wire.lane_reports import REDUCER_METHOD, frame_asked, read_report
from andon_reducer.config import ReducerConfig
from andon_trainer.core.events import AveragesComplete, ExchangeFailed
from andon_trainer.exchange.star.tcp import WorkerLanes
from chaos.lane_relay import DOWN, UP, LaneRelay
from integration.andon_trainer.star_workers import (
    CHUNK,
    StarWorker,
    exchanged,
    lanes_of,
    means,
    shares_of,
    star,
    weighted_mean,
)
from integration.harness import wait_until
from integration.reducer_bench import RUN, SECRET, Reducer, Stream, reason_of
from integration.reducer_bench import connect as connect_grpc

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]

NO_THREAD = "can't start new thread"


def no_thread_called(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the system refuse each thread of this name."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError(NO_THREAD)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)


def noted_connections(where: str, monkeypatch: pytest.MonkeyPatch) -> list[TcpConnection]:
    """The connections that are opened from now on by the `connect` at this place."""
    opened: list[TcpConnection] = []

    def noted(*given: Any, **named: Any) -> list[TcpConnection]:
        opened.extend(connections := connect(*given, **named))
        return connections

    monkeypatch.setattr(where, noted)
    return opened


def moved(reducer: Reducer, direction: str, path: str) -> float:
    return reducer.metric("andon_exchange_bytes_total", direction=direction, path=path)


def test_a_worker_that_is_ahead_waits_for_the_others_and_the_window_stays_bounded(
    tmp_path: Path,
) -> None:
    window = 8 * 2**10
    with star("tcp", tmp_path, 1, 2, window_bytes=window) as ((reducer,), workers):
        workers[0].give(1)
        wait_until(lambda: reducer.app.inflight_bytes > window / 2)

        held = max(reducer.app.inflight_bytes for _ in range(1000))
        workers[1].give(1)

        assert held <= 2 * window + 2 * (4 * CHUNK + 512)
        assert all(isinstance(worker.told(), AveragesComplete) for worker in workers)
        assert means(workers)[0] == means(workers)[1]


def test_a_lane_that_breaks_voids_its_round_and_the_next_one_opens_anew(tmp_path: Path) -> None:
    with star("tcp", tmp_path, 1, 2) as (_, workers):
        exchanged(workers, 1)
        broken = lanes_of(workers[0])
        received = workers[0].exchange.traffic.received["tcp"]
        workers[1].give(2)
        workers[0].begin(2)
        workers[0].exchange.submit(0, workers[0].blocks[0])
        # Its first block is averaged: so the reducer knows it in this round.
        wait_until(lambda: workers[0].exchange.traffic.received["tcp"] > received)

        assert isinstance(broken._receiver, TcpReceiver)
        broken._receiver._connection.end()

        for worker in workers:
            told = worker.told()
            assert isinstance(told, ExchangeFailed)
            assert told.kind == "DATA_STREAM_LOST"
            worker.exchange.end()
        assert not workers[0].exchange.is_open
        exchanged(workers, 3)
        assert lanes_of(workers[0]) not in (None, broken)


class DeadFromTheFirst(WorkerLanes):
    """Lanes whose threads have learnt of the lane down's end before anybody holds them."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        assert isinstance(self._receiver, TcpReceiver)
        self._receiver._connection.end()
        self._receiver._thread.join(30)


def test_a_lane_that_is_dead_once_its_threads_run_carries_no_round(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("andon_trainer.exchange.star.reducer_path.REASON_S", 0.0)
    with star("tcp", tmp_path, 1, 1) as (_, workers):
        with monkeypatch.context() as patched:
            patched.setattr(
                "andon_trainer.exchange.star.reducer_path.WorkerLanes", DeadFromTheFirst
            )
            workers[0].exchange.open(workers[0].address, workers[0].opening)

        assert not workers[0].exchange.is_open
        exchanged(workers, 1)  # It is opened anew.
        assert lanes_of(workers[0]) is not None


def test_a_lane_that_dies_between_two_rounds_fails_the_round_that_began_with_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("andon_trainer.exchange.star.reducer_path.REASON_S", 0.0)
    with star("tcp", tmp_path, 1, 1) as (_, workers):
        exchanged(workers, 1)
        # Its loss is reported before the round begins that would have used it.
        lanes_of(workers[0])._receiver._connection.end()
        lanes_of(workers[0])._receiver._thread.join(30)
        monkeypatch.setattr(workers[0].exchange, "open", lambda *_: None)

        workers[0].give(2)

        told = workers[0].told()
        assert isinstance(told, ExchangeFailed)
        assert told.kind == "DATA_STREAM_LOST"


@pytest.mark.parametrize("name", ["andon-lane-out", "andon-lane-in", "andon-lane-watch"])
def test_grpc_carries_everything_if_there_is_no_thread_for_a_lane(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened = noted_connections("andon_trainer.exchange.star.tcp.connect", monkeypatch)
    no_thread_called(name, monkeypatch)
    with star("tcp", tmp_path, 1, 1) as (_, workers), caplog.at_level(logging.INFO):
        exchanged(workers, 1)

        assert lanes_of(workers[0]) is None
        assert [each._socket.fileno() for each in opened] == [-1, -1]
    assert f"not over TCP: {NO_THREAD}" in caplog.text


def test_grpc_carries_everything_if_the_port_takes_no_connections(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with star("tcp", tmp_path, 1, 2) as ((reducer,), workers), socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert reducer.listener is not None
        reducer.listener.port = closed.getsockname()[1]  # Nobody listens: refused at once.

        with caplog.at_level(logging.INFO):
            exchanged(workers, 1)
            workers[0].exchange.close()
            exchanged(workers, 2)

        assert not moved(reducer, "up", "tcp")
        said = [each.getMessage() for each in caplog.records if "over gRPC" in each.getMessage()]
        assert len(said) == 2  # Once a worker.
        assert all("not over TCP: port" in each and "refused" in each for each in said)


PATIENCE_S = 0.5


@contextmanager
def relayed(
    workers: int = 2, *, patience_s: float = PATIENCE_S, window_bytes: int = 2**26
) -> Iterator[tuple[Reducer, list[StarWorker], LaneRelay]]:
    """One reducer, and workers of which the last one reaches it through a relay."""
    with ExitStack() as stack:
        config = ReducerConfig(window_bytes=window_bytes)
        reducer = stack.enter_context(Reducer(config, lanes=True))
        assert reducer.listener is not None
        address = f"127.0.0.1:{reducer.port}"
        relay = stack.enter_context(LaneRelay(address, reducer.listener.port))
        members = []
        for rank in range(workers):
            at = relay.address if rank == workers - 1 else address
            members.append(
                StarWorker(rank, workers, shares_of([at]), lanes=True, lane_patience_s=patience_s)
            )
            stack.callback(members[-1].exchange.close)
        yield reducer, members, relay


@pytest.mark.parametrize("direction", [UP, DOWN])
@pytest.mark.parametrize("used", [False, True], ids=["first", "later"])
def test_a_lane_that_takes_bytes_and_passes_none_on_is_named_and_grpc_takes_over(
    direction: int, used: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with relayed() as (reducer, workers, relay):
        mean = exchanged(workers, 1)[0] if used else b""
        workers[1].begin(2)
        relay.freeze(direction)
        workers[0].give(2)
        for index, block in enumerate(workers[1].blocks):
            workers[1].exchange.submit(index, block)

        told = workers[1].told()
        assert isinstance(told, ExchangeFailed)
        assert told.kind == "DATA_STREAM_LOST"
        assert relay.address in told.message
        assert f"what this worker {'sends' if direction == UP else 'receives'}" in told.message
        workers[1].exchange.end()
        if direction == DOWN:
            assert isinstance(workers[0].told(), AveragesComplete)
        workers[0].exchange.end()
        before = moved(reducer, "up", "tcp")
        relay.thaw()  # What it swallowed comes now, and is nobody's.
        means_ = exchanged(workers, 3)
        assert set(means_) == {mean or means_[0]}
        assert means_[0] == weighted_mean(workers)
        assert lanes_of(workers[0]) is not None
        assert lanes_of(workers[1]) is None
        assert moved(reducer, "up", "wire") > 0 < before
    said = [each.getMessage() for each in caplog.records if "over gRPC" in each.getMessage()]
    assert len([each for each in said if relay.address in each and "stood still" in each]) == 1


@pytest.mark.parametrize("direction", [UP, DOWN])
def test_a_lane_on_which_one_chunk_takes_longer_than_the_patience_is_kept(direction: int) -> None:
    with relayed() as (_, workers, relay):
        exchanged(workers, 1)
        relay.slow, relay.piece_bytes, relay.delay_s = {direction}, 32, 0.1
        for worker in workers:
            worker.give(2)

        early = workers[1].inbox.take(4 * PATIENCE_S)
        relay.piece_bytes, relay.delay_s = 2**16, 0.0

        assert early is None
        assert all(isinstance(worker.told(), AveragesComplete) for worker in workers)
        assert lanes_of(workers[1]) is not None


def test_a_reducer_that_holds_a_worker_back_for_a_slow_rank_keeps_its_lanes() -> None:
    with relayed(window_bytes=8 * 2**10) as (_, workers, _):
        workers[1].give(1)  # Far more than the window: the reducer stops reading.

        early = workers[1].inbox.take(4 * PATIENCE_S)
        workers[0].give(1)

        assert early is None
        assert all(isinstance(worker.told(), AveragesComplete) for worker in workers)
        assert lanes_of(workers[1]) is not None


def test_a_report_is_for_who_knows_the_offers_nonce() -> None:
    with ExitStack() as stack:
        reducer = stack.enter_context(Reducer(lanes=True))
        joined = Joined(reducer, stack)
        used(reducer, joined)
        channel = connect_grpc(reducer.port)
        stack.callback(channel.close)
        report: Any = channel.unary_unary(REDUCER_METHOD)

        told = read_report(report(frame_asked(joined.offer.nonce), timeout=30))

        sent = len(prefixed(*split_request(replace(ABSTAIN, world_size=1))))
        assert told.received_bytes == sent
        assert told.reading
        assert told.sent_bytes > 8
        for wrong in (b"", joined.offer.nonce[:16], bytes(32)):
            with pytest.raises(grpc.RpcError) as refused:
                report(frame_asked(wrong), timeout=30)
            assert reason_of(refused.value)[1] == Reason.TOKEN.name


class Joined:
    """A worker by hand: a stream over gRPC, and its lanes."""

    def __init__(self, reducer: Reducer, stack: ExitStack) -> None:
        self.stream = stack.enter_context(Stream(reducer.port, 0, opened=False))
        token = tokens.session_token(SECRET, RUN, 0)
        self.stream.send(OpenRound(RUN, 0, token, (CAPABILITY,)))
        opened = self.stream.read()
        assert isinstance(opened, RoundOpened)
        assert opened.tcp is not None
        self.offer = opened.tcp
        session = LaneSession(token, RUN, 0)
        up, self.down = connect("127.0.0.1", opened.tcp, session, tuple(LaneDirection))
        stack.callback(self.down.close)
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.sender = TcpSender(up, self.lost.put, "test-out")
        stack.callback(self.sender.close)


ABSTAIN = Abstain(key=Key(1, 1), rank=0, world_size=2)


def used(reducer: Reducer, joined: Joined) -> None:
    """Sends a message over the lane, which the reducer has taken when this returns."""
    round_ = replace(ABSTAIN, world_size=1)
    joined.sender.send(lambda: split_request(round_))
    assert joined.down.receive_into(memoryview(bytearray(8)))  # The answer: zeros.


def test_a_stream_goes_on_over_grpc_if_its_lanes_are_never_used() -> None:
    with ExitStack() as stack:
        joined = Joined(stack.enter_context(Reducer(lanes=True)), stack)
        joined.sender.close()
        joined.down.end()

        joined.stream.send(replace(ABSTAIN, world_size=1))

        assert joined.stream.read() is not None


def test_the_end_of_a_lane_that_carried_nothing_yet_ends_the_other_one() -> None:
    with ExitStack() as stack:
        joined = Joined(stack.enter_context(Reducer(lanes=True)), stack)

        joined.sender.finish()

        # Else a worker whose one message the kernel took would wait for its answer for ever.
        assert not joined.down.receive_into(memoryview(bytearray(1)), may_end=True)
        joined.stream.send(replace(ABSTAIN, world_size=1))
        assert joined.stream.read() is not None
