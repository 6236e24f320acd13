"""Exchanges: the chunks of one group and sequence of a round, until each is complete."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from andon.protocol.encoding import Encoding
from andon.protocol.messages import BlockGradient, Operation
from andon_reducer.core.finished import RANGE_BYTES, Finished
from andon_reducer.core.mean import Contribution

__all__ = [
    "OVERHEAD_BYTES",
    "Chunk",
    "Disagreement",
    "Exchange",
    "Place",
    "Roster",
    "held_bytes_of",
    "last_place_of",
    "place_of",
]

OVERHEAD_BYTES = 512
"""What holding a message costs beside its bytes: bounds what tiny messages can take."""

Place = tuple[int, int, int, int]
"""Where a chunk stands in the order of sending: sequence, block, offset; then the group."""


def place_of(gradient: BlockGradient) -> Place:
    """The chunk's place in the order in which every stream sends."""
    return gradient.sequence, gradient.block, gradient.offset, gradient.group


def last_place_of(gradient: BlockGradient) -> Place:
    """The place below which its stream sends nothing more: for a slice, that of its end."""
    if gradient.slice is None:
        return place_of(gradient)
    return gradient.sequence, gradient.block, gradient.offset + gradient.count - 1, gradient.group


def held_bytes_of(gradient: BlockGradient) -> int:
    """What holding a contribution costs: all bytes of the message that its payload is a view of.

    The bytes of a slice are the arena's, and held whether they are used or not.
    """
    if gradient.slice is not None:
        return OVERHEAD_BYTES
    return memoryview(cast(bytes, gradient.payload.obj)).nbytes + OVERHEAD_BYTES


class Disagreement(Exception):
    """A rank contradicts the others, or itself. `value` is what it said."""

    def __init__(self, rank: int, message: str, value: object) -> None:
        """Says which rank, and how it differs."""
        super().__init__(message)
        self.rank = rank
        self.value = str(value)


@dataclass(slots=True)
class Roster:
    """Who the ranks of one group are: fixed by what each says first."""

    world_size: int
    workers: dict[int, int] = field(default_factory=dict)
    """Worker by rank."""

    def admit(self, worker: int, rank: int, world_size: int) -> None:
        """Takes note of what a rank says of itself.

        Raises:
            Disagreement: it is not what was said before.
        """
        if world_size != self.world_size:
            text = f"rank {rank} counts {world_size} ranks, others {self.world_size}"
            raise Disagreement(rank, text, world_size)
        if rank not in self.workers and worker in self.workers.values():
            text = f"worker {worker} has another rank in this round, and now claims rank {rank}"
            raise Disagreement(rank, text, worker)
        if self.workers.setdefault(rank, worker) != worker:
            text = f"rank {rank} is worker {self.workers[rank]}, and worker {worker} claims it"
            raise Disagreement(rank, text, worker)


@dataclass(slots=True)
class Chunk:
    """One chunk on its way to being complete. All ranks must agree on its first four fields,
    on the operation over all chunks of an exchange."""

    operation: Operation
    count: int
    encoding: Encoding
    answer_encoding: Encoding
    contributions: dict[int, Contribution] = field(default_factory=dict)
    streams: dict[int, int] = field(default_factory=dict)
    """By rank, the stream that brought its contribution: its average goes back there."""
    held: dict[int, int] = field(default_factory=dict)
    """By rank, what holding its contribution costs, in bytes."""

    @classmethod
    def of(cls, gradient: BlockGradient) -> Chunk:
        """A chunk as its first contribution has it, without any."""
        answer = gradient.answer_encoding or gradient.encoding
        return cls(gradient.operation, gradient.count, gradient.encoding, answer)

    @property
    def held_bytes(self) -> int:
        """What holding its contributions costs."""
        return sum(self.held.values())

    def put(self, like: Chunk, part: Contribution, stream: int, held_bytes: int) -> None:
        """Takes a contribution to a chunk `like` this one.

        Raises:
            Disagreement: it is not of the same chunk as the others, or came before.
        """
        rank = part.rank
        for what in ("count", "encoding", "answer_encoding"):
            _require_same(rank, what, getattr(like, what), getattr(self, what))
        if rank in self.contributions:
            raise Disagreement(rank, f"rank {rank} sent a chunk twice", "twice")
        self.contributions[rank] = part
        self.streams[rank] = stream
        self.held[rank] = held_bytes


@dataclass(slots=True)
class Exchange:
    """One group's exchange number `sequence` of a round.

    A slice may span several chunks. While all who take part share memory, spans are averaged
    whole; once somebody does not, or two differ in what they span, all is cut into chunks.
    """

    roster: Roster
    first_at: float
    chunk_elements: int | None = None
    """Where blocks are cut; None: nobody knows, and spans stay as they are."""
    cut: bool = False
    """Whether spans are cut into chunks."""
    held_bytes: int = 0
    """What the contributions to incomplete chunks cost."""
    last_at: float | None = None
    """When its last average so far was made."""
    incomplete: dict[Place, Chunk] = field(default_factory=dict)
    finished: Finished = field(default_factory=Finished)
    abstained: dict[int, int] = field(default_factory=dict)
    """By rank, the stream that said so: all averages go there."""
    heard: set[int] = field(default_factory=set)
    """Ranks that contributed or abstained."""
    weights: dict[int, float] = field(default_factory=dict)
    """Weight by rank, 0 if it abstains (rule 15: one weight a rank, key and sequence)."""
    operation: Operation | None = None
    """What all its chunks ask for; None before the first."""
    _opened: list[Place] = field(default_factory=list)

    @property
    def remembered_bytes(self) -> int:
        """What remembering the finished chunks costs."""
        return self.finished.ranges * RANGE_BYTES

    @property
    def unfinished(self) -> bool:
        """Whether a chunk lacks a contribution, or a rank has not been heard of at all."""
        return bool(self.incomplete) or len(self.heard) < self.roster.world_size

    @property
    def empty(self) -> bool:
        """Whether every rank abstained."""
        return len(self.abstained) == self.roster.world_size

    def weigh(self, rank: int, weight: float) -> None:
        """Takes note of a rank's weight.

        Raises:
            Disagreement: it had another one before.
        """
        if self.weights.setdefault(rank, weight) != weight:
            text = (
                f"rank {rank} has weight {self.weights[rank]:g} in this exchange, "
                f"and now {weight:g}"
            )
            raise Disagreement(rank, text, weight)

    def add(self, stream: int, gradient: BlockGradient) -> list[Place]:
        """Takes a contribution; the places of the chunks that this completed, in order.

        Raises:
            Disagreement: it contradicts what was said before.
        """
        self.operation = self.operation or gradient.operation
        _require_same(gradient.rank, "operation", gradient.operation, self.operation)
        if gradient.operation is Operation.BROADCAST and gradient.rank != 0:
            text = f"rank {gradient.rank} sent a part of a broadcast, which is rank 0's alone"
            raise Disagreement(gradient.rank, text, gradient.rank)
        self.heard.add(gradient.rank)
        place = place_of(gradient)
        chunk = self.incomplete.get(place)
        complete: list[Place] = []
        if not self.cut and chunk is not None and chunk.count != gradient.count:
            complete = self.cut_spans()
        like = Chunk.of(gradient)
        unchecked = None if gradient.crc32c is None else gradient
        whole = Contribution(gradient.rank, gradient.weight, gradient.payload, unchecked)
        for at, part_like, part in self._parts(place, like, whole):
            if self._put(at, part_like, part, stream, held_bytes_of(gradient)):
                complete.append(at)
        return complete

    def cut_spans(self) -> list[Place]:
        """From now on, spans are cut into chunks; the places of those that are complete so."""
        spans, self.incomplete, self.cut = self.incomplete, {}, True
        self.held_bytes = 0
        complete = []
        for place, span in spans.items():
            for rank, whole in span.contributions.items():
                for at, like, part in self._parts(place, span, whole):
                    if self._put(at, like, part, span.streams[rank], span.held[rank]):
                        complete.append(at)
        return sorted(complete)

    def take_opened(self) -> list[Place]:
        """The places at which a chunk has come to be incomplete since the last call."""
        opened, self._opened = self._opened, []
        return opened

    def _parts(
        self, place: Place, like: Chunk, whole: Contribution
    ) -> list[tuple[Place, Chunk, Contribution]]:
        """A contribution as its chunks, or as the span that it is."""
        step = self.chunk_elements
        if not self.cut or step is None or like.count <= step:
            return [(place, like, whole)]
        sequence, block, offset, group = place
        itemsize = like.encoding.itemsize
        parts = []
        for start in range(0, like.count, step):
            count = min(step, like.count - start)
            payload = whole.payload[start * itemsize : (start + count) * itemsize]
            chunk = Chunk(like.operation, count, like.encoding, like.answer_encoding)
            part = Contribution(whole.rank, whole.weight, payload)
            parts.append(((sequence, block, offset + start, group), chunk, part))
        return parts

    def _put(
        self, place: Place, like: Chunk, part: Contribution, stream: int, held_bytes: int
    ) -> bool:
        """Takes one chunk of a contribution; whether that completed it."""
        _, block, offset, _ = place
        if self.finished.overlaps(block, offset, offset + like.count):
            raise Disagreement(part.rank, f"rank {part.rank} sent a chunk twice", "twice")
        chunk = self.incomplete.get(place)
        if chunk is None:
            chunk = self.incomplete[place] = Chunk(
                like.operation, like.count, like.encoding, like.answer_encoding
            )
            self._opened.append(place)
        chunk.put(like, part, stream, held_bytes)
        self.held_bytes += held_bytes
        return self._is_complete(chunk)

    def abstain(self, stream: int, rank: int) -> list[Place]:
        """Leaves a rank out; the places of the chunks that this completed, in order.

        Raises:
            Disagreement: it abstained before.
        """
        if rank in self.abstained:
            raise Disagreement(rank, f"rank {rank} abstained twice", "twice")
        self.abstained[rank] = stream
        self.heard.add(rank)
        return sorted(at for at, chunk in self.incomplete.items() if self._is_complete(chunk))

    def take(self, place: Place) -> Chunk:
        """Removes a complete chunk."""
        chunk = self.incomplete.pop(place)
        self.held_bytes -= chunk.held_bytes
        _, block, offset, _ = place
        self.finished.add(block, offset, offset + chunk.count)
        return chunk

    def recipients(self, chunk: Chunk) -> tuple[int, ...]:
        """The streams that a chunk's average goes to, each once, in rank order."""
        by_rank = {**self.abstained, **chunk.streams}
        return tuple(dict.fromkeys(by_rank[rank] for rank in sorted(by_rank)))

    def _is_complete(self, chunk: Chunk) -> bool:
        return len(chunk.contributions) + len(self.abstained) == self.roster.world_size


def _require_same(rank: int, what: str, mine: object, theirs: object) -> None:
    if mine != theirs:
        mine, theirs = getattr(mine, "name", mine), getattr(theirs, "name", theirs)
        text = f"rank {rank} has {what.replace('_', ' ')} {mine}, others {theirs}"
        raise Disagreement(rank, text, mine)
