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
from andon_reducer.core.exchange import (
    Chunk,
    Disagreement,
    Exchange,
    Place,
    Roster,
)
from andon_reducer.core.stream import Stream

__all__ = ["MAX_EXCHANGES", "MAX_REMEMBERED_BYTES", "Complete", "Round"]

MAX_EXCHANGES = 4096
"""Groups and sequences in one round; bounds what a worker can make the reducer remember."""

MAX_REMEMBERED_BYTES = 2**26
"""What a round may take to remember which chunks are finished: 2**18 blocks, or gaps in them.

The largest layout has a quarter of that in blocks; gaps there are only as many as chunks in the
window. More is not a model's gradients.
"""

Verdict = BlockFault | RoundAborted


@dataclass(frozen=True, slots=True)
class Complete:
    """A chunk with all its contributions, and where its average goes."""

    place: Place
    chunk: Chunk
    world_size: int
    streams: tuple[int, ...]


@dataclass(slots=True)
class Round:
    """One round of one run, alive until a verdict or a greater key."""

    key: Key
    chunk_elements: int | None = None
    """Where blocks are cut for streams without shared memory; None: nobody knows."""
    streams: set[int] = field(default_factory=set)
    """Streams that took part."""
    verdict: Verdict | None = None
    """Why it is void."""
    told: set[int] = field(default_factory=set)
    """Streams that know the verdict."""
    lost: str = ""
    """Which stream ended while nothing was incomplete: the next message voids the round."""
    held_bytes: int = 0
    """What the contributions to incomplete chunks cost."""
    remembered_bytes: int = 0
    """What remembering the finished chunks costs."""
    _rosters: dict[int, Roster] = field(default_factory=dict)
    _exchanges: dict[tuple[int, int], Exchange] = field(default_factory=dict)
    _places: list[Place] = field(default_factory=list)
    """A heap of the incomplete chunks' places; complete ones go when they come to the top."""

    @property
    def unfinished(self) -> bool:
        """Whether a rank still owes something that another rank waits for."""
        return any(exchange.unfinished for exchange in self._exchanges.values())

    @property
    def exchange_seconds(self) -> tuple[float, ...]:
        """For each exchange with averages, the time from first contribution to last average."""
        return tuple(
            exchange.last_at - exchange.first_at
            for exchange in self._exchanges.values()
            if exchange.last_at is not None
        )

    def lowest(self) -> Place | None:
        """The place of the lowest incomplete chunk."""
        while self._places:
            place = self._places[0]
            exchange = self._exchanges[place[3], place[0]]
            if place in exchange.incomplete:
                return place
            heapq.heappop(self._places)
        return None

    def contribute(self, stream: Stream, gradient: BlockGradient, now: float) -> list[Complete]:
        """Takes a contribution; the chunks that this completed, in order.

        Raises:
            Disagreement: a rank contradicts the others or itself.
        """
        weight = gradient.weight
        if not (math.isfinite(weight) and weight > 0):
            text = f"rank {gradient.rank} sent numbers with weight {weight:g}"
            raise Disagreement(gradient.rank, text, describe_value(weight))
        if self.remembered_bytes > MAX_REMEMBERED_BYTES:
            text = f"rank {gradient.rank} sends chunks with gaps between them, and too many"
            raise Disagreement(gradient.rank, text, gradient.offset)
        exchange = self._exchange(gradient, stream, weight, now)
        before = exchange.held_bytes
        places = [] if stream.shared or exchange.cut else exchange.cut_spans()
        places += exchange.add(stream.number, gradient)
        self._follow(exchange, before)
        return [self._take(exchange, place, now) for place in places]

    def abstain(
        self, stream: Stream, abstain: Abstain, now: float
    ) -> tuple[list[Complete], AveragedBlock | None]:
        """Leaves a rank out of an exchange; the chunks that this completed.

        Also the answer to an exchange that every rank left, whose streams `abstainers` tells.

        Raises:
            Disagreement: a rank contradicts the others or itself.
        """
        exchange = self._exchange(abstain, stream, 0.0, now)
        before = exchange.held_bytes
        if not stream.shared and not exchange.cut:
            exchange.cut_spans()  # what that completes, if anything, is among these
        places = exchange.abstain(stream.number, abstain.rank)
        self._follow(exchange, before)
        complete = [self._take(exchange, place, now) for place in places]
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
        """Takes note that an average of an exchange was made."""
        self._exchanges[group, sequence].last_at = now

    def fault_of(self, message: BlockGradient | Abstain, disagreement: Disagreement) -> BlockFault:
        """What everybody is told of a message that contradicts others."""
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
        """Ends the round for good and lets go of what it held."""
        assert self.verdict is None, "a verdict is final"
        self.verdict = verdict
        self.held_bytes = self.remembered_bytes = 0
        self._rosters.clear()
        self._exchanges.clear()
        self._places.clear()

    def _exchange(
        self, message: BlockGradient | Abstain, stream: Stream, weight: float, now: float
    ) -> Exchange:
        group = message.group
        roster = self._rosters.get(group)
        if roster is None:
            roster = self._rosters[group] = Roster(message.world_size)
        roster.admit(stream.worker, message.rank, message.world_size)
        exchange = self._exchanges.get((group, message.sequence))
        if exchange is None:
            if len(self._exchanges) == MAX_EXCHANGES:
                text = f"a round has at most {MAX_EXCHANGES} exchanges"
                raise Disagreement(message.rank, text, message.sequence)
            exchange = Exchange(roster, now, chunk_elements=self.chunk_elements)
            self._exchanges[group, message.sequence] = exchange
        exchange.weigh(message.rank, weight)
        return exchange

    def _follow(self, exchange: Exchange, held_bytes_before: int) -> None:
        """Takes note of what an exchange holds now, and of the places that it waits at."""
        self.held_bytes += exchange.held_bytes - held_bytes_before
        for place in exchange.take_opened():
            heapq.heappush(self._places, place)

    def _take(self, exchange: Exchange, place: Place, now: float) -> Complete:
        before = exchange.remembered_bytes
        chunk = exchange.take(place)
        self.remembered_bytes += exchange.remembered_bytes - before
        self.held_bytes -= chunk.held_bytes
        return Complete(place, chunk, exchange.roster.world_size, exchange.recipients(chunk))
