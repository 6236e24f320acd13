"""A lane between ranks by hand: what a peer must not send ends the session, and names that peer.

Rank 0 is real, and in a call; rank 1 is a socket. A stranger without the token gets nowhere, and
the session goes on.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from andon.protocol.peer_calls import MAX_AHEAD, CallKind
from andon.protocol.sessions import Peer, SessionEnd
from andon.tcp.listening import TcpListener
from andon.v1 import session_pb2 as pb
from andon_trainer.core.peer_plan import Places
from andon_trainer.peers.collective import OpenCall, PeerGroup
from andon_trainer.peers.session import Peers
from andon_trainer.peers.testing import FakeSession, RankSeat, formed_for
from hostile.lanes import DOWN, UP, RawLane
from unit.andon_trainer.call_cases import collective
from vectors.lanes import frame, preamble, proof

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]

COUNT = 50_000
"""Elements of the call that rank 0 is in: rank 1 gives half of them in each of two stages."""
SIZE = 4 * COUNT


@dataclass
class Seat:
    """Rank 0, and what rank 1 knows of it."""

    session: FakeSession
    peers: Peers
    group: PeerGroup
    call: OpenCall
    there: Peer
    port: int

    def lane(self) -> RawLane:
        """Rank 1's lane to rank 0."""
        lane = self.connect()
        lane.send(self.preamble())
        token = self.there.token_from
        assert lane.read(32) == proof("server", token, nonce_of(token), UP, "", 0)
        return lane

    def connect(self) -> RawLane:
        return RawLane("127.0.0.1", self.port)

    def preamble(self, direction: int = UP, token: bytes | None = None) -> bytes:
        token = self.there.token_from if token is None else token
        return preamble(token, nonce_of(token), direction, "", 0)

    def ended(self) -> tuple[SessionEnd, int | None, str]:
        """How the session ended, and who is accused of what."""
        until = time.monotonic() + 20
        while self.session.over is None and time.monotonic() < until:
            time.sleep(0.005)
        over = self.session.over
        assert over is not None, "the session goes on"
        return over.end, over.culprit, over.message


def nonce_of(token: bytes) -> bytes:
    return hashlib.sha256(b"andon.peer.nonce.v1\0" + token).digest()


@pytest.fixture
def seat() -> Iterator[Seat]:
    listener, nobody = TcpListener("127.0.0.1"), TcpListener("127.0.0.1")
    session = FakeSession()
    addresses = [f"127.0.0.1:{each.port}" for each in (listener, nobody)]
    formed = formed_for(0, addresses, capabilities=frozenset())
    # Takes rank 0's lane, and answers nothing.
    other = formed_for(1, addresses, capabilities=frozenset())
    there = Peers(RankSeat(FakeSession(), 1, other), nobody)
    peers = Peers(RankSeat(session, 0, formed), listener)
    group = peers.group("default", [0, 1])
    case = collective(CallKind.ALL_REDUCE, Places(((0,), (1,))), [COUNT])
    call = group.begin(case.works[0])
    yield Seat(session, peers, group, call, formed.peers[1], listener.port)
    assert not call.done() or session.over is not None, "a forged frame completed a call"
    peers.close()
    there.close()
    listener.close()
    nobody.close()


def begin(group: int, sequence: int = 0, **other: Any) -> bytes:
    """A Begin of the call that rank 0 is in."""
    fields: dict[str, Any] = {"rank": 1, "gives_bytes": SIZE}
    call = pb.Call(
        kind=pb.CALL_KIND_ALL_REDUCE, dtype="float32", count=COUNT, reduction="sum", tensors=1
    )
    for name, value in other.items():
        if name in pb.Call.DESCRIPTOR.fields_by_name:
            setattr(call, name, value)
        else:
            fields[name] = value
    message = pb.PeerFrame(group=group, sequence=sequence)
    message.begin.CopyFrom(pb.Begin(call=call, **fields))
    return frame(message.SerializeToString())


def piece(
    group: int,
    offset: int,
    data: bytes,
    stage: int = 0,
    sequence: int = 0,
    length: int | None = None,
) -> bytes:
    message = pb.PeerFrame(group=group, sequence=sequence)
    size = len(data) if length is None else length
    message.piece.CopyFrom(pb.Piece(stage=stage, offset=offset, length=size))
    return frame(message.SerializeToString(), data)


def bare(group: int) -> bytes:
    return frame(pb.PeerFrame(group=group).SerializeToString())


def prefix(head: int, payload: int) -> bytes:
    return struct.pack("<II", head, payload)


HALF = SIZE // 2
Forged = Callable[[int], bytes]
CORRUPT: dict[str, Forged] = {
    "nonsense": lambda g: frame(b"\xff\xff\xff"),
    "an empty head": lambda g: prefix(0, 0),
    "a head that is too long": lambda g: prefix(2**17, 0),
    "a payload that is too long": lambda g: prefix(10, 2**22 + 1),
    "no case": lambda g: bare(g),
    "a case of the future": lambda g: frame(b"\x09" + bytes(8) + b"\x3a\x00"),
    "a kind of the future": lambda g: begin(g, kind=99),
    "no kind": lambda g: begin(g, kind=0),
    "text that is not UTF-8": lambda g: frame(b"\x1a\x04\x0a\x02\x12\xff"),
    "a type without an end": lambda g: begin(g, dtype="x" * 1000),
    "a Begin with a payload": lambda g: frame(begin(g)[8:], b"1234"),
    "a Begin of another rank": lambda g: begin(g, rank=0),
    "two Begins of one call": lambda g: begin(g) + begin(g),
    "a piece before its Begin": lambda g: piece(g, 0, bytes(64)),
    "a piece of an unknown call": lambda g: begin(g) + piece(g, 0, bytes(64), sequence=7),
    "a piece beyond its end": lambda g: begin(g) + piece(g, 0, bytes(HALF + 64)),
    "a piece that is not the next one": lambda g: begin(g) + piece(g, 64, bytes(64)),
    "a piece that came before": lambda g: begin(g) + 2 * piece(g, 0, bytes(64)),
    "a piece of a stage that is not there": lambda g: begin(g) + piece(g, 0, bytes(64), stage=9),
    "a piece that says another length": lambda g: begin(g) + piece(g, 0, bytes(64), length=60),
    "a piece of nothing": lambda g: begin(g) + piece(g, 0, b""),
    "a large piece of a later call": (
        lambda g: begin(g) + begin(g, 1) + piece(g, 0, bytes(2**17), sequence=1)
    ),
    "too many calls ahead": lambda g: (
        begin(g) + b"".join(begin(g, n + 1) for n in range(MAX_AHEAD + 1))
    ),
    "a SEND among collectives": lambda g: begin(g, kind=10, reduction=""),
    "pieces of many strange groups": lambda g: b"".join(
        begin(n, kind=9, dtype="", reduction="", count=0, gives_bytes=0) for n in range(1100)
    ),
    "much for strange groups": lambda g: b"".join(
        begin(n, kind=7, root=1, reduction="", gives_bytes=2**16) + piece(n, 0, bytes(2**16))
        for n in range(1, 1020)
    ),
    "a Begin after the end": lambda g: (
        frame(pb.PeerFrame(lane_end=pb.LaneEnd()).SerializeToString()) + begin(g)
    ),
}


@pytest.mark.parametrize("name", CORRUPT)
def test_a_forged_frame_ends_the_session_and_names_its_sender(seat: Seat, name: str) -> None:
    lane = seat.lane()
    lane.send(CORRUPT[name](seat.group.lanes.collectives.group))

    end, culprit, message = seat.ended()

    left_first = name == "a Begin after the end"
    assert end is (SessionEnd.RANK_LEFT if left_first else SessionEnd.CORRUPT), message
    assert culprit == 1
    lane.close()


DIFFERENT: dict[str, dict[str, Any]] = {
    "another count": {"count": COUNT + 1},
    "another type": {"dtype": "int32"},
    "another reduction": {"reduction": "max"},
    "another kind": {"kind": 2, "root": 1},
    "fewer bytes": {"gives_bytes": 64},
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_another_call_ends_the_session_with_both(seat: Seat, name: str) -> None:
    lane = seat.lane()
    lane.send(begin(seat.group.lanes.collectives.group, **DIFFERENT[name]))

    end, culprit, message = seat.ended()

    assert (end, culprit) == (SessionEnd.CALLS_DIFFER, 1), message
    fault = seat.session.faults[0][1]
    assert fault.call is not None
    assert fault.other_call is not None
    lane.close()


def test_a_frame_without_a_checksum_or_with_a_wrong_one_is_corrupt() -> None:
    for crc32c in (None, 1):
        listener = TcpListener("127.0.0.1")
        session = FakeSession()
        formed = formed_for(0, [f"127.0.0.1:{listener.port}"] * 2)
        peers = Peers(RankSeat(session, 0, formed), listener)
        lane = RawLane("127.0.0.1", listener.port)
        token = formed.peers[1].token_from
        lane.send(preamble(token, nonce_of(token), UP, "", 0))
        lane.read(32)
        message = pb.PeerFrame(lane_end=pb.LaneEnd())
        if crc32c is not None:
            message.crc32c = crc32c
        lane.send(frame(message.SerializeToString()))
        until = time.monotonic() + 20
        while session.over is None and time.monotonic() < until:
            time.sleep(0.005)

        assert session.over is not None
        assert (session.over.end, session.over.culprit) == (SessionEnd.CORRUPT, 1)
        peers.close()
        listener.close()
        lane.close()


STRANGERS: dict[str, Callable[[Seat], bytes]] = {
    "another token": lambda seat: seat.preamble(token=bytes(32)),
    "the token of the other direction": lambda seat: seat.preamble(token=seat.there.token_to),
    "the direction that no rank opens": lambda seat: seat.preamble(DOWN),
    "a proof that is cut": lambda seat: seat.preamble()[:-1] + b"\0",
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_opens_no_lane_and_the_session_goes_on(seat: Seat, name: str) -> None:
    lane = seat.connect()
    lane.send(STRANGERS[name](seat))

    assert lane.ended()
    assert seat.session.over is None
    lane.close()


def test_a_preamble_that_is_sent_again_opens_nothing(seat: Seat) -> None:
    first, second = seat.lane(), seat.connect()
    second.send(seat.preamble())

    assert second.ended()
    assert seat.session.over is None
    first.close()
    second.close()


def test_a_token_is_an_hmac_of_the_pair_and_the_session(seat: Seat) -> None:
    text = b"andon.peer.v1\0" + struct.pack("<QQII", 3, 1, 1, 0) + b"tests"

    token = hmac.digest(b"secret of tests, 16 bytes or more", text, "sha256")

    assert token == seat.there.token_from
