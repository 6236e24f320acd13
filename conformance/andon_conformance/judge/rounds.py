"""A round from the client's side: its assignment, its contributions, and the averages of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from andon.protocol.encoding import Encoding, decode, encode
from andon.protocol.layout import Chunk, Layout
from andon.protocol.messages import Abstain, BlockGradient
from andon.protocol.records import Cursor, Key, PositionRange
from andon.protocol.run_settings import Policy
from andon.v1 import reducer_pb2
from andon.wire import conversion
from andon_conformance.judge.streams import ClientCall

__all__ = ["Averages", "ClientChunk", "ClientRound", "Floats", "short", "steady", "weighted_mean"]

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ClientChunk:
    """One contribution of the client, and the stream that it came on."""

    stream: ClientCall
    message: BlockGradient


@dataclass(frozen=True, kw_only=True)
class ClientRound:
    """One assignment to the client."""

    key: Key
    parent: Key
    roster: tuple[int, ...]
    rank: int
    step: int
    cursor: Cursor
    """Where the epoch continues once the round is committed."""
    positions: tuple[PositionRange, ...]
    batch: PositionRange
    began: int
    """Where in the transcript it was assigned."""
    given: list[ClientChunk] = field(default_factory=list)
    abstained: list[tuple[ClientCall, Abstain]] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        """How many ranks it has."""
        return len(self.roster)

    @property
    def samples(self) -> int:
        """Samples of the client's share."""
        return sum(map(len, self.positions))

    @property
    def weight(self) -> float:
        """The client's weight."""
        return self.given[0].message.weight if self.given else 0.0

    @property
    def total_weight(self) -> float:
        """The sum of all ranks' weights. Every other rank has weight 1."""
        return self.weight + (self.world_size - 1)

    @property
    def contributors(self) -> int:
        """Ranks with a weight above 0."""
        return self.world_size - (not self.given)

    def numbers_of(self, chunk: Chunk) -> Floats | None:
        """The client's first contribution to a chunk; None if there is none of the right length."""
        for given in self.given:
            message = given.message
            if Chunk(message.block, message.offset, message.count) == chunk:
                fits = message.encoding.fits(len(message.payload), chunk.count)
                return decode(message.payload, message.encoding, chunk.count) if fits else None
        return None

    def stream_of(self, chunk: Chunk) -> ClientCall:
        """The stream that a chunk's average goes down."""
        for given in self.given:
            if (given.message.block, given.message.offset) == (chunk.block, chunk.offset):
                return given.stream
        return self.given[0].stream if self.given else self.abstained[0][0]


def short(digest: bytes) -> str:
    """The beginning of a digest, for evidence."""
    return digest.hex()[:12] or "none"


def steady(chunk: Chunk, scale: float = 0.01) -> Floats:
    """Made-up numbers for a chunk: small, never zero, and the same at each call."""
    at = np.arange(chunk.offset, chunk.offset + chunk.count) + 31 * chunk.block
    return ((((at * 37) % 16) - 7.5) / 8 * scale).astype(np.float32)


def weighted_mean(parts: Sequence[tuple[float, Floats]]) -> Floats:
    """The mean in rank order, bit for bit as docs/protocol-data.md section 5 defines it."""
    total = 0.0
    for weight, _ in parts:
        total += weight
    # In rank order, and in float32 after each step: another order has other bits.
    with np.errstate(all="ignore"):
        products = [np.float32(weight / total) * gradient for weight, gradient in parts]
        mean = products[0]
        for product in products[1:]:
            mean = mean + product
    return mean


@dataclass(frozen=True)
class Averages:
    """Makes the averages of a round, chunk by chunk."""

    layout: Layout
    policy: Policy
    round: ClientRound

    def true(self, chunk: Chunk) -> reducer_pb2.AveragedBlock:
        """The mean of the client's contribution and the other ranks' made-up gradients."""
        numbers = self.round.numbers_of(chunk)
        parts = []
        for rank in range(self.round.world_size):
            if rank != self.round.rank:
                # The other ranks are the judge itself, with a weight of 1.
                parts.append((1.0, steady(chunk)))
            elif numbers is not None:
                parts.append((self.round.weight, numbers))
        return self.made(chunk, weighted_mean(parts) if parts else steady(chunk))

    def message(self, chunk: Chunk, numbers: Floats) -> reducer_pb2.ReduceResponse:
        """As `made`, in the message that carries it."""
        return reducer_pb2.ReduceResponse(averaged_block=self.made(chunk, numbers))

    def made(self, chunk: Chunk, numbers: Floats) -> reducer_pb2.AveragedBlock:
        """Numbers of the judge's choice, in place of the mean."""
        encoding = self.policy.answer_encoding or self.policy.encoding
        return reducer_pb2.AveragedBlock(
            key=conversion.key_to_proto(self.round.key),
            operation=reducer_pb2.OPERATION_WEIGHTED_MEAN,
            contributors=self.round.contributors,
            world_size=self.round.world_size,
            block=chunk.block,
            element_offset=chunk.offset,
            element_count=chunk.count,
            total_weight=self.round.total_weight,
            encoding=conversion.enum_to_proto(encoding),
            payload=bytes(encode(numbers, encoding)),
        )


FLOAT32 = Policy(chunk_elements=3, digest_every=1)
"""Small chunks, so that a small model has many; digests at each step."""

BFLOAT16 = replace(FLOAT32, encoding=Encoding.BFLOAT16)
INT8 = replace(FLOAT32, encoding=Encoding.INT8_BLOCK)
