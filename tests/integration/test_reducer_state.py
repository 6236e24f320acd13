"""State transfers from one worker through the reducer to another worker."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import Queue
from typing import Any

import grpc
import pytest

from andon.protocol import tokens
from andon.protocol.announcements import Session, TransferOpening
from andon.protocol.records import Key
from andon.v1 import record_pb2, reducer_pb2
from andon_reducer.config import ReducerConfig, ReducerLimits
from andon_trainer.exchange.control.packed_state import PackedState
from andon_trainer.exchange.control.transfer import PartialState, Ticket, receive_state, send_state
from hostile.http2 import PREFACE, Connection, grpc_message, window
from integration.harness import wait_until
from integration.reducer_bench import RUN, SECRET, Reducer, connect, reason_of

pytestmark = pytest.mark.integration

PIECE = 2**20
STATE = bytes(range(256)) * 20_000
HEAD = record_pb2.Key(term=7, round=3)
PATIENCE_S = 30


@pytest.fixture
def reducer() -> Iterator[Reducer]:
    with Reducer(ReducerConfig(limits=ReducerLimits(max_state_pieces=2))) as served:
        yield served


@dataclass
class Ends:
    """Both ends of transfers; each call has its own connection and thread."""

    reducer: Reducer
    threads: ThreadPoolExecutor

    def put(self, pieces: Iterator[reducer_pb2.PutStateRequest]) -> Future[Any]:
        def call() -> Any:
            with connect(self.reducer.port) as channel:
                return list(self.send(channel, pieces))

        return self.threads.submit(call)

    def send(self, channel: grpc.Channel, pieces: Iterator[reducer_pb2.PutStateRequest]) -> Any:
        """One call of PutState; the caller reads its answers."""
        put = channel.stream_stream(
            "/andon.v1.Reducer/PutState",
            request_serializer=reducer_pb2.PutStateRequest.SerializeToString,
            response_deserializer=reducer_pb2.PutStateResponse.FromString,
        )
        return put(pieces, timeout=PATIENCE_S)

    def get(self, **other: Any) -> Future[list[reducer_pb2.GetStateResponse]]:
        def call() -> list[reducer_pb2.GetStateResponse]:
            with connect(self.reducer.port) as channel:
                return list(self.open(channel, **other))

        return self.threads.submit(call)

    def open(self, channel: grpc.Channel, **other: Any) -> Any:
        """One call of GetState; the caller reads it."""
        get = channel.unary_stream(
            "/andon.v1.Reducer/GetState",
            request_serializer=reducer_pb2.GetStateRequest.SerializeToString,
            response_deserializer=reducer_pb2.GetStateResponse.FromString,
        )
        fields: dict[str, Any] = {"transfer_id": 1, "head": HEAD, **token(1), **other}
        return get(reducer_pb2.GetStateRequest(**fields), timeout=PATIENCE_S)


@pytest.fixture
def ends(reducer: Reducer) -> Iterator[Ends]:
    with ThreadPoolExecutor(4) as threads:
        yield Ends(reducer, threads)


def token(worker: int) -> dict[str, Any]:
    return {
        "run_id": RUN,
        "worker": worker,
        "session_token": tokens.session_token(SECRET, RUN, worker),
    }


def first(**other: Any) -> reducer_pb2.PutStateRequest:
    fields: dict[str, Any] = {
        "transfer_id": 1,
        "head": HEAD,
        "size_bytes": len(STATE),
        "sha256": hashlib.sha256(STATE).digest(),
        **token(0),
        **other,
    }
    return reducer_pb2.PutStateRequest(**fields)


def piece(payload: bytes) -> reducer_pb2.PutStateRequest:
    return reducer_pb2.PutStateRequest(payload=payload)


def pieces_of(state: bytes, **other: Any) -> Iterator[reducer_pb2.PutStateRequest]:
    yield first(**other)
    for start in range(0, len(state), PIECE):
        yield piece(state[start : start + PIECE])


def ticket_of(reducer: Reducer, worker: int) -> Ticket:
    return Ticket(
        address=f"127.0.0.1:{reducer.port}",
        run_id=RUN,
        worker=worker,
        session_token=tokens.session_token(SECRET, RUN, worker),
        transfer_id=1,
        head=Key(7, 3),
    )


def reason(call: Future[Any]) -> tuple[grpc.StatusCode, str]:
    error = call.exception(PATIENCE_S)
    assert isinstance(error, grpc.RpcError), error
    return reason_of(error)


@pytest.mark.parametrize("sender_first", [True, False])
def test_state_arrives_whole_whichever_end_comes_first(ends: Ends, *, sender_first: bool) -> None:
    if sender_first:
        put, get = ends.put(pieces_of(STATE)), ends.get()
    else:
        get, put = ends.get(), ends.put(pieces_of(STATE))

    pieces = get.result(PATIENCE_S)

    assert put.result(PATIENCE_S) == [reducer_pb2.PutStateResponse(offset=0)]
    assert b"".join(piece.payload for piece in pieces) == STATE
    assert pieces[0].size_bytes == len(STATE)
    assert pieces[0].sha256 == hashlib.sha256(STATE).digest()
    relayed = ends.reducer.registry.get_sample_value("andon_state_transfer_bytes_total")
    assert relayed is not None
    assert relayed >= len(STATE)


def test_transfers_are_apart_and_an_id_may_be_used_by_another_run(ends: Ends) -> None:
    other: dict[str, Any] = {
        "run_id": "99aa",
        "session_token": tokens.session_token(SECRET, "99aa", 5),
    }
    puts = [
        ends.put(iter([first(size_bytes=3, transfer_id=4), piece(b"one")])),
        ends.put(
            iter([first(size_bytes=3, transfer_id=4, **{"worker": 5, **other}), piece(b"two")])
        ),
    ]

    ours = ends.get(transfer_id=4).result(PATIENCE_S)
    theirs = ends.get(transfer_id=4, **{"worker": 5, **other}).result(PATIENCE_S)

    assert [put.result(PATIENCE_S) for put in puts] == [[reducer_pb2.PutStateResponse()]] * 2
    assert [b"".join(p.payload for p in got) for got in (ours, theirs)] == [b"one", b"two"]


def test_an_interrupted_receiver_gets_the_rest_of_the_same_state(ends: Ends) -> None:
    held = 2 * PIECE + 77
    told: queue.SimpleQueue[int] = queue.SimpleQueue()

    def pieces() -> Iterator[reducer_pb2.PutStateRequest]:
        yield first()
        yield piece(STATE[told.get(timeout=PATIENCE_S) :])

    get = ends.get(offset=held, sha256=hashlib.sha256(STATE).digest())
    with connect(ends.reducer.port) as channel:
        for answer in ends.send(channel, pieces()):
            told.put(answer.offset)

    got = get.result(PATIENCE_S)
    assert got[0].offset == held
    assert b"".join(each.payload for each in got) == STATE[held:]


@pytest.mark.parametrize(
    "held",
    [
        {"offset": 5, "sha256": hashlib.sha256(b"another").digest()},
        {"offset": 5, "sha256": b""},
        {"offset": len(STATE) + 1, "sha256": hashlib.sha256(STATE).digest()},
    ],
)
def test_c_commit_001_another_state_is_sent_from_its_start(
    ends: Ends, held: dict[str, Any]
) -> None:
    get, put = ends.get(**held), ends.put(pieces_of(STATE))

    got = get.result(PATIENCE_S)

    assert put.result(PATIENCE_S) == [reducer_pb2.PutStateResponse(offset=0)]
    assert (got[0].offset, b"".join(each.payload for each in got)) == (0, STATE)


@pytest.mark.parametrize(
    ("limits", "opening"),
    [
        (ReducerConfig(state_s=0.2), {}),
        (ReducerConfig(state_stalled_s=0.2), {}),
        (ReducerConfig(state_stalled_s=0.2), {"beside_training": True}),
        (ReducerConfig(state_hopeless_s=0.2), {"holds_up": True}),
    ],
    ids=["too long", "stalled", "stalled beside training", "hopeless"],
)
def test_a_transfer_that_takes_too_long_or_stalls_ends_at_both_ends(
    limits: ReducerConfig, opening: dict[str, bool]
) -> None:
    asked = threading.Event()

    def pieces() -> Iterator[reducer_pb2.PutStateRequest]:
        yield first()
        assert asked.wait(PATIENCE_S)

    with (
        Reducer(limits) as slow,
        ThreadPoolExecutor(2) as threads,
    ):
        slow.call(partial(announce, slow, **opening))
        ends = Ends(slow, threads)
        put, get = ends.put(pieces()), ends.get()

        assert reason(get) == reason(put) == (grpc.StatusCode.ABORTED, "PEER_GONE")
        asked.set()


def test_a_transfer_beside_training_may_take_as_long_as_it_moves() -> None:
    limits = ReducerConfig(state_s=0.2, state_hopeless_s=0.1)

    def pieces() -> Iterator[reducer_pb2.PutStateRequest]:
        first_, *others = pieces_of(STATE)
        yield first_
        threading.Event().wait(0.4)
        yield from others

    with Reducer(limits) as slow, ThreadPoolExecutor(2) as threads:
        slow.call(partial(announce, slow, beside_training=True))
        ends = Ends(slow, threads)
        put, get = ends.put(pieces()), ends.get()
        got = get.result(PATIENCE_S)

    assert put.result(PATIENCE_S) == [reducer_pb2.PutStateResponse(offset=0)]
    assert b"".join(each.payload for each in got) == STATE


async def announce(reducer: Reducer, **said: bool) -> None:
    """As the coordinator does, before either end hears of the transfer."""
    opening = TransferOpening(1, Session(0, (0, 0)), Session(1, (0, 0)), **said)
    reducer.app.announced.follow(RUN, patience_s=1.0)
    reducer.app.announced.take(RUN, opening)


def test_a_payload_in_the_first_piece_is_refused(ends: Ends) -> None:
    put = ends.put(iter([first(payload=b"x")]))

    assert reason(put) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_MESSAGE")


def test_a_sender_that_is_lost_aborts_the_receiver(ends: Ends) -> None:
    gone = threading.Event()

    def pieces() -> Iterator[reducer_pb2.PutStateRequest]:
        yield first()
        yield piece(STATE[:100])
        assert gone.wait(PATIENCE_S)
        raise RuntimeError("the sender dies")

    put = ends.put(pieces())
    with connect(ends.reducer.port) as channel:
        get = ends.open(channel)
        assert next(get).size_bytes == len(STATE)
        gone.set()
        with pytest.raises(grpc.RpcError) as caught:
            list(get)

    assert reason_of(caught.value) == (grpc.StatusCode.ABORTED, "PEER_GONE")
    assert isinstance(put.exception(PATIENCE_S), grpc.RpcError)


def test_a_receiver_that_is_lost_aborts_the_sender(ends: Ends) -> None:
    asked = threading.Event()

    def pieces() -> Iterator[reducer_pb2.PutStateRequest]:
        yield first()
        yield piece(STATE[:100])
        assert asked.wait(PATIENCE_S)

    put = ends.put(pieces())
    with connect(ends.reducer.port) as channel:
        get = ends.open(channel)
        next(get)
        get.cancel()

    assert reason(put) == (grpc.StatusCode.ABORTED, "PEER_GONE")
    asked.set()


@pytest.mark.parametrize("method", ["PutState", "GetState"])
def test_an_end_that_does_not_read_keeps_no_call_and_is_told_once_it_reads(
    caplog: pytest.LogCaptureFixture, method: str
) -> None:
    asked, sends = threading.Event(), method == "PutState"

    def pieces() -> Iterator[reducer_pb2.PutStateRequest]:
        yield first()
        assert asked.wait(PATIENCE_S)

    def refusals() -> float | None:
        deaf.answer()
        return slow.registry.get_sample_value(
            "andon_refusals_total", {"service": "reducer", "reason": "peer_gone"}
        )

    def ended() -> bool:
        deaf.answer()
        return deaf.ended(stream)

    with Reducer(ReducerConfig(state_stalled_s=0.2)) as slow, ThreadPoolExecutor(1) as threads:
        slow.call(partial(announce, slow, beside_training=True))
        deaf = Connection(f"127.0.0.1:{slow.port}", polite=False)
        deaf.send(PREFACE + window(0))
        stream = deaf.open(f"/andon.v1.Reducer/{method}")
        request = (
            first() if sends else reducer_pb2.GetStateRequest(transfer_id=1, head=HEAD, **token(1))
        )
        deaf.say(stream, grpc_message(request.SerializeToString()))
        ends = Ends(slow, threads)
        other = ends.get() if sends else ends.put(pieces())

        assert reason(other) == (grpc.StatusCode.ABORTED, "PEER_GONE")
        wait_until(lambda: refusals() == 2)
        assert not ended()
        deaf.send(window(2**16))
        wait_until(ended)
        deaf.close()
        asked.set()
    assert "ExecuteBatchError" not in caplog.text


def test_ends_of_different_heads_are_both_aborted(ends: Ends) -> None:
    calls = [ends.put(pieces_of(STATE)), ends.get(head=record_pb2.Key(term=7, round=2))]

    assert [reason(call) for call in calls] == [(grpc.StatusCode.ABORTED, "PEER_GONE")] * 2


@pytest.mark.parametrize("size_bytes", [len(STATE) - 1, len(STATE) + 1])
def test_c_wire_002_a_state_of_another_length_than_announced_is_refused(
    ends: Ends, size_bytes: int
) -> None:
    put, get = ends.put(pieces_of(STATE, size_bytes=size_bytes)), ends.get()

    assert reason(put) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_MESSAGE")
    assert reason(get) == (grpc.StatusCode.ABORTED, "PEER_GONE")


def test_c_wire_002_garbage_in_a_state_is_refused(ends: Ends) -> None:
    def call(method: str) -> Future[Any]:
        def garbage() -> Any:
            with connect(ends.reducer.port) as channel:
                if method == "GetState":
                    get: Any = channel.unary_stream(f"/andon.v1.Reducer/{method}")
                    return list(get(b"\xff\xff\xff", timeout=PATIENCE_S))
                put: Any = channel.stream_stream(f"/andon.v1.Reducer/{method}")
                return list(put(iter([b"\xff\xff\xff"]), timeout=PATIENCE_S))

        return ends.threads.submit(garbage)

    for method in ("GetState", "PutState"):
        assert reason(call(method)) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_MESSAGE")


def test_a_second_receiver_is_refused(ends: Ends) -> None:
    with connect(ends.reducer.port) as channel:
        get = ends.open(channel)
        put = ends.put(pieces_of(STATE))
        next(get)
        second = ends.get()

        assert reason(second) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_MESSAGE")
        list(get)
    put.result(PATIENCE_S)


def test_a_wrong_token_is_unauthenticated(ends: Ends) -> None:
    put = ends.put(iter([first(session_token=b"no")]))
    get = ends.get(session_token=b"no")

    assert reason(put) == reason(get) == (grpc.StatusCode.UNAUTHENTICATED, "TOKEN")


def test_a_reducer_that_goes_away_says_so(ends: Ends) -> None:
    get = ends.get()
    # A completed transfer shows that the earlier call has arrived.
    ends.put(iter([first(size_bytes=1, transfer_id=2), piece(b"x")]))
    ends.get(transfer_id=2).result(PATIENCE_S)

    ends.reducer.call(ends.reducer.app.close)

    assert reason(get) == (grpc.StatusCode.UNAVAILABLE, "SERVICE_LEAVING")


def test_an_end_whose_peer_never_comes_gets_an_error() -> None:
    config = ReducerConfig(state_patience_s=0.2)
    with Reducer(config) as served, ThreadPoolExecutor(2) as threads:
        alone = Ends(served, threads)

        put, get = alone.put(pieces_of(STATE)), alone.get(transfer_id=2)

        assert reason(put) == reason(get) == (grpc.StatusCode.ABORTED, "PEER_GONE")


@pytest.mark.parametrize("sends", [True, False])
def test_a_worker_that_stops_waiting_for_a_transfer_gets_an_error(
    reducer: Reducer, *, sends: bool
) -> None:
    ticket = ticket_of(reducer, 0)
    watched: Queue[Callable[[], object] | None] = Queue()

    def move() -> None:
        if sends:
            send_state(ticket, PackedState([STATE]), lambda *_: None, watched.put)
        else:
            receive_state(ticket, PartialState(), lambda *_: None, watched.put)

    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(move)
        stop = watched.get(timeout=PATIENCE_S)
        assert stop is not None
        stop()

        assert isinstance(call.exception(PATIENCE_S), grpc.RpcError)
    assert watched.get(timeout=PATIENCE_S) is None


BASE = STATE[-3 * PIECE // 2 :]


@pytest.mark.parametrize(
    ("mine", "kept", "coming"),
    [
        (BASE, b"", len(STATE) - len(BASE)),
        (BASE, STATE[:PIECE], len(STATE) - len(BASE) - PIECE),
        (BASE, STATE[:-PIECE], PIECE),
        (b"of another model", b"", len(STATE)),
        (b"", b"", len(STATE)),
    ],
    ids=["the same", "after an interruption", "after most of it came", "another", "none"],
)
def test_a_base_that_the_receiver_holds_does_not_come(
    reducer: Reducer, mine: bytes, kept: bytes, coming: int
) -> None:
    arrived = PartialState()
    if kept:
        arrived.sha256 = hashlib.sha256(STATE).digest()
        arrived.add(kept)
    sent: list[int] = []

    with ThreadPoolExecutor(2) as threads:
        put = threads.submit(
            send_state,
            ticket_of(reducer, 0),
            PackedState([STATE], len(BASE)),
            lambda so_far, _whole: sent.append(so_far),
            lambda _stop: None,
        )
        get = threads.submit(
            receive_state,
            ticket_of(reducer, 1),
            arrived,
            lambda *_: None,
            lambda _stop: None,
            mine,
        )

        assert get.result(PATIENCE_S) == STATE
        put.result(PATIENCE_S)
    assert sent[-1] == len(kept) + coming


def test_a_base_greater_than_its_state_is_refused(ends: Ends) -> None:
    put = ends.put(iter([first(base_bytes=len(STATE) + 1)]))

    code, text = reason(put)
    assert (code, text) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_MESSAGE")
