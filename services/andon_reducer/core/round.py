"""A round: everything that the workers of one run exchange under one key."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

from andon.protocol.encoding import Encoding
from andon.protocol.halts import describe_value
from andon.protocol.messages import (
    Abstain,
    AveragedBlock,
    BlockFault,
    BlockFaultKind,
    BlockGradient,
    RoundAborted,
)
from andon.protocol.records import Key
from andon_reducer.core.disagreement import Disagreement
from andon_reducer.core.exchange import (
    RANGE_BYTES,
    ExchangeState,
    GroupRanks,
    IncompleteChunk,
    Place,
    cut_to_chunks,
    held_bytes_of,
    place_of,
)
from andon_reducer.core.stream import StreamState

__all__ = ["MAX_EXCHANGES", "MAX_REMEMBERED_BYTES", "ReducerRound", "Verdict"]

MAX_EXCHANGES = 4096
"""Groups and sequences in one round; bounds what a worker can make the reducer remember."""

MAX_REMEMBERED_BYTES = 2**26
"""What a round may spend on remembering finished chunks: 2**18 blocks, or gaps in them.

The largest layout has a quarter of that many blocks, and the gaps are no more than the chunks in
the window. A round that needs more is not a model's gradients.
"""

Verdict = BlockFault | RoundAborted
"""Why a round is void."""


@dataclass(slots=True, eq=False)
class ReducerRound:
    """One round of one run, alive until a verdict or a greater key.

    `contribute` and `abstain` return the chunks that a message completed, lowest place first. They
    are no longer part of the round then: their jobs may outlive it.
    """

    key: Key
    chunk_elements: int | None = None
    """Where blocks are cut for streams without shared memory; None: unknown."""
    listeners: set[int] = field(default_factory=set)
    """Streams that hear its averages, and that are still there. None comes later: a round is heard
    whole or not at all."""
    streams: set[int] = field(default_factory=set)
    """Streams that took part."""
    verdict: Verdict | None = None
    """Why it is void."""
    informed: set[int] = field(default_factory=set)
    """Streams to which the verdict was sent."""
    lost: str = ""
    """Which stream ended while nothing was incomplete: the next message voids the round."""
    held_bytes: int = 0
    """Bytes that the contributions to incomplete chunks keep in memory."""
    remembered_bytes: int = 0
    """Bytes spent on remembering the finished chunks, and the ranks' nodes."""
    _ranks: dict[int, GroupRanks] = field(default_factory=dict)
    """By group."""
    _exchanges: dict[tuple[int, int], ExchangeState] = field(default_factory=dict)
    """By group and sequence."""
    _incomplete: dict[Place, IncompleteChunk] = field(default_factory=dict)
    _places: list[Place] = field(default_factory=list)
    """A heap of all places that were ever incomplete; see `lowest`."""

    @property
    def unfinished(self) -> bool:
        """Whether a rank still owes something that another rank waits for."""
        return bool(self._incomplete) or any(
            exchange.awaits_ranks for exchange in self._exchanges.values()
        )

    @property
    def exchange_seconds(self) -> tuple[float, ...]:
        """For each exchange with averages, the time from first message to last average."""
        return tuple(
            exchange.last_at - exchange.first_at
            for exchange in self._exchanges.values()
            if exchange.last_at is not None
        )

    def lowest(self) -> Place | None:
        """The place of the lowest incomplete chunk."""
        # Completed chunks stay in the heap until they come to its top: removing one from the middle
        # would cost a search, and each is popped once.
        while self._places:
            if self._places[0] in self._incomplete:
                return self._places[0]
            heapq.heappop(self._places)
        return None

    def contribute(
        self, stream: StreamState, gradient: BlockGradient, now: float
    ) -> list[IncompleteChunk]:
        """Adds a contribution. Returns the chunks that it completed.

        Raises:
            Disagreement: a rank contradicts the others or itself. The round must be voided then: it
                may hold a part of the message.
        """
        weight = gradient.weight
        by_node = gradient.node is not None
        if not (math.isfinite(weight) and (weight > 0 or (by_node and weight == 0))):
            text = (
                f"rank {gradient.rank} contributes with weight {weight:g}: a weight is finite and "
                "above 0, and a rank without samples abstains"
            )
            raise Disagreement(gradient.rank, text, describe_value(weight))
        if self.remembered_bytes > MAX_REMEMBERED_BYTES:
            text = (
                f"rank {gradient.rank} leaves too many gaps between its chunks, or sends too many "
                "nodes: send each block's chunks in order, and maximal nodes"
            )
            raise Disagreement(gradient.rank, text, gradient.offset)
        exchange = self._exchange(gradient, stream, weight, now)
        complete: list[IncompleteChunk] = []
        # This stream brings chunks. They can only be matched with spans that are cut where they
        # begin.
        if not exchange.cut and not stream.shared:
            complete = self._cut(exchange, gradient)
        exchange.require_operation(gradient)
        if not exchange.cut:
            other = self._incomplete.get(place_of(gradient))
            if other is not None and other.first.count != gradient.count:
                # Two ranks span different lengths from here, so only their chunks can be matched.
                complete = self._cut(exchange, gradient)
        parts = cut_to_chunks(gradient, self.chunk_elements) if exchange.cut else [gradient]
        for part in parts:
            self._put(exchange, stream.number, part, complete)
        return complete

    def abstain(
        self, stream: StreamState, abstain: Abstain, now: float
    ) -> tuple[list[IncompleteChunk], AveragedBlock | None]:
        """Leaves a rank out of an exchange. Returns the chunks that this completed.

        If every rank left it, also returns the answer, which goes to `abstainers`.

        Raises:
            Disagreement: a rank contradicts the others or itself. The round must be voided then.
        """
        exchange = self._exchange(abstain, stream, 0.0, now)
        complete: list[IncompleteChunk] = []
        if not stream.shared and not exchange.cut:
            complete = self._cut(exchange, abstain)
        exchange.abstain(stream.number, abstain.rank)
        for place in sorted(self._places_of(abstain)):
            if self._incomplete[place].complete:
                complete.append(self._take(place))
        if not exchange.empty:
            return complete, None
        exchange.last_at = now
        return complete, AveragedBlock(
            key=self.key,
            group=abstain.group,
            sequence=abstain.sequence,
            contributors=0,
            world_size=abstain.world_size,
            block=0,
            offset=0,
            count=0,
            total_weight=0.0,
            encoding=Encoding.FLOAT32,
            payload=memoryview(b""),
        )

    def abstainers(self, group: int, sequence: int) -> tuple[int, ...]:
        """The streams on which ranks left an exchange, each once, in rank order."""
        abstained = self._exchanges[group, sequence].abstained
        return tuple(dict.fromkeys(abstained[rank] for rank in sorted(abstained)))

    def averaged(self, group: int, sequence: int, now: float) -> None:
        """An average of an exchange was made."""
        self._exchanges[group, sequence].last_at = now

    def senders(self, group: int) -> list[tuple[int, int]]:
        """The ranks of a group, and the workers that sent as them."""
        ranks = self._ranks.get(group)
        return [] if ranks is None else sorted(ranks.workers.items())

    def fault_of(self, message: BlockGradient | Abstain, disagreement: Disagreement) -> BlockFault:
        """The fault that all participants get for a message that contradicts others."""
        numbers = message if isinstance(message, BlockGradient) else None
        return BlockFault(
            key=self.key,
            group=message.group,
            sequence=message.sequence,
            kind=BlockFaultKind.INCONSISTENT,
            rank=disagreement.rank,
            block=numbers.block if numbers else 0,
            element=numbers.offset if numbers else 0,
            value=disagreement.value,
            message=str(disagreement),
        )

    def void(self, verdict: Verdict) -> None:
        """Voids the round with its final verdict, and frees what it held.

        The round itself stays, with its key and verdict: later messages of it get that answer.
        """
        assert self.verdict is None, "a verdict is final"
        self.verdict = verdict
        self.held_bytes = self.remembered_bytes = 0
        self._ranks.clear()
        self._exchanges.clear()
        self._incomplete.clear()
        self._places.clear()

    def _exchange(
        self, message: BlockGradient | Abstain, stream: StreamState, weight: float, now: float
    ) -> ExchangeState:
        """The exchange that a message belongs to, after checking its rank and weight."""
        group = message.group
        ranks = self._ranks.get(group)
        if ranks is None:
            ranks = self._ranks[group] = GroupRanks(message.world_size)
        ranks.admit(stream.worker, message.rank, message.world_size)
        exchange = self._exchanges.get((group, message.sequence))
        if exchange is None:
            if len(self._exchanges) == MAX_EXCHANGES:
                text = f"a round has at most {MAX_EXCHANGES} exchanges"
                raise Disagreement(message.rank, text, message.sequence)
            # A listener shares no memory, and a whole span may not fit into a message.
            exchange = ExchangeState(ranks, now, cut=bool(self.listeners))
            self._exchanges[group, message.sequence] = exchange
        if isinstance(message, BlockGradient) and message.node is not None:
            self.remembered_bytes += exchange.weigh_node(message) * RANGE_BYTES
        else:
            exchange.weigh(message.rank, weight)
        return exchange

    def _put(
        self,
        exchange: ExchangeState,
        stream: int,
        gradient: BlockGradient,
        complete: list[IncompleteChunk],
    ) -> None:
        """Adds one contribution to its chunk, and the chunk to `complete` if nothing is missing."""
        place = place_of(gradient)
        start, stop = gradient.offset, gradient.offset + gradient.count
        # A finished chunk is no longer among the incomplete ones, so only this finds a second
        # message.
        if exchange.finished.overlaps(gradient.block, start, stop):
            raise Disagreement(gradient.rank, f"rank {gradient.rank} sent a chunk twice", "twice")
        chunk = self._incomplete.get(place)
        if chunk is None:
            chunk = self._incomplete[place] = IncompleteChunk(exchange, gradient)
            heapq.heappush(self._places, place)
        held_bytes = held_bytes_of(gradient)
        chunk.put(stream, gradient, held_bytes)
        self.held_bytes += held_bytes
        if chunk.complete:
            complete.append(self._take(place))

    def _take(self, place: Place) -> IncompleteChunk:
        """Removes a complete chunk. Its place stays in the heap; see `lowest`."""
        chunk = self._incomplete.pop(place)
        self.held_bytes -= chunk.held_bytes
        first = chunk.first
        changed = chunk.exchange.finished.add(first.block, first.offset, first.offset + first.count)
        self.remembered_bytes += changed * RANGE_BYTES
        return chunk

    def _cut(
        self, exchange: ExchangeState, message: BlockGradient | Abstain
    ) -> list[IncompleteChunk]:
        """From now on, spans are cut into chunks. Returns those that are complete already."""
        exchange.cut = True
        spans = [self._incomplete.pop(place) for place in self._places_of(message)]
        complete: list[IncompleteChunk] = []
        for span in spans:
            self.held_bytes -= span.held_bytes
            for gradient in span.contributions.values():
                for part in cut_to_chunks(gradient, self.chunk_elements):
                    self._put(exchange, span.streams[gradient.rank], part, complete)
        return sorted(complete, key=lambda chunk: place_of(chunk.first))

    def _places_of(self, message: BlockGradient | Abstain) -> list[Place]:
        """The incomplete places of a message's exchange."""
        # All exchanges of a round share one dict, since the window needs the lowest place of all.
        # This walk is rare (an abstention, the first bytes among spans) and bounded by the window.
        group, sequence = message.group, message.sequence
        return [place for place in self._incomplete if (place[3], place[0]) == (group, sequence)]
