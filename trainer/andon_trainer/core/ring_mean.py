"""The mean on a ring: the segments of one exchange, as one rank sends, adds and stores them.

Theory of operation. The first contributor of a segment sends its numbers as they are. Each later
one adds its own. The last rank on the segment's way makes the mean and sends it around. A rank that
abstains passes on what it receives. If a chunk arrives for a block that backward has not made yet,
it waits here. Only this rank's own backward can end that wait, so a rank that stops reading because
its buffer is full cannot block anybody for ever.

The value gate. A rank checks its own block before anything of it is sent, and checks every sum that
it makes. So if something arrives that is not finite, the last contributor before this rank made it
so, and is named. If a sum is not finite though both its parts are, that is NON_FINITE_AVERAGE.

Sums are written into the same memory as the mean. That is safe: a segment's mean arrives only after
the last rank received the sum that was sent from there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from andon.protocol.encoding import Encoding, EncodingOverflow, decode, encode
from andon.protocol.halts import describe_value
from andon.protocol.layout import Layout
from andon.protocol.messages import RingChunk, RingHeader, RingStage
from andon.protocol.records import Key
from andon.protocol.ring import NormalizedWeights, Segment, segment_elements, segments_of
from andon.protocol.run_settings import Policy
from andon_trainer.core.calls import Call, Floats
from andon_trainer.core.events import Assigned, AveragesComplete, ExchangeFailed
from andon_trainer.core.values import NotFinite, add_product, first_not_finite, rounded

__all__ = ["Faulty", "Forward", "RingEffect", "RingMean", "Send", "Violation"]

_At = tuple[int, int]
"""A segment's block and first element."""


class Violation(Exception):
    """The rank before this one broke the protocol."""


class Faulty(Exception):
    """The round can't be finished, and this rank sends nothing more of it."""

    def __init__(self, failed: ExchangeFailed) -> None:
        """`failed` is what the coordinator is to hear."""
        super().__init__(failed.message)
        self.failed = failed

    @classmethod
    def protocol(cls, key: Key, message: str) -> Faulty:
        """The workers do not agree on what they exchange."""
        return cls(ExchangeFailed(key=key, kind="PROTOCOL", message=message))

    @classmethod
    def corrupt(cls, chunk: RingChunk, sender: int, receiver: int, *, bytes_: bool) -> Faulty:
        """A chunk of rank `sender` does not match its checksum; one of `bytes_` has no block."""
        text = (
            f"the {chunk.stage.name.lower().replace('_', ' ')} at element {chunk.offset} of block "
            f"{chunk.block} does not match its CRC-32C: the network, or the memory of a machine, "
            f"changed it on its way from rank {sender} to rank {receiver}"
        )
        return cls(
            ExchangeFailed(
                key=chunk.key,
                kind="CORRUPT_CHUNK",
                message=text,
                rank=sender,
                block=None if bytes_ else chunk.block,
                element=chunk.offset,
            )
        )


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to the next rank."""

    message: RingHeader | RingChunk


@dataclass(frozen=True, slots=True)
class Forward:
    """Pass the received bytes on to the next rank, unchanged."""

    data: bytes


RingEffect = Send | Forward | AveragesComplete | ExchangeFailed


@dataclass(slots=True)
class RingMean:
    """One rank's part in the means of one exchange. Every method returns what is to be done.

    Every method may raise Faulty if a value must not be averaged. The exchange is over then.
    """

    assigned: Assigned
    call: Call
    policy: Policy
    shares: NormalizedWeights
    averages: Sequence[Floats]
    """Where the means go, one vector a block."""
    waiting_bytes: int = 0
    """Size of the messages that wait for this rank's own blocks."""
    _missing: dict[_At, Segment] = field(default_factory=dict)
    """Segments whose mean has not arrived."""
    _taken: set[_At] = field(default_factory=set)
    """Segments whose sum has arrived: a second one breaks the protocol."""
    _own: dict[int, Floats] = field(default_factory=dict)
    _waiting: dict[int, list[tuple[RingChunk, bytes]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def lay_out(self, layout: Layout) -> None:
        """Cuts the blocks of the call into segments."""
        most = segment_elements(self.policy.chunk_elements)
        for block in self.call.blocks:
            elements = layout.blocks[block].elements
            for segment in segments_of(block, elements, self._size, most):
                self._missing[block, segment.offset] = segment

    @property
    def whole(self) -> bool:
        """Whether all means are here."""
        return not self._missing

    def give(self, block: int, flat: Floats) -> list[RingEffect]:
        """Starts this rank's segments of a finite block, and adds the block to what waited."""
        assert self.shares.factors[self._rank] is not None, "a rank that abstains gives no block"
        self._own[block] = flat
        effects: list[RingEffect] = []
        most = segment_elements(self.policy.chunk_elements)
        for segment in segments_of(block, flat.size, self._size, most):
            if self.shares.first_contributor(segment) == self._rank:
                effects += self._start(segment, flat)
        for chunk, data in self._waiting.pop(block, ()):
            self.waiting_bytes -= len(data)
            effects += self._add(chunk, self._missing[block, chunk.offset])
        return effects

    def receive(self, chunk: RingChunk, data: bytes) -> list[RingEffect]:
        """Takes a chunk from the rank before; `data` is the whole message.

        Raises:
            Violation: it does not fit the exchange.
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

    def _start(self, segment: Segment, flat: Floats) -> list[RingEffect]:
        """The first contribution to a segment."""
        numbers = flat[segment.offset : segment.offset + segment.count]
        encoding = self.policy.encoding
        if segment.owner(self._size) == self._rank:
            # First and last on the way: every other rank abstains, so this is already the mean.
            self._place(segment)[:] = rounded(numbers, encoding)
            return self._settle(segment)
        payload = encode(numbers, encoding)
        return [Send(self._chunk(RingStage.CONTRIBUTION, segment, payload, encoding))]

    def _receive_sum(self, chunk: RingChunk, segment: Segment, data: bytes) -> list[RingEffect]:
        at = (chunk.block, chunk.offset)
        if at in self._taken or (chunk.stage, chunk.encoding) != self._expected(segment):
            raise Violation(
                f"a {chunk.stage.name.lower()} of block {chunk.block}, element {chunk.offset}, in "
                f"{chunk.encoding.name.lower()}, which can't come here or came before"
            )
        self._taken.add(at)
        if self.shares.factors[self._rank] is not None:
            if chunk.block in self._own:
                return self._add(chunk, segment)
            # Backward has not made the block yet. `give` adds it.
            self._waiting[chunk.block].append((chunk, data))
            self.waiting_bytes += len(data)
            return []
        if segment.owner(self._size) != self._rank:
            return [Forward(data)]
        # This rank abstains but is last on the way, so it still makes the mean. Nobody has checked
        # what came since its contributor sent it.
        came = decode(chunk.payload, chunk.encoding)
        wrong = first_not_finite(came)
        if wrong is not None:
            raise self._defect(segment, NotFinite(*wrong, came=True))
        # Right for a single contribution too, which nobody multiplied: its share is 1.
        self._place(segment)[:] = came
        return self._settle(segment)

    def _expected(self, segment: Segment) -> tuple[RingStage, Encoding] | None:
        """What the rank before this one sends of a segment's sum; None: nothing."""
        first = self.shares.first_contributor(segment)
        if segment.hops_to(self._rank, self._size) <= segment.hops_to(first, self._size):
            return None
        if self.shares.last_contributor_before(segment, self._rank) == first:
            return RingStage.CONTRIBUTION, self.policy.encoding
        return RingStage.PARTIAL_SUM, Encoding.FLOAT32

    def _add(self, chunk: RingChunk, segment: Segment) -> list[RingEffect]:
        """Adds this rank's product to what came."""
        share = self.shares.factors[self._rank]
        assert share is not None
        own = self._own[segment.block][segment.offset : segment.offset + segment.count]
        alone = chunk.stage is RingStage.CONTRIBUTION
        wrong = add_product(
            decode(chunk.payload, chunk.encoding),
            self.shares.factors[self.shares.first_contributor(segment)] if alone else None,
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

    def _settle(self, segment: Segment) -> list[RingEffect]:
        """This rank made a segment's mean, in place: sends it around."""
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
            # The others will have the mean as encoded, so this rank must, too (C-RING-001).
            place[:] = decode(payload, self._answer)
        del self._missing[segment.block, segment.offset]
        if self._size == 1:
            return []
        return [Send(self._chunk(RingStage.AVERAGE, segment, payload, self._answer))]

    def _receive_average(self, chunk: RingChunk, segment: Segment, data: bytes) -> list[RingEffect]:
        owner = segment.owner(self._size)
        # A mean that this rank has not contributed to yet can't be one.
        owes = self.shares.factors[self._rank] is not None and segment.block not in self._own
        if chunk.encoding is not self._answer or owner == self._rank or owes:
            raise Violation(f"an average of block {chunk.block} that can't be")
        self._place(segment)[:] = decode(chunk.payload, chunk.encoding)
        del self._missing[chunk.block, chunk.offset]
        # The rank after this one made the mean: the way around ends here.
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
        """A sum is not finite: says whose fault that is."""
        value = describe_value(wrong.value)
        if wrong.came:
            rank = self.shares.last_contributor_before(segment, self._rank)
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
