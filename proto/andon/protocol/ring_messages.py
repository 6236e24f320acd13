"""Messages of the ring as plain values: what `andon.wire.ring_frames` reads and writes."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from andon.protocol.encoding import Encoding
from andon.protocol.messages import Operation
from andon.protocol.records import Key

__all__ = ["EnterRound", "PassMessage", "RingChunk", "RingHeader", "RingStage"]


class RingStage(enum.Enum):
    """How far a segment's mean has come; values are those of `andon.v1.RingStage`."""

    CONTRIBUTION = 1
    PARTIAL_SUM = 2
    AVERAGE = 3
    BROADCAST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EnterRound:
    """The first message of a round on a stream; `rank` is the sender's."""

    key: Key
    rank: int
    world_size: int
    token: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RingHeader:
    """What one rank gives to an exchange; it goes around once."""

    key: Key
    rank: int
    weight: float
    sequence: int = 0
    operation: Operation | None = None
    first_block: int = 0
    stop_block: int = 0
    data_bytes: int = 0
    data_head: bytes = b""
    crc32c: bool = False
    """Whether every chunk that this rank makes has a checksum."""

    @property
    def what(self) -> tuple[object, ...]:
        """What must be the same for all ranks."""
        blocks = (self.first_block, self.stop_block)
        return self.operation, blocks, self.data_bytes, self.data_head


@dataclass(frozen=True, slots=True, kw_only=True)
class RingChunk:
    """`count` elements of a block, from element `offset` on."""

    key: Key
    stage: RingStage
    block: int
    offset: int
    count: int
    payload: memoryview
    encoding: Encoding = Encoding.FLOAT32
    sequence: int = 0
    crc32c: int | None = None
    """The checksum that it came with."""


PassMessage = EnterRound | RingHeader | RingChunk
