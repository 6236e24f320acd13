"""The two ends of a lane of several connections, over real sockets: order, and what is refused."""

from __future__ import annotations

import queue
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from andon.tcp.connection import TcpConnection
from andon.tcp.receiving import FrameReader
from andon.tcp.segments import SEGMENT_BYTES
from andon.tcp.wide_receiving import FRAMES_OPEN, WideReceiver
from andon.tcp.wide_sending import WideSender
from andon.wire.fields import FrameError
from unit.andon.golden import by_name, golden
from vectors.lanes import segment

pytestmark = pytest.mark.integration

MAX_PAYLOAD = 2**22


class Lane:
    """A receiver with so many connections, and the other ends of these."""

    def __init__(self, count: int, stack: ExitStack, **reading: Any) -> None:
        self.frames: queue.SimpleQueue[tuple[bytes, bytes]] = queue.SimpleQueue()
        self.ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        given: dict[str, Any] = {
            "parse": lambda head, size: bytes(head),
            "place": lambda message, size: memoryview(bytearray(size)),
            "received": lambda message, payload, size: self.frames.put((message, bytes(payload))),
            "ended": self.ended.put,
            "max_payload_bytes": MAX_PAYLOAD,
        }
        pairs = [_connected(stack) for _ in range(count)]
        self.theirs = [mine for mine, _ in pairs]
        ends = [TcpConnection(end, 0) for _, end in pairs]
        reader: FrameReader[bytes] = FrameReader(**given | reading)
        self.receiver = WideReceiver(ends[0], reader, "test-in")
        stack.callback(self.receiver.close)
        for end in ends[1:]:
            self.receiver.add(end)

    def sender(self, stack: ExitStack) -> WideSender:
        ends = [TcpConnection(each, 0) for each in self.theirs]
        sender = WideSender(ends[0], pytest.fail, "test-out")
        stack.callback(sender.close)
        for end in ends[1:]:
            sender.add(end)
        return sender

    def next(self) -> tuple[bytes, bytes]:
        return self.frames.get(timeout=30)


def _connected(stack: ExitStack) -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        mine = stack.enter_context(socket.create_connection(listening.getsockname()))
        theirs, _ = listening.accept()
    return mine, theirs


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def given(head: bytes, payload: bytes) -> Callable[[], tuple[bytes, memoryview | None]]:
    return lambda: (head, memoryview(payload) if payload else None)


@pytest.mark.parametrize("used", [1, 5])
def test_frames_arrive_in_order_and_whole_while_the_number_of_connections_changes(
    stack: ExitStack, used: int
) -> None:
    lane = Lane(5, stack)
    sender = lane.sender(stack)
    sizes: queue.SimpleQueue[int] = queue.SimpleQueue()
    numbers = random.Random(3)
    lengths = [0, 1, SEGMENT_BYTES, SEGMENT_BYTES + 1, 5 * SEGMENT_BYTES, *[40] * 20]
    frames = [(b"head %d" % at, numbers.randbytes(size)) for at, size in enumerate(lengths * 2)]

    for at, (head, payload) in enumerate(frames):
        sender.use(3 if at == len(lengths) else used)
        sender.send(given(head, payload), sizes.put)

    assert [lane.next() for _ in frames] == frames
    assert sum(sizes.get(timeout=30) for _ in frames) == sender.sent_bytes
    assert lane.receiver.received_bytes == sender.sent_bytes


@pytest.mark.parametrize("vector", golden("tcp", "segments"), ids=by_name)
def test_segments_of_the_vectors_make_their_frames(
    vector: dict[str, Any], stack: ExitStack
) -> None:
    lane = Lane(2, stack)

    for each in vector["segments"]:
        lane.theirs[each["connection"]].sendall(bytes.fromhex(each["bytes"]))

    assert [b"".join(lane.next()).hex() for _ in vector["frames"]] == vector["frames"]


@pytest.mark.parametrize("vector", golden("tcp", "refused_segments"), ids=by_name)
def test_what_no_sender_of_segments_may_say_ends_the_lane(
    vector: dict[str, Any], stack: ExitStack
) -> None:
    lane = Lane(2, stack)

    lane.theirs[0].sendall(bytes.fromhex(vector["bytes"]))

    assert isinstance(lane.ended.get(timeout=30), FrameError)
    assert lane.theirs[1].recv(1) == b""


def test_a_head_that_comes_on_two_connections_ends_the_lane(stack: ExitStack) -> None:
    lane = Lane(2, stack)

    for each in lane.theirs:
        each.sendall(segment(0, 0, b"1", 2, b"head"))

    assert isinstance(lane.ended.get(timeout=30), FrameError)


def test_the_end_of_all_connections_between_two_segments_is_no_loss(stack: ExitStack) -> None:
    lane = Lane(2, stack)
    lane.theirs[0].shutdown(socket.SHUT_WR)

    lane.theirs[1].sendall(segment(0, 0, b"", 0, b"last"))
    lane.theirs[1].shutdown(socket.SHUT_WR)

    assert lane.next() == (b"last", b"")
    assert lane.ended.get(timeout=30) is None


def test_an_end_in_the_middle_of_a_frame_is_one(stack: ExitStack) -> None:
    lane = Lane(2, stack)
    lane.theirs[0].sendall(segment(0, 0, b"1", 2, b"head"))

    for each in lane.theirs:
        each.shutdown(socket.SHUT_WR)

    assert isinstance(lane.ended.get(timeout=30), ConnectionError)


def test_a_place_is_not_used_for_a_later_batch_before_the_earlier_frame_was_taken(
    stack: ExitStack,
) -> None:
    memory = memoryview(bytearray(4))
    lane = Lane(2, stack, place=lambda message, size: memory, batch=lambda message: message)
    lane.theirs[0].sendall(segment(0, 0, b"ol", 4, b"void"))

    lane.theirs[1].sendall(segment(1, 0, b"new!", 4, b"next"))
    lane.theirs[0].sendall(segment(0, 2, b"d!", 4))

    assert [lane.next() for _ in range(2)] == [(b"void", b"old!"), (b"next", b"new!")]


def test_frames_that_are_not_whole_are_few_however_many_heads_come(stack: ExitStack) -> None:
    placed: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    reading = threading.Event()

    def place(message: bytes, size: int) -> memoryview:
        placed.put(message)
        if placed.qsize() == FRAMES_OPEN:
            reading.set()
        return memoryview(bytearray(size))

    lane = Lane(2, stack, place=place)

    for number in range(2 * FRAMES_OPEN):
        lane.theirs[0].sendall(segment(number, 0, b"", 2, b"head"))

    assert reading.wait(30)
    for number in range(2 * FRAMES_OPEN):
        assert placed.qsize() <= FRAMES_OPEN + number
        lane.theirs[1].sendall(segment(number, 0, b"ab", 2))
        assert lane.next() == (b"head", b"ab")
