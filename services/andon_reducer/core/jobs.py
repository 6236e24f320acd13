"""Jobs: complete chunks, each a piece of arithmetic that any thread may do.

A job is frozen, and threads read it while the core goes on. So nothing in it may refer to anything
that the core changes: its contributions are the messages as they came.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from andon.protocol.encoding import Encoding
from andon.protocol.messages import (
    AveragedBlock,
    BlockFault,
    BlockGradient,
    CorruptChunk,
    Operation,
    RoundAborted,
)
from andon.protocol.records import Key
from andon.wire.checksums import is_intact
from andon_reducer.core.exchange import OVERHEAD_BYTES, IncompleteChunk, answer_encoding_of
from andon_reducer.core.mean import (
    Mean,
    MeanDefect,
    Memory,
    fresh,
    trimmed_mean,
    weighted_mean,
)

__all__ = ["Job", "job_of", "pieces_of", "reduce_chunk"]

PIECE_ELEMENTS = 2**21
"""The part of a long job that one thread takes: 8 MiB, about two milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One chunk with all its contributions, in rank order."""

    id: int
    key: Key
    group: int
    sequence: int
    operation: Operation
    world_size: int
    block: int
    offset: int
    count: int
    encoding: Encoding
    answer_encoding: Encoding
    contributions: tuple[BlockGradient, ...]
    to_memory: bool = False
    """Whether the answer is written to shared memory, for all who share it."""
    in_place: bool = False
    """Whether it is written there and nowhere else, since every recipient shares memory."""

    @property
    def answer_bytes(self) -> int:
        """What holding the answer costs."""
        if self.in_place:
            return OVERHEAD_BYTES
        return self.answer_encoding.payload_bytes(self.count) + OVERHEAD_BYTES


def job_of(chunk: IncompleteChunk, number: int, shared: Sequence[bool]) -> Job:
    """The job of a complete chunk; `shared` says of each recipient whether it shares memory."""
    first = chunk.first
    answer = answer_encoding_of(first)
    # Arenas have a place for a step's gradients in float32 and for nothing else.
    to_memory = (
        any(shared)
        and first.operation.is_mean
        and first.group == 0
        and first.encoding is answer is Encoding.FLOAT32
    )
    return Job(
        id=number,
        key=first.key,
        group=first.group,
        sequence=first.sequence,
        operation=first.operation,
        world_size=first.world_size,
        block=first.block,
        offset=first.offset,
        count=first.count,
        encoding=first.encoding,
        answer_encoding=answer,
        # In rank order, whatever the order of arrival: the mean is the same to the bit.
        contributions=tuple(chunk.contributions[r] for r in sorted(chunk.contributions)),
        to_memory=to_memory,
        in_place=to_memory and all(shared),
    )


def pieces_of(job: Job) -> list[Job]:
    """The parts of a job that several threads may do, in order.

    Only a job that is done in place can be divided: any other one ends in one message.
    """
    if not job.in_place or job.count <= PIECE_ELEMENTS:
        return [job]
    pieces, itemsize = [], job.encoding.wire_dtype.itemsize
    for start in range(0, job.count, PIECE_ELEMENTS):
        count = min(PIECE_ELEMENTS, job.count - start)
        span = slice(start * itemsize, (start + count) * itemsize)
        at = job.offset + start
        parts = tuple(
            replace(part, offset=at, count=count, payload=part.payload[span])
            for part in job.contributions
        )
        pieces.append(replace(job, offset=at, count=count, contributions=parts))
    return pieces


def reduce_chunk(
    job: Job, into: memoryview | None = None, memory: Memory = fresh
) -> AveragedBlock | BlockFault | RoundAborted:
    """The answer to a job: the mean, or what is wrong and in which element of the block.

    A contribution that does not match its checksum is not what its rank sent: the round is void.
    A broadcast's answer is rank 0's bytes. They need not be numbers, so they are not checked. The
    answer's bytes are written to `into` if that is given, which only a job `to_memory` may have;
    else they are made in `memory`.
    """
    # Before the mean: a flipped bit may look like a value that its rank sent, even like a NaN, and
    # the fault would blame the rank.
    for part in job.contributions:
        if part.crc32c is not None and not is_intact(part):
            return _corrupt(job, part.rank)
    if job.operation is Operation.BROADCAST:
        (source,) = job.contributions
        mean: Mean | MeanDefect = Mean(source.payload, source.weight)
    else:
        make = trimmed_mean if job.operation is Operation.TRIMMED_MEAN else weighted_mean
        mean = make(job.contributions, job.encoding, job.answer_encoding, into, memory)
    if isinstance(mean, MeanDefect):
        return BlockFault(
            key=job.key,
            group=job.group,
            sequence=job.sequence,
            kind=mean.kind,
            rank=mean.rank,
            block=job.block,
            element=job.offset + mean.element,
            value=mean.value,
            message=mean.message,
        )
    return AveragedBlock(
        key=job.key,
        group=job.group,
        sequence=job.sequence,
        operation=job.operation,
        contributors=len(job.contributions),
        world_size=job.world_size,
        block=job.block,
        offset=job.offset,
        count=job.count,
        total_weight=mean.total_weight,
        encoding=job.answer_encoding,
        payload=mean.payload,
    )


def _corrupt(job: Job, rank: int) -> RoundAborted:
    """The answer to a contribution that was changed between its worker and here."""
    return RoundAborted(
        job.key,
        f"the chunk of rank {rank} at element {job.offset} of block {job.block} does not match its "
        "CRC-32C: the network, or the memory of a machine, changed it on its way to the reducer",
        CorruptChunk(rank, job.block, job.offset),
    )
