"""The mean on a ring: the segments of an exchange, as one rank sends, adds and keeps them.

Theory of operation. A segment's first contributor sends its numbers as they are; each later one
adds its own; the last rank on the way makes the mean and sends it around. Who abstains passes on
what comes. A chunk for a block that backward has not made yet waits here: this rank's own backward,
and nobody else, ends the wait, so that a rank which reads no further for lack of room holds nobody
up for ever.

The value gate. A rank looks at its own block before anything of it leaves, and at every sum that it
makes. So what comes and is not finite became so at the last rank before that contributed: that one
is named. A sum that is not finite though both parts are is NON_FINITE_AVERAGE.

Sums are written where the mean will be. That is safe: the mean of a segment comes only after the
last rank had the sum that was sent from there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from andon.protocol.encoding import Encoding, EncodingOverflow, decode, encode
from andon.protocol.halts import describe_value
from andon.protocol.layout import Layout
from andon.protocol.messages import RingChunk, RingStage
from andon.protocol.ring import NormalizedWeights, Segment, segment_elements, segments_of
from andon.protocol.run_settings import Policy
from andon_trainer.core.calls import Call
from andon_trainer.core.events import Assigned, ExchangeFailed
from andon_trainer.core.ring_effects import Effect, Faulty, Forward, Send, Violation
from andon_trainer.exchange.path import Floats
from andon_trainer.exchange.ring_sum import NotFinite, add_product, first_not_finite, rounded

__all__ = ["RingMean"]

_At = tuple[int, int]
"""A segment's block and first element."""


@dataclass(slots=True)
class RingMean:
    """One rank's part in the means of one exchange. Every method answers with what is to be done.

    Each may raise Faulty: a value must not be averaged. Then nothing more is to be done.
    """

    assigned: Assigned
    call: Call
    policy: Policy
    shares: NormalizedWeights
    averages: Sequence[Floats]
    """Where the means go, one vector a block."""
    waiting_bytes: int = 0
    """Bytes of the messages that wait for this rank's own blocks."""
    _missing: dict[_At, Segment] = field(default_factory=dict)
    """Those whose mean is not here."""
    _taken: set[_At] = field(default_factory=set)
    """Those whose sum came here once."""
    _own: dict[int, Floats] = field(default_factory=dict)
    _waiting: dict[int, list[tuple[RingChunk, bytes]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def lay_out(self, layout: Layout) -> None:
        """Cuts the blocks that are exchanged."""
        most = segment_elements(self.policy.chunk_elements)
        for block in self.call.blocks:
            elements = layout.blocks[block].elements
            for segment in segments_of(block, elements, self._size, most):
                self._missing[block, segment.offset] = segment

    @property
    def whole(self) -> bool:
        """Whether all means are here."""
        return not self._missing

    def give(self, block: int, flat: Floats) -> list[Effect]:
        """This rank's block, finite, goes on its way, and into what waited for it."""
        assert self.shares.shares[self._rank] is not None, "who abstains gives no block"
        self._own[block] = flat
        effects: list[Effect] = []
        most = segment_elements(self.policy.chunk_elements)
        for segment in segments_of(block, flat.size, self._size, most):
            if self.shares.first(segment) == self._rank:
                effects += self._start(segment, flat)
        for chunk, data in self._waiting.pop(block, ()):
            self.waiting_bytes -= len(data)
            effects += self._add(chunk, self._missing[block, chunk.offset])
        return effects

    def receive(self, chunk: RingChunk, data: bytes) -> list[Effect]:
        """Takes a chunk of the rank before; `data` is its bytes.

        Raises:
            Violation: it can't be.
        """
        segment = self._missing.get((chunk.block, chunk.offset))
        if segment is None or segment.count != chunk.count:
            raise Violation(
                f"{chunk.count} elements of block {chunk.block} from {chunk.offset} on, which are "
                "no segment of it or are averaged already"
            )
        if chunk.stage is RingStage.AVERAGE:
            return self._receive_average(chunk, segment, data)
        return self._receive_sum(chunk, segment, data)

    @property
    def _size(self) -> int:
        return self.assigned.world_size

    @property
    def _rank(self) -> int:
        return self.assigned.rank

    def _start(self, segment: Segment, flat: Floats) -> list[Effect]:
        """The first contribution on a segment's way."""
        numbers = flat[segment.offset : segment.offset + segment.count]
        encoding = self.policy.encoding
        if segment.owner(self._size) == self._rank:  # and nobody else contributes
            self._place(segment)[:] = rounded(numbers, encoding)
            return self._settle(segment)
        payload = encode(numbers, encoding)
        return [Send(self._chunk(RingStage.CONTRIBUTION, segment, payload, encoding))]

    def _receive_sum(self, chunk: RingChunk, segment: Segment, data: bytes) -> list[Effect]:
        at = (chunk.block, chunk.offset)
        if at in self._taken or (chunk.stage, chunk.encoding) != self._expected(segment):
            raise Violation(
                f"a {chunk.stage.name.lower()} of block {chunk.block}, element {chunk.offset}, in "
                f"{chunk.encoding.name.lower()}, which can't come here or came before"
            )
        self._taken.add(at)
        if self.shares.shares[self._rank] is not None:
            if chunk.block in self._own:
                return self._add(chunk, segment)
            self._waiting[chunk.block].append((chunk, data))
            self.waiting_bytes += len(data)
            return []
        if segment.owner(self._size) != self._rank:
            return [Forward(data)]
        came = decode(chunk.payload, chunk.encoding)
        wrong = first_not_finite(came)
        if wrong is not None:
            raise self._defect(segment, NotFinite(*wrong, came=True))
        self._place(segment)[:] = came  # of a single contributor, too: its share is 1
        return self._settle(segment)

    def _expected(self, segment: Segment) -> tuple[RingStage, Encoding] | None:
        """What of a segment's sum the rank before this one sends; None: nothing."""
        first = self.shares.first(segment)
        if segment.place(self._rank, self._size) <= segment.place(first, self._size):
            return None
        if self.shares.last_before(segment, self._rank) == first:
            return RingStage.CONTRIBUTION, self.policy.encoding
        return RingStage.PARTIAL_SUM, Encoding.FLOAT32

    def _add(self, chunk: RingChunk, segment: Segment) -> list[Effect]:
        """This rank's product, added to what came."""
        share = self.shares.shares[self._rank]
        assert share is not None
        own = self._own[segment.block][segment.offset : segment.offset + segment.count]
        alone = chunk.stage is RingStage.CONTRIBUTION
        wrong = add_product(
            decode(chunk.payload, chunk.encoding),
            self.shares.shares[self.shares.first(segment)] if alone else None,
            rounded(own, self.policy.encoding),
            share,
            self._place(segment),
        )
        if wrong is not None:
            raise self._defect(segment, wrong)
        if segment.owner(self._size) == self._rank:
            return self._settle(segment)
        payload = encode(self._place(segment), Encoding.FLOAT32)
        return [Send(self._chunk(RingStage.PARTIAL_SUM, segment, payload, Encoding.FLOAT32))]

    def _settle(self, segment: Segment) -> list[Effect]:
        """The mean of a segment is in its place, made here: all others get it."""
        place = self._place(segment)
        try:
            payload = encode(place, self._answer)
        except EncodingOverflow as overflow:
            text = (
                f"the mean is {overflow.value:g}, beyond what {self._answer.name.lower()} holds: "
                "ask for float32 or bfloat16 answers, or scale the loss down"
            )
            raise self._fault(
                "ENCODING_OVERFLOW", text, segment, overflow.element, overflow.value
            ) from None
        if self._answer is not Encoding.FLOAT32:
            place[:] = decode(payload, self._answer)
        del self._missing[segment.block, segment.offset]
        if self._size == 1:
            return []
        return [Send(self._chunk(RingStage.AVERAGE, segment, payload, self._answer))]

    def _receive_average(self, chunk: RingChunk, segment: Segment, data: bytes) -> list[Effect]:
        owner = segment.owner(self._size)
        owes = self.shares.shares[self._rank] is not None and segment.block not in self._own
        if chunk.encoding is not self._answer or owner == self._rank or owes:
            raise Violation(f"an average of block {chunk.block} that can't be")
        self._place(segment)[:] = decode(chunk.payload, chunk.encoding)
        del self._missing[chunk.block, chunk.offset]
        return [] if owner == (self._rank + 1) % self._size else [Forward(data)]

    @property
    def _answer(self) -> Encoding:
        return self.policy.answer_encoding or self.policy.encoding

    def _place(self, segment: Segment) -> Floats:
        """Where the mean of a segment goes."""
        return self.averages[segment.block][segment.offset : segment.offset + segment.count]

    def _chunk(
        self, stage: RingStage, segment: Segment, payload: memoryview, encoding: Encoding
    ) -> RingChunk:
        return RingChunk(
            key=self.assigned.key,
            sequence=self.call.sequence,
            stage=stage,
            block=segment.block,
            offset=segment.offset,
            count=segment.count,
            encoding=encoding,
            payload=payload,
        )

    def _defect(self, segment: Segment, wrong: NotFinite) -> Faulty:
        """A sum is not finite: who made it so."""
        value = describe_value(wrong.value)
        if wrong.came:
            rank = self.shares.last_before(segment, self._rank)
            kind, text = "NON_FINITE_GRADIENT", f"rank {rank} sent {value}"
            return self._fault(kind, text, segment, wrong.element, wrong.value, rank)
        text = f"all contributions are finite and their mean is {value}: scale the loss down"
        return self._fault("NON_FINITE_AVERAGE", text, segment, wrong.element, wrong.value)

    def _fault(
        self,
        kind: str,
        message: str,
        segment: Segment,
        element: int,
        value: float,
        rank: int | None = None,
    ) -> Faulty:
        return Faulty(
            ExchangeFailed(
                key=self.assigned.key,
                kind=kind,
                message=message,
                rank=rank,
                block=segment.block,
                element=segment.offset + element,
                value=describe_value(value),
            )
        )
