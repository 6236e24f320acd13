"""Streams that only listen, at a real reducer: over gRPC, beside shared memory, and on lanes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from andon.host.arena import CAPABILITY as SHARED_MEMORY
from andon.protocol import tokens
from andon.protocol.capabilities import LISTENING
from andon.protocol.messages import (
    Abstain,
    AveragedBlock,
    OpenRound,
    Request,
    Response,
    RoundOpened,
    SharedMemoryMapped,
)
from andon.protocol.records import Key
from andon.tcp.connecting import connect as connect_lanes
from andon.tcp.proof import CAPABILITY as TCP
from andon.tcp.proof import LaneDirection, LaneSession
from andon.tcp.receiving import FrameReader, TcpReceiver
from andon.wire import checksums
from andon.wire.frames import parse_response_head, with_payload
from andon.wire.lane_reports import REDUCER_METHOD, frame_asked, read_report
from andon_reducer.config import ReducerConfig
from integration.harness import wait_until
from integration.reducer_bench import CHUNK, RUN, SECRET, Reducer, Stream, chunks_of, reason_of
from integration.test_reducer_memory import ELEMENTS, Sharing, on_the_wire, slice_of, vector

pytestmark = pytest.mark.integration

CHUNKS = 6
PATIENCE_S = 30
MIB = 2**20


@pytest.fixture
def reducer(tmp_path: Path) -> Iterator[Reducer]:
    with Reducer(ReducerConfig(shared_dir=tmp_path, chunk_elements=CHUNK), lanes=True) as reducer:
        yield reducer


class Listener(Stream):
    """A stream that only listens."""

    def __init__(self, port: int, worker: int, *capabilities: str) -> None:
        super().__init__(port, worker, opened=False)
        self.opening = OpenRound(
            *(RUN, worker, tokens.session_token(SECRET, RUN, worker)),
            (LISTENING, *capabilities),
            listens=True,
        )
        self.send(self.opening)
        opened = self.read()
        assert isinstance(opened, RoundOpened)
        self.opened = opened


class LaneListener(Listener):
    """A stream that listens on TCP lanes."""

    def __init__(self, port: int, worker: int, *, connected: bool = True) -> None:
        super().__init__(port, worker, TCP, checksums.CAPABILITY)
        self.came: queue.SimpleQueue[AveragedBlock] = queue.SimpleQueue()
        self.hears = threading.Event()
        """While it is not set, nothing is read off the lane."""
        self.hears.set()
        if connected:
            self.connect()

    def connect(self) -> None:
        """Opens the lanes, and returns once they are in use."""
        assert self.opened.tcp is not None
        session = LaneSession(self.opening.session_token, RUN, self.worker)
        directions = LaneDirection.CLIENT_SENDS, LaneDirection.CLIENT_RECEIVES
        self.up, down = connect_lanes("127.0.0.1", self.opened.tcp, session, directions)
        reading: FrameReader[Response] = FrameReader(
            parse=parse_response_head,
            place=lambda _, size: memoryview(bytearray(size)),
            received=self._received,
            ended=lambda _: None,
            max_payload_bytes=4 * CHUNK,
        )
        self.receiver = TcpReceiver(down, reading, "test-lane")
        # Proven lanes are not in use before the reducer's loop has them: it says so.
        nonce = frame_asked(self.opened.tcp.nonce)
        ask: Any = self._channel.unary_unary(REDUCER_METHOD)
        wait_until(lambda: read_report(ask(nonce)).reading)

    def __exit__(self, *error: Any) -> None:
        self.receiver.close()
        self.up.end()
        self.up.close()
        super().__exit__(*error)

    def averages(self, count: int) -> dict[int, AveragedBlock]:
        """Reads `count` averages off the lane; returns them by offset."""
        answers = [self.came.get(timeout=PATIENCE_S) for _ in range(count)]
        return {answer.offset: answer for answer in answers}

    def _received(self, message: Response, payload: memoryview, _: int) -> None:
        assert isinstance(message, AveragedBlock)
        self.hears.wait()
        whole = with_payload(message, payload)
        assert isinstance(whole, AveragedBlock)
        self.came.put(whole)


def joined(answers: dict[int, AveragedBlock]) -> bytes:
    return b"".join(answers[offset].payload for offset in sorted(answers))


def train(members: Sequence[Stream], key: Key) -> bytes:
    """One round of members over gRPC; its average."""
    for rank, stream in enumerate(members):
        chunks = chunks_of(rank, vector(rank), key=key, world_size=len(members), weight=rank + 1.0)
        stream.send(*chunks)
    averages = [joined(stream.averages(CHUNKS)) for stream in members]
    assert len(set(averages)) == 1
    return averages[0]


def test_a_listener_hears_what_members_get_from_the_next_round_on(reducer: Reducer) -> None:
    with Stream(reducer.port, 0) as a, Stream(reducer.port, 1) as b:
        first, *rest = chunks_of(0, vector(0), key=Key(1, 1))
        a.send(first)
        wait_until(lambda: reducer.app.inflight_bytes > 0)
        with Listener(reducer.port, 2) as listener:
            a.send(*rest)
            b.send(*chunks_of(1, vector(1), key=Key(1, 1), weight=2.0))
            assert joined(a.averages(CHUNKS)) == joined(b.averages(CHUNKS))

            mean = train([a, b], Key(1, 2))
            for rank, stream in enumerate((a, b)):
                stream.send(Abstain(key=Key(1, 2), rank=rank, world_size=2, sequence=1))
            assert isinstance(a.read(), AveragedBlock)

            heard = listener.averages(CHUNKS)
            empty = listener.read()

    assert listener.opened.capabilities == (LISTENING,)
    assert {answer.key for answer in heard.values()} == {Key(1, 2)}
    assert joined(heard) == mean
    assert isinstance(empty, AveragedBlock)
    assert (empty.sequence, empty.count, empty.contributors) == (1, 0, 0)
    wait_until(lambda: reducer.app.inflight_bytes == 0)


def test_a_lone_member_is_heard(reducer: Reducer) -> None:
    with Listener(reducer.port, 1) as listener, Stream(reducer.port, 0) as alone:
        train([alone], Key(1, 1))

        assert joined(listener.averages(CHUNKS)) == vector(0).tobytes()


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("kind", [Listener, LaneListener])
def test_members_that_share_memory_keep_it_beside_a_listener(
    reducer: Reducer, tmp_path: Path, members: int, kind: type[Listener]
) -> None:
    expected = on_the_wire(reducer, members)
    with ExitStack() as stack:
        sharing = [
            stack.enter_context(Sharing(reducer.port, rank, tmp_path)) for rank in range(members)
        ]
        listener = stack.enter_context(kind(reducer.port, 9))
        # Members go on and write their memory over: what the listener gets late is still right.
        for round_ in (1, 2, 3):
            for rank, stream in enumerate(sharing):
                stream.mine[:] = vector(rank) if round_ == 1 else np.float32(round_)
                gradient = slice_of(
                    rank, 0, ELEMENTS, world_size=members, key=Key(1, round_), generation=round_
                )
                stream.send(gradient)
            means = [stream.in_place(ELEMENTS) for stream in sharing]
            if round_ == 1:
                assert {mean.tobytes() for mean in means} == {expected}

        heard = [joined(listener.averages(CHUNKS)) for _ in range(3)]

    assert heard[0] == expected
    for round_ in (2, 3):
        np.testing.assert_allclose(np.frombuffer(heard[round_ - 1], np.float32), round_, rtol=1e-6)
    assert reducer.metric("andon_exchange_bytes_total", direction="down", path="shared-memory") > 0


def test_a_listener_gets_no_shared_memory_though_it_asks(reducer: Reducer) -> None:
    with Listener(reducer.port, 0, SHARED_MEMORY) as listener:
        assert listener.opened.capabilities == (LISTENING,)
        assert listener.opened.averages is None


def test_a_listener_on_lanes_hears_on_them_with_checksums(reducer: Reducer) -> None:
    with (
        LaneListener(reducer.port, 2) as listener,
        Stream(reducer.port, 0) as a,
        Stream(reducer.port, 1) as b,
    ):
        means = [train([a, b], Key(1, round_)) for round_ in (1, 2)]

        heard = [listener.averages(CHUNKS) for _ in means]

        def all_counted() -> bool:
            tcp = reducer.metric("andon_exchange_bytes_total", direction="down", path="tcp")
            return tcp > 2 * 4 * ELEMENTS

        # Counted once the kernel has an average, by when the listener may have it.
        wait_until(all_counted)

    assert [joined(each) for each in heard] == means
    assert all(checksums.is_intact(block) for each in heard for block in each.values())


def test_a_listener_hears_over_the_call_until_its_lanes_are_proven(reducer: Reducer) -> None:
    with (
        LaneListener(reducer.port, 1, connected=False) as listener,
        Stream(reducer.port, 0) as alone,
    ):
        train([alone], Key(1, 1))
        over_call = Stream.averages(listener, CHUNKS)
        listener.connect()
        train([alone], Key(1, 2))

        assert joined(over_call) == joined(listener.averages(CHUNKS)) == vector(0).tobytes()


def test_a_listener_whose_lanes_end_has_ended_and_nobody_else(reducer: Reducer) -> None:
    with Stream(reducer.port, 0) as alone:
        with LaneListener(reducer.port, 1) as listener:
            train([alone], Key(1, 1))
            listener.averages(CHUNKS)
            listener.up.end()

            assert list(listener.call) == []
        train([alone], Key(1, 2))


@pytest.mark.parametrize("kind", [Listener, LaneListener])
def test_a_listener_that_does_not_read_is_cut_off_and_disturbs_nobody(kind: type[Listener]) -> None:
    config = ReducerConfig(chunk_elements=CHUNK, window_bytes=2 * MIB, listener_bytes=4 * MIB)
    with Reducer(config, lanes=True) as reducer, ExitStack() as stack:
        deaf = stack.enter_context(kind(reducer.port, 8))
        if isinstance(deaf, LaneListener):
            stack.callback(deaf.hears.set)
            deaf.hears.clear()
        hearing = stack.enter_context(Listener(reducer.port, 9))
        members = [stack.enter_context(Stream(reducer.port, rank)) for rank in (0, 1)]
        refusals = {"service": "reducer", "reason": "peer_gone"}

        rounds = 0
        while reducer.registry.get_sample_value("andon_refusals_total", refusals) == 0:
            rounds += 1
            assert rounds < 200, "it is never cut off"
            mean = train(members, Key(1, rounds))
            assert joined(hearing.averages(CHUNKS)) == mean
            assert reducer.app.inflight_bytes < 12 * MIB

        train(members, Key(1, rounds + 1))
        assert reducer.metric("andon_reducer_streams") == 3
        assert reason_of(deaf.error()) == (grpc.StatusCode.ABORTED, "PEER_GONE")
        wait_until(lambda: reducer.app.inflight_bytes == 0)


@pytest.mark.parametrize("message", ["gradient", "abstain", "mapped"])
def test_what_a_listener_brings_ends_it_alone(reducer: Reducer, message: str) -> None:
    with Listener(reducer.port, 1) as listener, Stream(reducer.port, 0) as alone:
        [gradient] = chunks_of(0, vector(0)[:CHUNK], key=Key(1, 1), world_size=1)
        messages: dict[str, Request] = {
            "gradient": gradient,
            "abstain": Abstain(key=Key(1, 1), rank=0, world_size=1),
            "mapped": SharedMemoryMapped(b"", b""),
        }
        listener.send(messages[message])

        assert reason_of(listener.error()) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_MESSAGE",
        )
        train([alone], Key(1, 1))


def test_to_listen_needs_the_capability(reducer: Reducer) -> None:
    with Stream(reducer.port, 0, opened=False) as stream:
        stream.send(OpenRound(RUN, 0, tokens.session_token(SECRET, RUN, 0), listens=True))

        error = stream.error()

    assert reason_of(error) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_MESSAGE")
    assert LISTENING in str(error)
