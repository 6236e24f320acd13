"""The target `passing`: what hostile neighbours say to a rank of a ring, into its real station.

The bytes are messages on four streams, over calls or lanes. One neighbour may hold the right token:
the seeds are whole sessions of a right one. Whatever is said, nothing raises, an exchange has one
outcome, averages that are announced are finite, and the round after it has the defined means.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np

from andon.protocol.limits import MAX_PAYLOAD_BYTES
from andon.protocol.messages import PassMessage, RingChunk
from andon.protocol.reasons import Reason
from andon.protocol.records import Key
from andon.protocol.run_settings import Policy
from andon.tcp.framing import PREFIX_BYTES, prefixed, read_prefix
from andon.wire.fields import FrameError
from andon.wire.frames import parse_pass, parse_pass_head, with_payload
from andon_trainer.core.calls import Call
from andon_trainer.core.events import AveragesComplete, ExchangeFailed, Neighbours
from andon_trainer.core.ring_landing import PIECE_BYTES, Arrived, Carrier, MeanLanding
from andon_trainer.core.ring_round import RingRound
from andon_trainer.exchange.path import Inbox
from andon_trainer.exchange.ring.incoming import Incoming, PassEnded, PassReceived
from andon_trainer.exchange.ring.link import MakePass, RingLink
from andon_trainer.exchange.ring.station import RingStation
from unit.andon_trainer.ring_bench import Floats, assigned_to, expected_means, layout_of

__all__ = ["GIVES", "ON_LANE", "sessions", "taken_by_a_rank"]

ON_LANE, GIVES, NEXT_ROUND, ENDS, UNCHECKED = 4, 8, 16, 32, 64
"""Bits of a message's command: it comes over a lane; before it this rank gives a block, or goes on
to its next round; after it the stream ends. The two lowest bits are the stream's number. In the
first message, the last one says that this rank makes no checksums, and asks for none."""

_SIZES = (5, 3)
_POLICY = Policy(chunk_elements=2)
_LAYOUT = layout_of(_SIZES)
_TOKENS = (b"\1" * 32, b"\2" * 32)
"""That of each rank's link to the other one, in each round but the last."""
_UNKNOWN = (b"\3" * 32, b"\4" * 32)
"""Those of the last round: a round's tokens are good for no other one."""
_BLOCKS: list[list[Floats]] = [
    [np.arange(size, dtype=np.float32) * scale + 1 for size in _SIZES] for scale in (0.5, -2.0)
]
_MOST_HELD = 2**20


class _Link:
    """The link to the next rank: makes each message at once, and keeps it."""

    def __init__(self, address: str, sent: deque[bytes], carrier: Carrier) -> None:
        self.address, self.alive = address, True
        self._sent, self._carrier = sent, carrier

    def send(self, make: MakePass) -> None:
        frame = make(self._carrier) if self.alive else None
        if frame is None:
            self.alive = False
        elif self._carrier is Carrier.LANE:
            payload = b"" if frame[1] is None else bytes(frame[1])
            self._sent.append(prefixed(*frame) + payload)
        else:
            self._sent.append(frame[0])

    def close(self) -> None:
        self.alive = False


class _Rank:
    """One rank of two: its station, and the streams to it."""

    def __init__(self, rank: int, carrier: Carrier = Carrier.CALL, *, checked: bool = True) -> None:
        self._checked = checked
        self.rank, self.number, self.tokens = rank, 0, _TOKENS
        self.sent: deque[bytes] = deque()
        self.inbox = Inbox()
        self.averages: list[Floats] = []
        self._given = 0
        self._later: deque[Callable[[], None]] = deque()
        self._ended: dict[Key, AveragesComplete | ExchangeFailed] = {}
        self._streams = [Incoming() for _ in range(4)]
        self._room = memoryview(bytearray(PIECE_BYTES))

        def connect(address: str) -> RingLink:
            return cast("RingLink", _Link(address, self.sent, carrier))

        self._station = RingStation(self.inbox, connect, self._later.append)

    @property
    def key(self) -> Key:
        return Key(7 << 32, self.number)

    def begin(self) -> None:
        """The next round; what was open is void."""
        self._station.end(self.key)
        for number, stream in enumerate(self._streams):
            if stream._over:
                self._end(number)
        self.number += 1
        self._given = 0
        # New ones: they hold something finite if a round announces what it has not received.
        self.averages = [np.full(size, np.nan, dtype=np.float32) for size in _SIZES]
        other = 1 - self.rank
        ring = Neighbours(
            address=f"rank-{other}:1",
            token=self.tokens[self.rank],
            expected_token=self.tokens[other],
        )
        assigned = replace(assigned_to(self.rank, 2, self.key), ring=ring)
        call = Call(name="line.backward", blocks=range(len(_SIZES)))
        round_ = RingRound(
            assigned, 1.0, call, _LAYOUT, _POLICY, self.averages, checked=self._checked
        )
        self._station.begin(round_)
        self._settle()

    def give(self) -> None:
        """The next block of its own, if one is left."""
        block, self._given = self._given, self._given + 1
        if block < len(_SIZES):
            flat = _BLOCKS[self.rank][block].copy()
            given = functools.partial(RingRound.submit, block=block, flat=flat, keeps_loss=False)
            self._station.act(self.key, given)
            self._settle()

    def take(self, command: int, data: bytes) -> None:
        """What one neighbour says next."""
        if command & GIVES:
            self.give()
        if command & NEXT_ROUND:
            self.begin()
        stream = self._streams[command & 3]
        try:
            arrived = (self._over_lane if command & ON_LANE else self._over_call)(stream, data)
            if arrived is not None:
                self._station.take(PassReceived(stream, arrived))
        except FrameError as error:
            stream.refuse(Reason.INVALID_MESSAGE, str(error))
            command |= ENDS
        if command & ENDS or stream._over:
            self._end(command & 3)
        self._settle()

    def _end(self, number: int) -> None:
        """A stream brings no more, and its neighbour opens another."""
        self._station.take(PassEnded(self._streams[number], "it ended"))
        self._streams[number] = Incoming()

    def _over_call(self, stream: Incoming, data: bytes) -> Arrived | None:
        message = parse_pass(data)
        return Arrived(message, data, len(data)) if self._holds(stream, len(data)) else None

    def _over_lane(self, stream: Incoming, data: bytes) -> Arrived | None:
        """As the thread that reads a lane does it."""
        if len(data) < PREFIX_BYTES:
            return None
        head_bytes, payload_bytes = read_prefix(data[:PREFIX_BYTES], MAX_PAYLOAD_BYTES)
        head = data[PREFIX_BYTES : PREFIX_BYTES + head_bytes]
        payload = memoryview(data)[PREFIX_BYTES + head_bytes :][:payload_bytes]
        if len(head) < head_bytes:
            return None
        message: PassMessage = parse_pass_head(memoryview(head), payload_bytes)
        held = payload_bytes or len(data)
        if len(payload) < payload_bytes or not self._holds(stream, held):
            return None
        landings = stream.landings
        landing = None if landings is None or not payload_bytes else landings.take(message)
        if landing is not None:
            at = 0
            for view in landing.pieces(self._room):
                view[:] = payload[at : at + view.nbytes]
                at += view.nbytes
            payload = memoryview(b"")
        if isinstance(landing, MeanLanding):
            payload = landing.place.view(np.uint8).data
        if isinstance(message, RingChunk):
            message = with_payload(message, payload)
        return Arrived(message, head, held, Carrier.LANE, landing)

    @staticmethod
    def _holds(stream: Incoming, size: int) -> bool:
        return stream._held_bytes + size < _MOST_HELD and stream.hold(size)

    def _settle(self) -> None:
        while self._later:
            self._later.popleft()()
        while (event := self.inbox.take(0)) is not None:
            self._judge(event)
        assert all(each._held_bytes >= 0 for each in self._streams), "room was given back twice"

    def _judge(self, event: Any) -> None:
        assert isinstance(event, AveragesComplete | ExchangeFailed), event
        before = self._ended.get(event.key)
        # What a neighbour says after the averages are here fails nothing: they are held.
        late = isinstance(before, AveragesComplete) and isinstance(event, ExchangeFailed)
        assert before is None or late, "an exchange had two outcomes"
        if late:
            return
        self._ended[event.key] = event
        if isinstance(event, AveragesComplete) and event.key == self.key:
            assert event.world_size == 2
            assert all(np.isfinite(each).all() for each in self.averages)

    @property
    def outcome(self) -> AveragesComplete | ExchangeFailed | None:
        """Of the present round."""
        return self._ended.get(self.key)


def taken_by_a_rank(messages: Iterator[tuple[int, bytes]]) -> None:
    """All that is said to one rank, and then a round with a right neighbour."""
    said = list(messages)
    checked = not (said and said[0][0] & UNCHECKED)
    rank, other = _Rank(1, checked=checked), _Rank(0, checked=checked)
    rank.begin()
    for command, data in said:
        rank.take(command, data)
    other.number, other.tokens, rank.tokens = rank.number, _UNKNOWN, _UNKNOWN
    rank.sent.clear()
    for _ in _exchanged(other, rank):
        pass
    assert isinstance(rank.outcome, AveragesComplete), rank.outcome
    means = expected_means(_BLOCKS, [1.0, 1.0], _POLICY)
    for mean, average in zip(means, rank.averages, strict=True):
        assert average.tobytes() == mean.tobytes()


def _exchanged(first: _Rank, second: _Rank, command: int = 3) -> Iterator[bytes]:
    """A round of two right ranks; what the first one says. Both have sent what is not read."""
    for each in (first, second):
        each.begin()
        for _ in _SIZES:
            each.give()
    while first.sent or second.sent:
        if first.sent:
            data = first.sent.popleft()
            second.take(command, data)
            yield data
        if second.sent:
            first.take(command, second.sent.popleft())


def sessions() -> Iterator[list[tuple[int, bytes]]]:
    """Seeds: what a right neighbour says in one round, and in two."""
    for carrier, lane in ((Carrier.CALL, 0), (Carrier.LANE, ON_LANE)):
        for checked in (True, False):
            first, second = (_Rank(rank, carrier, checked=checked) for rank in range(2))
            once = [(lane, data) for data in _exchanged(first, second, command=lane)]
            twice = [(lane, data) for data in _exchanged(first, second, command=lane)]
            if not checked:
                once[0] = lane | UNCHECKED, once[0][1]
            early, late = _giving(once, 1), _giving(once, len(once) - 2)
            yield from (early, late)
            yield [*early, (twice[0][0] | NEXT_ROUND, twice[0][1]), *_giving(twice, 1)[1:]]
            yield [*early[:3], (early[3][0] | ENDS, early[3][1]), *early[4:]]


def _giving(said: list[tuple[int, bytes]], start: int) -> list[tuple[int, bytes]]:
    """The same; this rank gives its two blocks before the messages from `start` on."""
    return [
        (command | (GIVES if start <= at < start + len(_SIZES) else 0), data)
        for at, (command, data) in enumerate(said)
    ]
