"""Landings: where the payload of a ring's chunk goes while it is received, and what is done there.

Theory of operation. Memory is the limit of an exchange on one host, so a number that arrives is
used while it is in the processor's cache. The thread that receives asks for a landing as soon as it
has a chunk's head. An average lands in its place. A sum lands piece by piece in one small buffer,
and each piece is added to this rank's own numbers before the next one is read. Both extend the
chunk's CRC-32C, and a sum that of the chunk that is sent on, so that nothing is read a second time.

The ring's thread owns the exchange, so a landing decides nothing: it writes to the place of one
segment, and the ring's thread judges what came of it. Each landing is given away once, to the
stream of the rank before. Nobody else writes to that place meanwhile: the segment's sum arrives
once, and its mean arrives after this rank's sum was received by others. A message that breaks this
may spoil the place; it is a violation, and the round is void.

A chunk that comes too early for its landing (backward has not made this rank's block, or the
headers are not judged yet) is kept whole and used later.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from andon.protocol.encoding import Encoding
from andon.protocol.messages import PassMessage, RingChunk, RingStage
from andon.protocol.records import Key
from andon.wire.checksums import extended, header_crc32c_of
from andon_trainer.core.calls import Floats
from andon_trainer.core.values import NotFinite, add_product, first_not_finite

__all__ = [
    "PIECE_BYTES",
    "Arrived",
    "Carrier",
    "Landing",
    "Landings",
    "MeanLanding",
    "SumLanding",
    "checked_own",
]

PIECE_BYTES = 2**19
"""Bytes that are received before they are worked on.

They stay in a core's cache until then; with fewer, calls and handovers between threads cost more.
"""

_FLOAT32_BYTES = 4


class Carrier(enum.Enum):
    """What a message travels over."""

    CALL = "call"
    """gRPC, which takes one message of bytes."""
    LANE = "lane"
    """A TCP lane, which takes a head, and the payload from where it lies."""


@dataclass(slots=True)
class MeanLanding:
    """A mean that is received into its place."""

    place: Floats
    crc32c: int | None = None
    """Of the chunk, as far as it came; None: nobody asks."""

    @property
    def count(self) -> int:
        """How many elements land."""
        return self.place.size

    def pieces(self, _room: memoryview) -> Iterator[memoryview]:
        """The views to receive into, one after the other."""
        data = self.place.view(np.uint8).data
        for start in range(0, data.nbytes, PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            yield piece
            # Whoever receives asks for the next piece, or for the end, only once this one is full.
            if self.crc32c is not None:
                self.crc32c = extended(self.crc32c, piece)


@dataclass(slots=True)
class SumLanding:
    """A sum to which this rank adds its product while it is received."""

    own: Floats
    """This rank's numbers."""
    share: float
    came_share: float | None
    """The share of the single contribution that comes; None: a sum of products comes."""
    out: Floats
    """Where the sum goes."""
    sent: RingChunk
    """What this rank sends of it: float32 numbers in `out`."""
    crc32c: int | None = None
    """Of the chunk, as far as it came; None: nobody asks."""
    sent_crc32c: int | None = None
    """Of `sent`, likewise."""
    wrong: NotFinite | None = None
    """The first element that is not finite."""

    @property
    def count(self) -> int:
        """How many elements land."""
        return self.out.size

    def pieces(self, room: memoryview) -> Iterator[memoryview]:
        """The views to receive into, one after the other: parts of `room`, of PIECE_BYTES."""
        numbers = np.frombuffer(room, dtype=np.float32)
        step = PIECE_BYTES // _FLOAT32_BYTES
        for start in range(0, self.out.size, step):
            count = min(step, self.out.size - start)
            piece = room[: count * _FLOAT32_BYTES]
            yield piece
            # The piece is full now. `room` is the same for the next one, so its numbers are added
            # before the next `yield`.
            if self.crc32c is not None:
                self.crc32c = extended(self.crc32c, piece)
            # After a bad value the rest is received all the same: the next frame lies behind it.
            if self.wrong is None:
                self._add(numbers[:count], start)

    def _add(self, came: Floats, start: int) -> None:
        out = self.out[start : start + came.size]
        wrong = add_product(
            came, self.came_share, self.own[start : start + came.size], self.share, out
        )
        if wrong is not None:
            self.wrong = wrong.moved(start)
        elif self.sent_crc32c is not None:
            self.sent_crc32c = extended(self.sent_crc32c, out.view(np.uint8).data)


Landing = MeanLanding | SumLanding


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message of the rank before, as it came."""

    message: PassMessage
    data: bytes
    """All of it; only the head if it came over a TCP lane, whose payload is in `message`."""
    size: int
    """Bytes that it takes here."""
    carrier: Carrier = Carrier.CALL
    """How it came."""
    landing: Landing | None = None
    """Where its payload has landed; None: it is in `message`."""


@dataclass(slots=True)
class Landings:
    """The landings of one exchange. The ring's thread adds, the receiving thread takes.

    Each is one operation of a dictionary, which no other thread can interrupt.
    """

    key: Key
    sequence: int
    checked: bool
    """Whether this rank makes and verifies checksums."""
    _waiting: dict[tuple[RingStage, int, int], Landing] = field(default_factory=dict)

    def add(self, stage: RingStage, block: int, offset: int, landing: Landing) -> None:
        """Lets the chunk of a stage and a segment land there, in float32."""
        if isinstance(landing, SumLanding) and self.checked:
            # Before the landing can be found: the receiving thread may write to it at once.
            landing.sent_crc32c = header_crc32c_of(landing.sent)
        self._waiting[stage, block, offset] = landing

    def take(self, message: PassMessage) -> Landing | None:
        """Gives away the landing of a message; None: it has none, or not yet."""
        if not isinstance(message, RingChunk) or message.encoding is not Encoding.FLOAT32:
            return None
        if (message.key, message.sequence) != (self.key, self.sequence):
            return None
        at = (message.stage, message.block, message.offset)
        landing = self._waiting.get(at)
        if landing is None or landing.count != message.count:
            return None
        # The ring's thread may have withdrawn it since the look above.
        landing = self._waiting.pop(at, None)
        if landing is not None and self.checked and message.crc32c is not None:
            landing.crc32c = header_crc32c_of(message)
        return landing

    def withdraw(self, message: RingChunk) -> None:
        """Takes back the landing of a chunk that came without it."""
        self._waiting.pop((message.stage, message.block, message.offset), None)


def checked_own(chunk: RingChunk, *, checksums: bool) -> tuple[bool, int | None]:
    """Looks at this rank's own float32 numbers on their way out.

    Both passes over a piece are one over memory.

    Returns:
        Whether all of them are finite, and the chunk's CRC-32C if `checksums`.
    """
    crc32c = header_crc32c_of(chunk) if checksums else None
    for start in range(0, chunk.payload.nbytes, PIECE_BYTES):
        piece = chunk.payload[start : start + PIECE_BYTES]
        if first_not_finite(np.frombuffer(piece, dtype=np.float32)) is not None:
            return False, None
        if crc32c is not None:
            crc32c = extended(crc32c, piece)
    return True, crc32c
