"""Jobs: complete chunks, each a piece of arithmetic that any thread may do."""

from __future__ import annotations

from dataclasses import dataclass, replace

from andon.protocol.encoding import Encoding
from andon.protocol.messages import AveragedBlock, BlockFault, CorruptChunk, Operation, RoundAborted
from andon.protocol.records import Key
from andon.wire.checksums import is_intact
from andon_reducer.core.exchange import OVERHEAD_BYTES
from andon_reducer.core.mean import Contribution, Defect, Mean, weighted_mean

__all__ = ["Job", "pieces_of", "reduce_chunk"]

PIECE_ELEMENTS = 2**21
"""What one thread does of a long job: 8 MiB, about two milliseconds."""


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
    contributions: tuple[Contribution, ...]
    to_memory: bool = False
    """Whether the answer is written to shared memory, for all who share it."""
    in_place: bool = False
    """Whether it goes there alone, and is not held here."""

    @property
    def fits_memory(self) -> bool:
        """Whether the answer is one that shared memory has a place for."""
        return (
            self.operation is Operation.WEIGHTED_MEAN
            and self.group == 0
            and self.encoding is self.answer_encoding is Encoding.FLOAT32
        )

    @property
    def answer_bytes(self) -> int:
        """What holding the answer costs."""
        if self.in_place:
            return OVERHEAD_BYTES
        return self.count * self.answer_encoding.itemsize + OVERHEAD_BYTES


def pieces_of(job: Job) -> list[Job]:
    """The parts of a job that several threads may do, in order: what is in place can be cut."""
    if not job.in_place or job.count <= PIECE_ELEMENTS:
        return [job]
    pieces = []
    for start in range(0, job.count, PIECE_ELEMENTS):
        count = min(PIECE_ELEMENTS, job.count - start)
        span = slice(start * job.encoding.itemsize, (start + count) * job.encoding.itemsize)
        parts = tuple(replace(part, payload=part.payload[span]) for part in job.contributions)
        pieces.append(replace(job, offset=job.offset + start, count=count, contributions=parts))
    return pieces


def reduce_chunk(
    job: Job, into: memoryview | None = None
) -> AveragedBlock | BlockFault | RoundAborted:
    """The answer to a job: the mean, or what is wrong and in which element of the block.

    A contribution that does not match its checksum is nobody's value: the round is void.
    A broadcast's answer is rank 0's bytes, which need not be numbers and are not looked at. The
    answer's bytes are written to `into` if that is given, which takes a job that `fits_memory`.
    """
    for part in job.contributions:
        if part.unchecked is not None and not is_intact(part.unchecked):
            return _corrupt(job, part.rank)
    if job.operation is Operation.BROADCAST:
        (source,) = job.contributions
        mean: Mean | Defect = Mean(source.payload, source.weight)
    else:
        mean = weighted_mean(job.contributions, job.encoding, job.answer_encoding, into)
    if isinstance(mean, Defect):
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
    """What everybody is told of a contribution that was changed between its worker and here."""
    return RoundAborted(
        job.key,
        f"the chunk of rank {rank} at element {job.offset} of block {job.block} does not match its "
        "CRC-32C: the network, or the memory of a machine, changed it on its way to the reducer",
        CorruptChunk(rank, job.block, job.offset),
    )
