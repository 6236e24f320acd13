"""Chunks and exchanges: what the ranks of a round contribute, until a chunk is complete.

An exchange is what the ranks of one group compute under one sequence number: a step's gradients,
a broadcast, a barrier. Its blocks come in chunks. This file holds what is known of one exchange and
of one chunk; `core.round` looks them up and adds to them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field, replace
from typing import cast

from andon.protocol.encoding import Encoding
from andon.protocol.messages import BlockGradient, Operation
from andon_reducer.core.disagreement import Disagreement, differs
from andon_reducer.core.nodes import ExchangeNodes

__all__ = [
    "OVERHEAD_BYTES",
    "RANGE_BYTES",
    "ExchangeState",
    "FinishedRanges",
    "GroupRanks",
    "IncompleteChunk",
    "Place",
    "answer_encoding_of",
    "cut_to_chunks",
    "held_bytes_of",
    "last_place_of",
    "place_of",
]

OVERHEAD_BYTES = 512
"""Charged for each held message on top of its bytes, so that tiny messages are bounded too."""

RANGE_BYTES = 256
"""Charged for each remembered range: two numbers, and their part of a list and of a dict."""

Place = tuple[int, int, int, int]
"""Position of a chunk in the order of sending: sequence, block, offset, then the group."""


def place_of(gradient: BlockGradient) -> Place:
    """The chunk's place in the order in which every stream sends."""
    return gradient.sequence, gradient.block, gradient.offset, gradient.group


def last_place_of(gradient: BlockGradient) -> Place:
    """The place of the contribution's last element for a slice, of its first one for bytes.

    Later contributions of the same stream must lie above it.
    """
    if gradient.slice is None:
        return place_of(gradient)
    return gradient.sequence, gradient.block, gradient.offset + gradient.count - 1, gradient.group


def held_bytes_of(gradient: BlockGradient) -> int:
    """Bytes that stay in memory while this contribution is held."""
    if gradient.slice is not None:
        # The numbers lie in the arena, which stays allocated whether they are used or not.
        return OVERHEAD_BYTES
    # The payload is a view, and it keeps the whole received message alive: header and padding too.
    return memoryview(cast(bytes, gradient.payload.obj)).nbytes + OVERHEAD_BYTES


def cut_to_chunks(gradient: BlockGradient, elements: int | None) -> list[BlockGradient]:
    """A contribution as chunks of at most `elements`; as it is if `elements` is None.

    Only slices of shared memory are ever longer than a chunk.
    """
    if elements is None or gradient.count <= elements:
        return [gradient]
    itemsize = gradient.encoding.wire_dtype.itemsize
    chunks = []
    for start in range(0, gradient.count, elements):
        count = min(elements, gradient.count - start)
        payload = gradient.payload[start * itemsize : (start + count) * itemsize]
        # `slice` stays: it still says that the numbers lie in the arena. The payload is the view
        # that counts from here on. A checksum covers the whole message, so a part has none.
        part = replace(
            gradient, offset=gradient.offset + start, count=count, payload=payload, crc32c=None
        )
        chunks.append(part)
    return chunks


@dataclass(slots=True)
class GroupRanks:
    """The ranks of one group, fixed by the first message of each."""

    world_size: int
    workers: dict[int, int] = field(default_factory=dict)
    """Worker by rank."""

    def admit(self, worker: int, rank: int, world_size: int) -> None:
        """Checks a rank against what is known, and remembers it.

        Raises:
            Disagreement: an earlier message said something else.
        """
        if world_size != self.world_size:
            text = f"rank {rank} has world size {world_size}, others {self.world_size}"
            raise Disagreement(rank, text, world_size)
        known = self.workers.get(rank)
        if known == worker:
            return
        if known is not None:
            text = f"worker {worker} sent rank {rank}, which is worker {known}'s"
            raise Disagreement(rank, text, worker)
        # Else one worker could count twice in the mean, as two ranks.
        if worker in self.workers.values():
            text = f"worker {worker} sent rank {rank} after another rank in this round"
            raise Disagreement(rank, text, worker)
        self.workers[rank] = worker


class FinishedRanges:
    """The elements of one exchange that were averaged, as ranges of each block.

    A worker sends its chunks in order, so the finished part of a block is one range, or a few while
    streams overtake each other. Memory grows with the number of blocks, not of chunks.
    """

    def __init__(self) -> None:
        """Nothing is finished."""
        self.count = 0
        """Number of ranges."""
        self._bounds: dict[int, list[int]] = {}
        """By block, rising: a range's first element, one past its last, the next range's first."""

    def overlaps(self, block: int, start: int, stop: int) -> bool:
        """Whether any of these elements is finished."""
        bounds = self._bounds.get(block, ())
        inside = bisect_right(bounds, start)
        # Bounds alternate: start, stop, start, stop. So an odd index means that `start` lies within
        # a range. From an even one, a bound below `stop` is the start of a range.
        return bool(inside % 2) or inside != bisect_left(bounds, stop)

    def add(self, block: int, start: int, stop: int) -> int:
        """Marks elements as finished. Returns by how much the number of ranges changed."""
        bounds = self._bounds.setdefault(block, [])
        before = len(bounds)
        # bisect_left for the start and bisect_right for the stop also remove a bound that is equal:
        # a range that only touches another merges with it.
        first, last = bisect_left(bounds, start), bisect_right(bounds, stop)
        bounds[first:last] = [start] * (first % 2 == 0) + [stop] * (last % 2 == 0)
        change = (len(bounds) - before) // 2
        self.count += change
        return change


@dataclass(slots=True)
class ExchangeState:
    """What is known of one exchange: its ranks, their weights, and what is finished.

    A contribution in shared memory may span several chunks. While all ranks share memory, such
    spans are averaged whole. Once one rank sends bytes, or two spans differ in length, `cut` is
    set: from then on everything is collected chunk by chunk. It is set from the beginning if
    streams listen to the round.
    """

    ranks: GroupRanks
    first_at: float
    """When its first message came."""
    last_at: float | None = None
    """When its latest average was made."""
    cut: bool = False
    """Whether spans are cut into chunks."""
    weights: dict[int, float] = field(default_factory=dict)
    """Weight by rank, 0 for a rank that abstains (rule 15: one weight a rank, key and sequence)."""
    abstained: dict[int, int] = field(default_factory=dict)
    """By rank, the stream on which it abstained: all averages go there."""
    operation: Operation | None = None
    """The operation of all its chunks; None before the first."""
    nodes: ExchangeNodes | None = None
    """What its ranks contribute, if they do so by nodes of the tree over the batch's grains."""
    finished: FinishedRanges = field(default_factory=FinishedRanges)

    @property
    def awaits_ranks(self) -> bool:
        """Whether a rank has sent nothing at all yet."""
        # Each message leaves its rank's weight, an abstention too.
        return len(self.weights) < self.ranks.world_size

    @property
    def empty(self) -> bool:
        """Whether every rank abstained."""
        return len(self.abstained) == self.ranks.world_size

    def weigh_node(self, gradient: BlockGradient) -> bool:
        """Remembers a node of a rank, with its weight. Returns whether it is a new one.

        Raises:
            Disagreement: it contradicts what came before.
        """
        rank, node = gradient.rank, gradient.node
        assert node is not None, "else it is weighed as a whole"
        if self.nodes is None:
            if any(self.weights.values()):
                raise Disagreement(rank, f"rank {rank} sent a node, others whole means", node.node)
            self.nodes = ExchangeNodes(node.tree)
        if rank in self.abstained:
            raise Disagreement(rank, f"rank {rank} sent {node.node} and abstained", node.node)
        # Noted only so that it is known to have sent something: the nodes have the weights.
        self.weights.setdefault(rank, gradient.weight)
        return self.nodes.admit(rank, node, gradient.weight)

    def weigh(self, rank: int, weight: float) -> None:
        """Remembers the weight of a rank that contributes its mean, or 0 of one that abstains.

        Raises:
            Disagreement: it had another weight before, or sent nodes.
        """
        if self.nodes is not None and (weight or rank in self.nodes.ranks):
            what = "its mean" if weight else "abstained"
            text = f"rank {rank} {'sent ' if weight else ''}{what}, where nodes are contributed"
            raise Disagreement(rank, text, f"{weight:g}")
        if self.weights.setdefault(rank, weight) != weight:
            text = (
                f"rank {rank} has weight {self.weights[rank]:g} in this exchange, "
                f"and now {weight:g}"
            )
            raise Disagreement(rank, text, weight)

    def require_operation(self, gradient: BlockGradient) -> None:
        """Checks that a contribution asks for the same operation as all others.

        Raises:
            Disagreement: it does not, or its rank may not contribute to it.
        """
        if self.operation is None:
            self.operation = gradient.operation
        elif gradient.operation is not self.operation:
            raise differs(gradient.rank, "operation", gradient.operation, self.operation)
        if gradient.operation is Operation.BROADCAST and gradient.rank != 0:
            text = f"rank {gradient.rank} sent a part of a broadcast, but only rank 0 may"
            raise Disagreement(gradient.rank, text, gradient.rank)

    def abstain(self, stream: int, rank: int) -> None:
        """Leaves a rank out.

        Raises:
            Disagreement: it abstained before.
        """
        if rank in self.abstained:
            raise Disagreement(rank, f"rank {rank} abstained twice", "twice")
        self.abstained[rank] = stream


@dataclass(slots=True, eq=False)
class IncompleteChunk:
    """One chunk, from its first contribution until it has one of every rank that did not abstain.

    Where ranks contribute nodes, it is complete once these are the whole batch, too. All ranks must
    agree with the first contribution on count and encodings.
    """

    exchange: ExchangeState
    first: BlockGradient
    contributions: dict[int, BlockGradient] = field(default_factory=dict)
    """By rank; nodes by their first grain."""
    streams: dict[int, int] = field(default_factory=dict)
    """By rank, the stream that brought its contribution: its average goes back there."""
    held_bytes: int = 0
    """Bytes that its contributions keep in memory."""
    grains: int = 0
    """Grains of its nodes, which are disjoint."""

    @property
    def complete(self) -> bool:
        """Whether no rank's contribution is missing."""
        # A rank never counts twice: none abstains from what it contributes to.
        exchange = self.exchange
        if len(self.streams) + len(exchange.abstained) < exchange.ranks.world_size:
            return False
        return exchange.nodes is None or self.grains == exchange.nodes.count

    def put(self, stream: int, gradient: BlockGradient, held_bytes: int) -> None:
        """Adds a rank's contribution.

        Raises:
            Disagreement: the rank contributed before, or differs from the first contribution.
        """
        rank, first = gradient.rank, self.first
        if gradient.count != first.count:
            raise differs(rank, "count", gradient.count, first.count)
        if gradient.encoding is not first.encoding:
            raise differs(rank, "encoding", gradient.encoding, first.encoding)
        answer, expected = answer_encoding_of(gradient), answer_encoding_of(first)
        if answer is not expected:
            raise differs(rank, "answer encoding", answer, expected)
        node = gradient.node
        index = rank if node is None else node.first
        if index in self.contributions:
            raise Disagreement(rank, f"rank {rank} sent a chunk twice", "twice")
        # After all checks: what contradicts the others is not held.
        self.contributions[index] = gradient
        self.streams[rank] = stream
        self.grains += 0 if node is None else node.grains
        self.held_bytes += held_bytes

    def recipients(self) -> tuple[int, ...]:
        """The streams that its average goes to, each once, in rank order."""
        by_rank = {**self.exchange.abstained, **self.streams}
        return tuple(dict.fromkeys(by_rank[rank] for rank in sorted(by_rank)))


def answer_encoding_of(gradient: BlockGradient) -> Encoding:
    """The encoding of the average that a contribution asks for."""
    return gradient.answer_encoding or gradient.encoding
