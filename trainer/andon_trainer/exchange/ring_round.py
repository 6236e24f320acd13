"""A rank's part in one exchange of a ring: what it sends, adds and keeps. No stream, no thread.

Theory of operation. Each rank first tells its terms, which go around once: after N-1 hops all know
all weights, and that all called the same. Only then do chunks leave. So whoever gets a chunk has
all terms already, since they came before it on the same stream.

A segment's first contributor sends its numbers as they are; each later one adds its own; the last
rank on the way makes the mean and sends it around. Who abstains passes on what comes. A chunk for a
block that backward has not made yet waits here: this rank's own backward, and nobody else, ends the
wait, so that a rank which reads no further for lack of room holds nobody up for ever.

The value gate. A rank looks at its own block before anything of it leaves, and at every sum that it
makes. So what comes and is not finite became so at the last rank before that contributed: that one
is named. A sum that is not finite though both parts are is NON_FINITE_AVERAGE. Nothing is sent
after either, and the round can't be completed by anybody.

Sums are written where the mean will be. That is safe: the mean of a segment comes only after the
last rank had the sum that was sent from there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from andon.encoding import Encoding, EncodingOverflow, decode, encode
from andon.halts import describe_value
from andon.layout import Layout
from andon.messages import Operation
from andon.ring import Segment, Shares, segment_elements, segments_of, shares_of
from andon.ring_messages import RingChunk, RingStage, RingTerms
from andon.terms import Policy
from andon_trainer.exchange.calls import Call
from andon_trainer.exchange.events import Assigned, AveragesComplete, ExchangeFailed
from andon_trainer.exchange.path import Floats
from andon_trainer.exchange.ring_sum import NotFinite, add_product, first_not_finite, rounded

__all__ = ["Effect", "Forward", "RingRound", "Send", "Violation"]


class Violation(Exception):
    """The rank before this one sent what can't be; the round is over here."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to the next rank."""

    message: RingTerms | RingChunk


@dataclass(frozen=True, slots=True)
class Forward:
    """Send the bytes that came, unchanged, to the next rank."""

    data: bytes


Effect = Send | Forward | AveragesComplete | ExchangeFailed


@dataclass(slots=True)
class RingRound:
    """One exchange of a round, at one rank. Every method answers with what is to be done."""

    assigned: Assigned
    weight: float
    call: Call
    layout: Layout
    policy: Policy
    averages: Sequence[Floats]
    """Where the means go, one vector a block."""
    failed: bool = False
    """Whether this rank sends nothing more of the round."""
    waiting_bytes: int = 0
    """Bytes of the messages that wait for this rank's own blocks."""
    _terms: dict[int, RingTerms] = field(default_factory=dict)
    _shares: Shares | None = None
    _segments: dict[tuple[int, int], Segment] = field(default_factory=dict)
    """Those whose mean is missing, by block and offset."""
    _taken: set[tuple[int, int]] = field(default_factory=set)
    """Those that came here once on their way to the mean."""
    _own: dict[int, Floats] = field(default_factory=dict)
    """This rank's blocks, once backward has made them."""
    _waiting: dict[int, list[tuple[RingChunk, bytes]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _missing_data: int = 0
    """Bytes of the broadcast that did not come here yet."""
    _data_given: bool = False
    _complete: bool = False

    @property
    def complete(self) -> bool:
        """Whether this rank holds all averages, and lacks nothing from the rank before."""
        return self._complete

    @property
    def own_terms(self) -> RingTerms:
        """What this rank gives to the exchange."""
        call = self.call
        data = call.data
        return RingTerms(
            key=self.assigned.key,
            rank=self.assigned.rank,
            weight=self.weight,
            sequence=call.sequence,
            operation=call.operation,
            first_block=call.blocks.start,
            stop_block=call.blocks.stop,
            data_bytes=0 if data is None else data.size,
            data_head=b"" if data is None else data[: call.head_bytes].tobytes(),
        )

    # ------------------------------------------------------------------ what this rank does

    def begin(self) -> list[Effect]:
        """Tells this rank's terms."""
        most = segment_elements(self.policy.chunk_elements)
        for block in self.call.blocks:
            elements = self.layout.blocks[block].elements
            for segment in segments_of(block, elements, self._size, most):
                self._segments[block, segment.offset] = segment
        if self.call.data is not None:
            self._missing_data = self.call.data.size
        terms = self.own_terms
        effects: list[Effect] = [] if self._size == 1 else [Send(terms)]
        return effects + self._take_terms(terms)

    def submit(self, block: int, flat: Floats) -> list[Effect]:
        """This rank's block is made, and was looked at: all its elements are finite."""
        if self.failed:
            return []
        self._own[block] = flat
        return self._give(block) if self._shares is not None else []

    def submit_data(self) -> list[Effect]:
        """Rank 0's bytes may leave."""
        self._data_given = True
        return self._give_data() if self._shares is not None and not self.failed else []

    # ------------------------------------------------------------------ what comes

    def receive(self, message: RingTerms | RingChunk, data: bytes) -> list[Effect]:
        """Takes a message of the rank before; `data` is its bytes.

        Raises:
            Violation: it can't be.
        """
        if self.failed:
            return []
        if message.sequence != self.call.sequence:
            raise Violation(
                f"exchange {message.sequence} in the midst of exchange {self.call.sequence}"
            )
        if isinstance(message, RingTerms):
            return self._receive_terms(message, data)
        if self._shares is None:
            raise Violation("a chunk before the terms of all ranks")
        match message.stage:
            case RingStage.BROADCAST:
                return self._receive_data(message, data)
            case RingStage.AVERAGE:
                return self._receive_average(message, data)
            case _:
                return self._receive_sum(message, data)

    # ------------------------------------------------------------------ terms

    @property
    def _size(self) -> int:
        return self.assigned.world_size

    @property
    def _rank(self) -> int:
        return self.assigned.rank

    @property
    def _next(self) -> int:
        return (self._rank + 1) % self._size

    def _receive_terms(self, terms: RingTerms, data: bytes) -> list[Effect]:
        if terms.rank >= self._size or terms.rank in self._terms:
            raise Violation(f"the terms of rank {terms.rank} again, or of no rank of the round")
        passed: list[Effect] = [] if terms.rank == self._next else [Forward(data)]
        return passed + self._take_terms(terms)

    def _take_terms(self, terms: RingTerms) -> list[Effect]:
        self._terms[terms.rank] = terms
        if terms.what != self.own_terms.what:
            return self._fail(
                ExchangeFailed(
                    key=self.assigned.key,
                    kind="PROTOCOL",
                    message=f"rank {self._rank} called {self.call.name} as call "
                    f"{self.call.sequence + 1} of the step, and rank {terms.rank} something else, "
                    "or with other tensors: all workers make the same calls in the same order",
                )
            )
        if len(self._terms) < self._size:
            return []
        try:
            self._shares = shares_of(tuple(self._terms[rank].weight for rank in range(self._size)))
        except ValueError as error:
            return self._fail(self._fault("PROTOCOL", str(error)))
        return self._all_know()

    def _all_know(self) -> list[Effect]:
        """All terms are here: what was made before may leave."""
        shares = self._known
        if not shares.contributors or self.call.operation is None:
            for block in self.call.blocks:
                self.averages[block].fill(0.0)
            self._segments.clear()
            return self._completed()
        if self.call.operation is Operation.BROADCAST:
            if self._terms[0].weight == 0 or shares.contributors > 1:
                return self._fail(self._fault("PROTOCOL", "a broadcast is rank 0's alone"))
            given = self._give_data() if self._data_given else []
            return given + self._completed()
        effects: list[Effect] = []
        for block in list(self._own):
            effects += self._give(block)
        return effects + self._completed()

    @property
    def _known(self) -> Shares:
        assert self._shares is not None
        return self._shares

    # ------------------------------------------------------------------ sums

    def _give(self, block: int) -> list[Effect]:
        """This rank's block goes on its way, and into what waited for it."""
        effects: list[Effect] = []
        shares, flat = self._known, self._own[block]
        if shares.shares[self._rank] is None:
            raise AssertionError("who abstains gives no block")
        most = segment_elements(self.policy.chunk_elements)
        for segment in segments_of(block, flat.size, self._size, most):
            if shares.first(segment) == self._rank:
                effects += self._start(segment, flat)
        for chunk, data in self._waiting.pop(block, ()):
            self.waiting_bytes -= len(data)
            if not self.failed:
                effects += self._add(chunk, self._segments[block, chunk.offset])
        return effects + self._completed()

    def _start(self, segment: Segment, flat: Floats) -> list[Effect]:
        """The first contribution on a segment's way."""
        numbers = flat[segment.offset : segment.offset + segment.count]
        encoding = self.policy.encoding
        if segment.owner(self._size) == self._rank:  # and nobody else contributes
            self._place(segment)[:] = rounded(numbers, encoding)
            return self._settle(segment)
        return [Send(self._chunk(RingStage.CONTRIBUTION, segment, encode(numbers, encoding)))]

    def _receive_sum(self, chunk: RingChunk, data: bytes) -> list[Effect]:
        segment = self._expected(chunk)
        at = (chunk.block, chunk.offset)
        expected = self._stage(segment)
        if at in self._taken or (chunk.stage, chunk.encoding) != expected:
            raise Violation(
                f"a {chunk.stage.name.lower()} of block {chunk.block}, element {chunk.offset}, in "
                f"{chunk.encoding.name.lower()}, which can't come here or came before"
            )
        self._taken.add(at)
        if self._known.shares[self._rank] is not None:
            if chunk.block in self._own:
                return self._add(chunk, segment) + self._completed()
            self._waiting[chunk.block].append((chunk, data))
            self.waiting_bytes += len(data)
            return []
        if segment.owner(self._size) != self._rank:
            return [Forward(data)]
        came = decode(chunk.payload, chunk.encoding)
        wrong = first_not_finite(came)
        if wrong is not None:
            return self._defect(segment, NotFinite(*wrong, came=True))
        self._place(segment)[:] = came  # of a single contributor, too: its share is 1
        return self._settle(segment) + self._completed()

    def _stage(self, segment: Segment) -> tuple[RingStage, Encoding] | None:
        """What of a segment's sum the rank before this one sends; None: nothing."""
        shares, size = self._known, self._size
        first = shares.first(segment)
        if segment.place(self._rank, size) <= segment.place(first, size):
            return None
        if shares.last_before(segment, self._rank) == first:
            return RingStage.CONTRIBUTION, self.policy.encoding
        return RingStage.PARTIAL_SUM, Encoding.FLOAT32

    def _add(self, chunk: RingChunk, segment: Segment) -> list[Effect]:
        """This rank's product, added to what came."""
        shares, encoding = self._known, self.policy.encoding
        share = shares.shares[self._rank]
        assert share is not None
        own = self._own[segment.block][segment.offset : segment.offset + segment.count]
        alone = chunk.stage is RingStage.CONTRIBUTION
        wrong = add_product(
            decode(chunk.payload, chunk.encoding),
            shares.shares[shares.first(segment)] if alone else None,
            rounded(own, encoding),
            share,
            self._place(segment),
        )
        if wrong is not None:
            return self._defect(segment, wrong)
        if segment.owner(self._size) == self._rank:
            return self._settle(segment)
        payload = encode(self._place(segment), Encoding.FLOAT32)
        return [Send(self._chunk(RingStage.PARTIAL_SUM, segment, payload, Encoding.FLOAT32))]

    def _settle(self, segment: Segment) -> list[Effect]:
        """The mean of a segment is in its place, made here: all others get it."""
        answer = self.policy.answer_encoding or self.policy.encoding
        place = self._place(segment)
        try:
            payload = encode(place, answer)
        except EncodingOverflow as overflow:
            value, element = describe_value(overflow.value), segment.offset + overflow.element
            text = (
                f"the mean is {overflow.value:g}, beyond what {answer.name.lower()} holds: ask for "
                "float32 or bfloat16 answers, or scale the loss down"
            )
            return self._fail(self._fault("ENCODING_OVERFLOW", text, segment.block, element, value))
        if answer is not Encoding.FLOAT32:
            place[:] = decode(payload, answer)
        del self._segments[segment.block, segment.offset]
        if self._size == 1:
            return []
        return [Send(self._chunk(RingStage.AVERAGE, segment, payload, answer))]

    def _receive_average(self, chunk: RingChunk, data: bytes) -> list[Effect]:
        segment = self._expected(chunk)
        answer = self.policy.answer_encoding or self.policy.encoding
        owner = segment.owner(self._size)
        if chunk.encoding is not answer or owner == self._rank or self._owes(segment):
            raise Violation(f"an average of block {chunk.block} that can't come here")
        self._place(segment)[:] = decode(chunk.payload, chunk.encoding)
        del self._segments[chunk.block, chunk.offset]
        passed: list[Effect] = [] if owner == self._next else [Forward(data)]
        return passed + self._completed()

    def _owes(self, segment: Segment) -> bool:
        """Whether a segment's sum still needs this rank's own part, so that it has no mean yet."""
        gives = self._known.shares[self._rank] is not None
        return gives and segment.block not in self._own

    # ------------------------------------------------------------------ bytes of rank 0

    def _give_data(self) -> list[Effect]:
        data, step = self.call.data, self.policy.chunk_elements
        assert data is not None
        if self._size == 1:
            self._missing_data = 0
            return self._completed()
        return [
            Send(
                RingChunk(
                    key=self.assigned.key,
                    sequence=self.call.sequence,
                    stage=RingStage.BROADCAST,
                    block=0,
                    offset=offset,
                    count=min(step, data.size - offset),
                    encoding=Encoding.UINT8,
                    payload=data[offset : offset + step].data,
                )
            )
            for offset in range(0, data.size, step)
        ]

    def _receive_data(self, chunk: RingChunk, data: bytes) -> list[Effect]:
        """Bytes of rank 0 go all the way around: back at rank 0 they tell that all have them."""
        into = self.call.data
        if self.call.operation is not Operation.BROADCAST or into is None:
            raise Violation("bytes in an exchange that is no broadcast")
        offset = into.size - self._missing_data
        if (chunk.offset, chunk.encoding) != (offset, Encoding.UINT8) or (
            not 0 < chunk.count <= self._missing_data
        ):
            raise Violation(f"{chunk.count} bytes at {chunk.offset} of a broadcast")
        self._missing_data -= chunk.count
        if self._rank == 0:
            return self._completed()
        into[offset : offset + chunk.count] = np.frombuffer(chunk.payload, dtype=np.uint8)
        return [Forward(data), *self._completed()]

    # ------------------------------------------------------------------ common

    def _expected(self, chunk: RingChunk) -> Segment:
        segment = self._segments.get((chunk.block, chunk.offset))
        if segment is None or segment.count != chunk.count:
            raise Violation(
                f"{chunk.count} elements of block {chunk.block} from {chunk.offset} on, which are "
                "no segment of it or are averaged already"
            )
        return segment

    def _place(self, segment: Segment) -> Floats:
        """Where the mean of a segment goes."""
        return self.averages[segment.block][segment.offset : segment.offset + segment.count]

    def _chunk(
        self,
        stage: RingStage,
        segment: Segment,
        payload: memoryview,
        encoding: Encoding | None = None,
    ) -> RingChunk:
        return RingChunk(
            key=self.assigned.key,
            sequence=self.call.sequence,
            stage=stage,
            block=segment.block,
            offset=segment.offset,
            count=segment.count,
            encoding=encoding or self.policy.encoding,
            payload=payload,
        )

    def _completed(self) -> list[Effect]:
        """What is said once nothing is missing."""
        if self._segments or self._missing_data or self._complete or self.failed:
            return []
        self._complete = True
        return [AveragesComplete(self.assigned.key, self._known.total_weight, self._size)]

    def _defect(self, segment: Segment, wrong: NotFinite) -> list[Effect]:
        """A sum is not finite: who made it so."""
        element, value = segment.offset + wrong.element, describe_value(wrong.value)
        if not wrong.came:
            text = f"all contributions are finite and their mean is {value}: scale the loss down"
            return self._fail(
                self._fault("NON_FINITE_AVERAGE", text, segment.block, element, value)
            )
        rank = self._known.last_before(segment, self._rank)
        text = f"rank {rank} passed {value} on"
        failed = self._fault("NON_FINITE_GRADIENT", text, segment.block, element, value, rank)
        return self._fail(failed)

    def _fault(
        self,
        kind: str,
        message: str,
        block: int | None = None,
        element: int = 0,
        value: str = "",
        rank: int | None = None,
    ) -> ExchangeFailed:
        return ExchangeFailed(
            key=self.assigned.key,
            kind=kind,
            message=message,
            rank=rank,
            block=block,
            element=element,
            value=value,
        )

    def _fail(self, failed: ExchangeFailed) -> list[Effect]:
        self.failed = True
        self._waiting.clear()
        self.waiting_bytes = 0
        return [failed]
