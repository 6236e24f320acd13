"""A star over TCP lanes: the bits of gRPC, its rules, and gRPC where lanes can't be opened."""

from __future__ import annotations

import logging
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest

from andon.protocol import tokens
from andon.protocol.messages import Abstain, OpenRound, RoundOpened
from andon.protocol.reasons import Reason
from andon.protocol.records import Key
from andon.protocol.reducers import partition
from andon.tcp.connecting import connect
from andon.tcp.connection import TcpConnection
from andon.tcp.framing import prefixed
from andon.tcp.proof import CAPABILITY, LaneDirection, LaneSession
from andon.tcp.sending import TcpSender
from andon.wire import checksums
from andon.wire.frames import split_request
from andon.wire.lane_reports import REDUCER_METHOD, frame_asked, read_report
from andon_reducer.config import ReducerConfig
from andon_trainer.core.events import AveragesComplete, ExchangeFailed
from andon_trainer.exchange.star.tcp import WorkerLanes
from chaos.lane_relay import DOWN, UP, LaneRelay
from integration.andon_trainer.test_star import CHUNK, LAYOUT, SIZES, Worker, means
from integration.reducer_bench import RUN, SECRET, Reducer, Stream, reason_of
from integration.reducer_bench import connect as connect_grpc
from integration.test_reducer import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]

CAPABILITIES = (checksums.CAPABILITY, CAPABILITY)


@contextmanager
def line(
    reducers: int, workers: int, *, lanes: bool = True, window_bytes: int = 2**26
) -> Iterator[tuple[list[Reducer], list[Worker]]]:
    """Reducers that offer lanes, and workers that can use them."""
    with ExitStack() as stack:
        config = ReducerConfig(window_bytes=window_bytes)
        started = [stack.enter_context(Reducer(config, lanes=lanes)) for _ in range(reducers)]
        shares = partition(LAYOUT, CHUNK, [f"127.0.0.1:{each.port}" for each in started])
        members = [Worker(rank, workers, shares) for rank in range(workers)]
        for worker in members:
            worker.opening = replace(worker.opening, capabilities=CAPABILITIES)
            stack.callback(worker.exchange.close)
        yield started, members


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


def exchanged(workers: list[Worker], number: int) -> list[bytes]:
    for worker in workers:
        worker.give(number)
    for worker in workers:
        told = worker.told()
        assert isinstance(told, AveragesComplete), told
    found = means(workers)
    for worker in workers:
        worker.exchange.end()
    return found


def lanes_of(worker: Worker) -> Any:
    return worker.exchange._reducers[0]._wire._lanes


def moved(reducer: Reducer, direction: str, path: str) -> float:
    return reducer.metric("andon_exchange_bytes_total", direction=direction, path=path)


def has_moved(reducers: list[Reducer], direction: str, path: str, size: int) -> bool:
    return sum(moved(each, direction, path) for each in reducers) == size


def test_lanes_carry_the_bits_of_grpc_and_nothing_else_travels_over_grpc() -> None:
    found = []
    for lanes in (False, True):
        with line(2, 2, lanes=lanes) as (reducers, workers):
            found += exchanged(workers, 1)
            path, other = ("tcp", "wire") if lanes else ("wire", "tcp")
            traffic = [worker.exchange.traffic for worker in workers]
            for each in traffic:
                assert min(each.sent[path], each.received[path]) >= 4 * sum(SIZES)
                assert not each.sent[other] + each.received[other]
            for direction, told in (("up", "sent"), ("down", "received")):
                expected = sum(getattr(each, told)[path] for each in traffic)
                # Counted once the kernel has an average, by when the worker may have it.
                wait_until(partial(has_moved, reducers, direction, path, expected))

    assert found == [found[0]] * 4


def test_all_ranks_but_one_may_abstain_over_lanes() -> None:
    with line(1, 2) as (_, workers):
        workers[0].give(1)
        workers[1].begin(1)
        workers[1].exchange.abstain()

        assert all(isinstance(worker.told(), AveragesComplete) for worker in workers)

        assert means(workers) == [np.concatenate(workers[0].blocks).tobytes()] * 2


def test_zeros_come_over_lanes_if_every_rank_abstains() -> None:
    with line(1, 2) as (_, workers):
        exchanged(workers, 1)
        for worker in workers:
            worker.begin(2)
            worker.exchange.abstain()

        assert all(isinstance(worker.told(), AveragesComplete) for worker in workers)

        assert means(workers) == [bytes(4 * sum(SIZES))] * 2


def test_a_worker_that_is_ahead_waits_for_the_others_and_the_window_stays_bounded() -> None:
    window = 8 * 2**10
    with line(1, 2, window_bytes=window) as ((reducer,), workers):
        workers[0].give(1)
        wait_until(lambda: reducer.app.inflight_bytes > window / 2)

        held = max(reducer.app.inflight_bytes for _ in range(1000))
        workers[1].give(1)

        assert held <= 2 * window + 2 * (4 * CHUNK + 512)
        assert all(isinstance(worker.told(), AveragesComplete) for worker in workers)
        assert means(workers)[0] == means(workers)[1]


def test_a_lane_that_breaks_voids_its_round_and_the_next_one_opens_anew() -> None:
    with line(1, 2) as (_, workers):
        exchanged(workers, 1)
        broken = lanes_of(workers[0])
        received = workers[0].exchange.traffic.received["tcp"]
        workers[1].give(2)
        workers[0].begin(2)
        workers[0].exchange.submit(0, workers[0].blocks[0])
        # Its first block is averaged: so the reducer knows it in this round.
        wait_until(lambda: workers[0].exchange.traffic.received["tcp"] > received)

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
        self._receiver._connection.end()
        self._receiver._thread.join(30)


def test_a_lane_that_is_dead_once_its_threads_run_carries_no_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("andon_trainer.exchange.star.reducer_path._REASON_S", 0.0)
    with line(1, 1) as (_, workers):
        with monkeypatch.context() as patched:
            patched.setattr(
                "andon_trainer.exchange.star.reducer_path.WorkerLanes", DeadFromTheFirst
            )
            workers[0].exchange.open(workers[0].address, workers[0].opening)

        assert not workers[0].exchange.is_open
        exchanged(workers, 1)  # It is opened anew.
        assert lanes_of(workers[0]) is not None


def test_a_lane_that_dies_between_two_rounds_fails_the_round_that_began_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("andon_trainer.exchange.star.reducer_path._REASON_S", 0.0)
    with line(1, 1) as (_, workers):
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
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened = noted_connections("andon_trainer.exchange.star.tcp.connect", monkeypatch)
    no_thread_called(name, monkeypatch)
    with line(1, 1) as (_, workers), caplog.at_level(logging.INFO):
        exchanged(workers, 1)

        assert lanes_of(workers[0]) is None
        assert [each._socket.fileno() for each in opened] == [-1, -1]
    assert f"not over TCP: {NO_THREAD}" in caplog.text


def test_grpc_carries_everything_if_the_port_takes_no_connections(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with line(1, 2) as ((reducer,), workers), socket.socket() as closed:
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
) -> Iterator[tuple[Reducer, list[Worker], LaneRelay]]:
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
            shares = partition(LAYOUT, CHUNK, [at])
            members.append(Worker(rank, workers, shares, lane_patience_s=patience_s))
            members[-1].opening = replace(members[-1].opening, capabilities=CAPABILITIES)
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


def weighted_mean(workers: list[Worker]) -> bytes:
    """Of two workers with the weights 0.5 and 1.5, by the rule of the protocol."""
    shares = [np.float32(0.25), np.float32(0.75)]
    first, second = (np.concatenate(worker.blocks) for worker in workers)
    mean: bytes = (first * shares[0] + second * shares[1]).tobytes()
    return mean


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


def refusal_after(act: Callable[[Reducer, Joined], None]) -> grpc.RpcError:
    with ExitStack() as stack:
        reducer = stack.enter_context(Reducer(lanes=True))
        joined = Joined(reducer, stack)

        act(reducer, joined)

        with pytest.raises(grpc.RpcError) as refused:
            joined.stream.read()
        return refused.value


def used(reducer: Reducer, joined: Joined) -> None:
    """Sends a message over the lane, which the reducer has taken when this returns."""
    round_ = replace(ABSTAIN, world_size=1)
    joined.sender.send(lambda: split_request(round_))
    assert joined.down.receive_into(memoryview(bytearray(8)))  # The answer: zeros.


def test_a_message_over_grpc_is_refused_once_the_lanes_are_in_use() -> None:
    def act(reducer: Reducer, joined: Joined) -> None:
        used(reducer, joined)
        joined.stream.send(ABSTAIN)

    assert reason_of(refusal_after(act))[1] == Reason.INVALID_MESSAGE.name


def test_a_frame_that_breaks_a_rule_is_refused_over_grpc() -> None:
    head, _ = split_request(replace(ABSTAIN, rank=2))

    error = refusal_after(lambda _, joined: joined.sender.send(lambda: (head, None)))

    assert reason_of(error)[1] == Reason.INVALID_MESSAGE.name
    assert "rank 2 is not below" in (error.details() or "")


def test_a_frame_above_the_limit_is_refused_as_too_large() -> None:
    payload = memoryview(bytes(5 * 2**20))

    error = refusal_after(lambda _, joined: joined.sender.send(lambda: (b"h", payload)))

    assert reason_of(error)[1] == Reason.TOO_LARGE.name


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


def test_lanes_end_with_their_call() -> None:
    with ExitStack() as stack:
        reducer = stack.enter_context(Reducer(lanes=True))
        joined = Joined(reducer, stack)
        used(reducer, joined)

        joined.stream.call.cancel()

        rest = memoryview(bytearray(2**16))
        with pytest.raises(OSError, match="ended within a frame"):
            joined.down.receive_into(rest)
