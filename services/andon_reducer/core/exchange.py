"""Exchanges: the chunks of one group and sequence of a round, until each is complete."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from andon.encoding import Encoding
from andon.messages import BlockGradient, Operation
from andon_reducer.core.mean import Contribution

__all__ = [
    "OVERHEAD_BYTES",
    "Chunk",
    "Disagreement",
    "Exchange",
    "Place",
    "Roster",
    "held_bytes_of",
    "place_of",
]

OVERHEAD_BYTES = 512
"""What holding a message costs beside its bytes: bounds what tiny messages can take."""

Place = tuple[int, int, int, int]
"""Where a chunk stands in the order of sending: sequence, block, offset; then the group."""


def place_of(gradient: BlockGradient) -> Place:
    """The chunk's place in the order in which every stream sends."""
    return gradient.sequence, gradient.block, gradient.offset, gradient.group


def held_bytes_of(gradient: BlockGradient) -> int:
    """What holding a contribution costs: all bytes of the message that its payload is a view of."""
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
    held_bytes: int = 0

    @classmethod
    def of(cls, gradient: BlockGradient) -> Chunk:
        """A chunk as its first contribution has it, without any."""
        answer = gradient.answer_encoding or gradient.encoding
        return cls(gradient.operation, gradient.count, gradient.encoding, answer)

    def add(self, stream: int, gradient: BlockGradient) -> None:
        """Takes a rank's contribution.

        Raises:
            Disagreement: it is not of the same chunk as the others, or came before.
        """
        rank = gradient.rank
        other = Chunk.of(gradient)
        for what in ("count", "encoding", "answer_encoding"):
            _require_same(rank, what, getattr(other, what), getattr(self, what))
        if rank in self.contributions:
            raise Disagreement(rank, f"rank {rank} sent a chunk twice", "twice")
        self.contributions[rank] = Contribution(rank, gradient.weight, gradient.payload)
        self.streams[rank] = stream
        self.held_bytes += held_bytes_of(gradient)


@dataclass(slots=True)
class Exchange:
    """One group's exchange number `sequence` of a round."""

    roster: Roster
    first_at: float
    last_at: float | None = None
    """When its last average so far was made."""
    incomplete: dict[Place, Chunk] = field(default_factory=dict)
    complete: set[Place] = field(default_factory=set)
    abstained: dict[int, int] = field(default_factory=dict)
    """By rank, the stream that said so: all averages go there."""
    heard: set[int] = field(default_factory=set)
    """Ranks that contributed or abstained."""
    weights: dict[int, float] = field(default_factory=dict)
    """Weight by rank, 0 if it abstains (rule 15: one weight a rank, key and sequence)."""
    operation: Operation | None = None
    """What all its chunks ask for; None before the first."""

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

    def add(self, stream: int, gradient: BlockGradient) -> Place | None:
        """Takes a contribution; the chunk's place if that completed it.

        Raises:
            Disagreement: it contradicts what was said before.
        """
        self.operation = self.operation or gradient.operation
        _require_same(gradient.rank, "operation", gradient.operation, self.operation)
        if gradient.operation is Operation.BROADCAST and gradient.rank != 0:
            text = f"rank {gradient.rank} sent a part of a broadcast, which is rank 0's alone"
            raise Disagreement(gradient.rank, text, gradient.rank)
        place = place_of(gradient)
        if place in self.complete:
            text = f"rank {gradient.rank} sent a chunk twice"
            raise Disagreement(gradient.rank, text, "twice")
        chunk = self.incomplete.get(place)
        if chunk is None:
            chunk = self.incomplete[place] = Chunk.of(gradient)
        chunk.add(stream, gradient)
        self.heard.add(gradient.rank)
        return place if self._is_complete(chunk) else None

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
        self.complete.add(place)
        return self.incomplete.pop(place)

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
