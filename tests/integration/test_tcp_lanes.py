"""TCP lanes over real sockets: frames in order, proofs, limits, both ends of a connection."""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

import pytest

from andon.host.tls import ServerIdentity
from andon.protocol.messages import TcpOffer
from andon.tcp.connecting import TcpUnavailable, connect
from andon.tcp.connection import TcpConnection
from andon.tcp.framing import Frame, prefixed
from andon.tcp.listening import MAX_UNPROVEN, OpenOffer, TcpListener
from andon.tcp.proof import LaneDirection, LaneSession
from andon.tcp.receiving import FrameReader, TcpReceiver
from andon.tcp.sending import TcpSender
from unit.andon.certificates import certify

SENDS, RECEIVES = LaneDirection
SESSION = LaneSession(b"token" * 8, "7f3a", 1)
MAX_PAYLOAD = 2**20


class Joining(NamedTuple):
    """A listener, an offer of it, and what joined."""

    listener: TcpListener
    offer: OpenOffer
    joined: queue.SimpleQueue[tuple[LaneDirection, TcpConnection]]


@pytest.fixture
def joining() -> Iterator[Joining]:
    with ExitStack() as stack:
        listener = TcpListener("127.0.0.1")
        stack.callback(listener.close)
        yield offered(listener, stack)


def offered(listener: TcpListener, stack: ExitStack) -> Joining:
    joined: queue.SimpleQueue[tuple[LaneDirection, TcpConnection]] = queue.SimpleQueue()

    def take(direction: LaneDirection, connection: TcpConnection) -> None:
        stack.callback(connection.close)
        joined.put((direction, connection))

    offer = listener.offer(SESSION, take)
    assert offer is not None
    return Joining(listener, offer, joined)


class Received:
    """The messages of a receiver: its heads and payloads, and how it ended."""

    def __init__(self, connection: TcpConnection, stack: ExitStack) -> None:
        self.frames: queue.SimpleQueue[tuple[bytes, bytes]] = queue.SimpleQueue()
        self.ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        reading: FrameReader[bytes] = FrameReader(
            parse=lambda head, size: bytes(head),
            place=lambda message, size: memoryview(bytearray(size)),
            received=lambda message, payload, size: self.frames.put((message, bytes(payload))),
            ended=self.ended.put,
            max_payload_bytes=MAX_PAYLOAD,
        )
        self.receiver = TcpReceiver(connection, reading, "test-in")
        stack.callback(self.receiver.close)


def given(head: bytes, payload: bytes | None) -> Callable[[], Frame]:
    return lambda: (head, None if payload is None else memoryview(payload))


def raw_connection(joining: Joining, stack: ExitStack) -> socket.socket:
    """A connection that has sent nothing."""
    raw = socket.create_connection(("127.0.0.1", joining.listener.port), timeout=30)
    return stack.enter_context(closing(raw))


def test_only_bytes_of_frames_are_counted_however_early_they_came_and_to_the_end() -> None:
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        theirs = stack.enter_context(socket.create_connection(listening.getsockname()))
        mine, _ = listening.accept()
        theirs.sendall(b"proof" + b"frame")
        assert mine.recv(5) == b"proof"

        connection = TcpConnection(mine, 5)
        stack.callback(connection.close)

        assert connection.receive_into(memoryview(bytearray(5)))
        assert connection.received_bytes == 5
        theirs.shutdown(socket.SHUT_WR)
        assert not connection.receive_into(memoryview(bytearray(1)), may_end=True)
        assert connection.received_bytes == 5


def joining_with(certificates: Path | None, stack: ExitStack) -> tuple[Path | None, Joining]:
    """What a client has its certificates in, and what it is offered; both ends encrypt, or none."""
    tls, identity = None, None
    if certificates is not None:
        ca = certificates / "ca"
        tls = certify(ca, certificates / "client", "127.0.0.1")
        identity = ServerIdentity(certify(ca, certificates / "server", "127.0.0.1"))
    listener = TcpListener("127.0.0.1", identity=identity)
    stack.callback(listener.close)
    return tls, offered(listener, stack)


@pytest.mark.parametrize("encrypted", [False, True])
def test_frames_arrive_in_order_and_whole(tmp_path: Path, encrypted: bool) -> None:
    with ExitStack() as stack:
        tls, joining = joining_with(tmp_path if encrypted else None, stack)
        mine = connect("127.0.0.1", joining.offer.message, SESSION, (SENDS, RECEIVES), tls=tls)
        theirs = dict(joining.joined.get(timeout=30) for _ in range(2))
        frames: list[tuple[bytes, bytes]] = [
            (b"small", b""),
            (b"large", bytes(range(256)) * 2**12),
            (b"odd", b"\1\2\3"),
        ]

        for sending, receiving in ((mine[0], theirs[SENDS]), (theirs[RECEIVES], mine[1])):
            received = Received(receiving, stack)
            sender = TcpSender(sending, lost=pytest.fail, name="test-out")
            stack.callback(sender.close)
            sizes: queue.SimpleQueue[int] = queue.SimpleQueue()
            for head, payload in frames:
                sender.send(given(head, payload or None), sizes.put)
            sender.finish()

            assert [received.frames.get(timeout=30) for _ in frames] == frames
            assert [sizes.get(timeout=30) for _ in frames] == [
                8 + len(head) + len(payload) for head, payload in frames
            ]
            assert (
                received.receiver.received_bytes
                == sender.sent_bytes
                == sum(8 + len(head) + len(payload) for head, payload in frames)
            )
            assert received.ended.get(timeout=30) is None


def test_a_standing_offer_waits_longer_than_others_and_is_taken_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nonce = bytes(range(32))
    with ExitStack() as stack:
        listener = TcpListener("127.0.0.1")
        stack.callback(listener.close)
        joined: queue.SimpleQueue[TcpConnection] = queue.SimpleQueue()
        offer = listener.offer(SESSION, lambda _, lane: joined.put(lane), nonce=nonce)
        passing = listener.offer(SESSION, lambda _, lane: joined.put(lane))
        assert offer is not None
        assert passing is not None
        later = time.monotonic() + 1000
        monkeypatch.setattr("andon.tcp.listening.time.monotonic", lambda: later)
        message = TcpOffer(listener.port, nonce)

        with pytest.raises(TcpUnavailable):
            connect("127.0.0.1", passing.message, SESSION, (SENDS,))
        (mine,) = connect("127.0.0.1", message, SESSION, (SENDS,))
        stack.callback(mine.close)
        stack.callback(joined.get(timeout=30).close)
        with pytest.raises(TcpUnavailable):
            connect("127.0.0.1", message, SESSION, (SENDS,))


@pytest.mark.parametrize("encrypted", [False, True])
def test_views_arrive_as_one_payload_and_some_bytes_leave_at_once(
    tmp_path: Path, encrypted: bool
) -> None:
    with ExitStack() as stack:
        tls, joining = joining_with(tmp_path if encrypted else None, stack)
        (mine,) = connect("127.0.0.1", joining.offer.message, SESSION, (SENDS,), tls=tls)
        stack.callback(mine.close)
        _, theirs = joining.joined.get(timeout=30)
        received = Received(theirs, stack)
        views = [memoryview(bytes([n % 251]) * (n % 7)) for n in range(1500)]
        whole = b"".join(views)

        mine.send_views(prefixed(b"many", len(whole)), views)
        small = prefixed(b"small", None)
        sent = mine.send_at_once(small)
        assert sent == (0 if encrypted else len(small))
        mine.send_rest(memoryview(small)[sent:])
        mine.send_views(prefixed(b"one", 3), [memoryview(b"abc")])

        found = [received.frames.get(timeout=30) for _ in range(3)]
        assert found == [(b"many", whole), (b"small", b""), (b"one", b"abc")]


def test_a_client_without_a_certificate_gets_no_lane(tmp_path: Path) -> None:
    ca = tmp_path / "ca"
    identity = ServerIdentity(certify(ca, tmp_path / "server", "127.0.0.1"))
    trusts_only = tmp_path / "client"
    trusts_only.mkdir()
    (trusts_only / "ca.crt").write_bytes((tmp_path / "server" / "ca.crt").read_bytes())
    with ExitStack() as stack:
        listener = TcpListener("127.0.0.1", identity=identity)
        stack.callback(listener.close)
        joining = offered(listener, stack)

        for tls in (trusts_only, None):
            with pytest.raises(TcpUnavailable):
                connect("127.0.0.1", joining.offer.message, SESSION, (SENDS,), tls=tls)

        assert joining.joined.empty()


def test_a_wrong_key_opens_nothing(joining: Joining) -> None:
    thief = LaneSession(b"guess" * 8, "7f3a", 1)

    with pytest.raises(TcpUnavailable, match="closed the connection instead of answering"):
        connect("127.0.0.1", joining.offer.message, thief, (SENDS,))

    assert joining.joined.empty()


def test_a_client_leaves_a_listener_that_can_not_answer_the_proof() -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor, ExitStack() as stack:
        joining = offered(listener := TcpListener("127.0.0.1"), stack)
        stack.callback(listener.close)
        offer = joining.offer.message
        wrong = type(offer)(impostor.getsockname()[1], offer.nonce)

        # It accepts, as the kernel does, and says nothing.
        with pytest.raises(TcpUnavailable, match=r"did not answer within 0\.2 s"):
            connect("127.0.0.1", wrong, SESSION, (SENDS,), within_s=0.2)


def test_an_error_that_nobody_expected_costs_one_connection(
    joining: Joining, caplog: pytest.LogCaptureFixture
) -> None:
    def full(direction: LaneDirection, connection: TcpConnection) -> None:
        raise RuntimeError("can't start new thread")

    unlucky = joining.listener.offer(SESSION, full)
    assert unlucky is not None

    (dead,) = connect("127.0.0.1", unlucky.message, SESSION, (SENDS,))
    assert not dead.receive_into(memoryview(bytearray(1)), may_end=True)  # Closed, and not kept.
    dead.close()

    (alive,) = connect("127.0.0.1", joining.offer.message, SESSION, (SENDS,))
    assert joining.joined.get(timeout=30)[0] is SENDS
    alive.close()
    assert [each.exc_info for each in caplog.records if "was not taken" in each.getMessage()]


def test_a_listener_that_can_not_go_on_offers_nothing(
    joining: Joining, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(timeout: float | None) -> None:
        raise ValueError("the selector is gone")

    monkeypatch.setattr(joining.listener._selector, "select", broken)
    with ExitStack() as stack:
        raw_connection(joining, stack)  # Wakes it.
        joining.listener._thread.join(30)

        assert joining.listener.offer(SESSION, lambda *_: None) is None


def test_the_silent_connections_of_one_host_push_out_its_own(joining: Joining) -> None:
    with ExitStack() as stack:
        other = socket.create_connection(
            ("127.0.0.1", joining.listener.port), source_address=("127.0.0.2", 0)
        )
        stack.callback(other.close)
        silent = [raw_connection(joining, stack) for _ in range(MAX_UNPROVEN)]

        assert silent[0].recv(1) == b""  # Its host has most of them.
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.recv(1)


def test_closing_frees_a_thread_that_waits_for_a_peer_that_does_not_read(joining: Joining) -> None:
    (mine,) = connect("127.0.0.1", joining.offer.message, SESSION, (SENDS,))
    joining.joined.get(timeout=30)
    sender = TcpSender(mine, pytest.fail, "test-out")
    began = queue.SimpleQueue[None]()

    def made() -> Frame:
        began.put(None)
        return b"h", memoryview(bytes(MAX_PAYLOAD))

    for _ in range(64):
        sender.send(made)
    began.get(timeout=30)
    at = time.monotonic()
    sender.close()

    assert time.monotonic() - at < 30
