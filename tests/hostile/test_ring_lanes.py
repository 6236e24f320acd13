"""A ring's TCP lane by hand: a stranger on it gets as far as on gRPC, and the round goes on."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from andon.protocol.messages import EnterRound, RingHeader
from andon.v1 import reducer_pb2, ring_pb2
from andon.wire.frames import frame_pass
from andon_trainer.core.events import AveragesComplete
from hostile.lanes import DOWN, UP, RawLane
from integration.andon_trainer.ring_workers import RingLine
from integration.andon_trainer.test_ring import LAYOUT, PASS, POLICY, SIZES, key, random_blocks
from integration.strangers import Refused
from vectors.lanes import frame, preamble, proof

pytestmark = [pytest.mark.integration, pytest.mark.timeout(110)]


class RawPass:
    """A Pass call that asked for a lane, and what it was offered."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel = grpc.insecure_channel(address)
        self._over: Future[None] = Future()
        method: Any = self._channel.stream_unary(PASS)
        # Initial metadata comes before the answer only from a call that goes on meanwhile.
        self.call: Any = method.future(
            self._nothing(), metadata=(("andon-capabilities", "tcp.v1"),), timeout=60
        )
        told = dict(self.call.initial_metadata())
        self.offer = reducer_pb2.TcpOffer.FromString(told["andon-tcp-bin"])

    def _nothing(self) -> Iterator[bytes]:
        self._over.result()
        yield from ()

    def preamble(self, direction: int = UP, **other: Any) -> bytes:
        nonce = bytes(self.offer.nonce)
        key = other.get("key", nonce)
        return preamble(key, nonce, direction, other.get("run_id", ""), other.get("worker", 0))

    def connect(self) -> RawLane:
        return RawLane(self._address.rpartition(":")[0].strip("[]"), self.offer.port)

    def lane(self) -> RawLane:
        lane = self.connect()
        lane.send(self.preamble())
        nonce = bytes(self.offer.nonce)
        assert lane.read(32) == proof("server", nonce, nonce, UP, "", 0)
        return lane

    def end(self) -> Refused | ring_pb2.PassResponse:
        try:
            answer: bytes = self.call.result(60)
        except grpc.RpcError as error:
            return Refused.of(error)
        return ring_pb2.PassResponse.FromString(answer)

    def close(self) -> None:
        self._over.set_result(None)
        self.call.cancel()
        self._channel.close()


@contextmanager
def passing(address: str) -> Iterator[tuple[RawPass, RawLane]]:
    """A stranger's call with its lane."""
    call = RawPass(address)
    lane = call.lane()
    try:
        yield call, lane
    finally:
        lane.close()
        call.close()


def framed(message: EnterRound | RingHeader) -> bytes:
    """A message of the ring without a payload, as a frame."""
    return frame(frame_pass(message))


def enter(number: int, token: bytes, rank: int = 0) -> bytes:
    return framed(EnterRound(key=key(number), rank=rank, world_size=2, token=token))


@pytest.fixture
def ring() -> Iterator[RingLine]:
    """Two ranks; the second one is in a round, and the first one's part is still to come."""
    with RingLine(LAYOUT, POLICY, 2) as line:
        line.begin(key(5), 1, [0, 1])
        yield line
        first, second = line.workers
        blocks = random_blocks(2, SIZES)
        line.give(key(5), 0, [0, 1], blocks[0], 1.0)
        for block, flat in enumerate(blocks[1]):
            second.exchange.submit(block, flat)
        assert isinstance(first.outcome(key(5)), AveragesComplete), "the round did not go on"


TERMS = framed(RingHeader(key=key(5), rank=0, weight=1.0))
STRANGERS: dict[str, tuple[Callable[[Any], bytes], str]] = {
    "a token of zeros": (lambda _: enter(5, bytes(32)) + TERMS, "TOKEN"),
    "the token for the other link": (lambda ring: enter(5, ring.token) + TERMS, "TOKEN"),
    "another rank": (lambda ring: enter(5, ring.expected_token, 1) + TERMS, "TOKEN"),
    "no entrance": (lambda _: TERMS, "INVALID_MESSAGE"),
    "nonsense": (lambda _: frame(b"\xff\xff"), "INVALID_MESSAGE"),
    "a payload beside an entrance": (
        lambda _: frame(frame_pass(EnterRound(key=key(5), rank=0, world_size=2, token=b"")), b"1"),
        "INVALID_MESSAGE",
    ),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_on_a_lane_is_refused_as_on_grpc(ring: RingLine, name: str) -> None:
    right = ring.assigned(key(5), 1, [0, 1]).ring
    make, reason = STRANGERS[name]

    with passing(ring.workers[1].address) as (call, lane):
        lane.send(make(right))
        end = call.end()

        assert isinstance(end, Refused)
        assert end.reason == reason, end
        assert lane.ended()


def test_an_older_round_on_a_lane_is_answered_with_the_greatest_key(ring: RingLine) -> None:
    with passing(ring.workers[1].address) as (call, lane):
        lane.send(enter(4, bytes(32)))

        end = call.end()

        assert isinstance(end, ring_pb2.PassResponse)
        assert end.greatest.round == 5


def test_a_ring_takes_proofs_of_its_calls_alone_and_only_to_it(ring: RingLine) -> None:
    call = RawPass(ring.workers[1].address)
    wrong = (
        call.preamble(DOWN),
        call.preamble(UP, key=bytes(32)),
        call.preamble(UP, worker=1),
        call.preamble(UP, run_id="run"),
        bytes(64),
    )
    try:
        for each in wrong:
            lane = call.connect()
            lane.send(each)
            assert lane.ended()
            lane.close()
        good = call.lane()
        again = call.connect()
        again.send(call.preamble())
        assert again.ended()
        again.close()
        good.close()
    finally:
        call.close()


def test_frames_that_are_cut_or_too_large_leave_the_round_to_the_right_rank(
    ring: RingLine,
) -> None:
    address = ring.workers[1].address
    whole = enter(5, bytes(32))
    for cut in (0, 1, 7, 8, len(whole) - 1):
        with passing(address) as (_, lane):
            lane.send(whole[:cut])
    for lengths in ((0, 0), (2**16 + 1, 0), (20, 2**32 - 1)):
        with passing(address) as (call, lane):
            lane.send(struct.pack("<II", *lengths) + bytes(20))
            assert isinstance(call.end(), Refused)


def test_the_end_of_a_call_ends_its_lane(ring: RingLine) -> None:
    with passing(ring.workers[1].address) as (call, lane):
        call.call.cancel()

        assert lane.ended()
