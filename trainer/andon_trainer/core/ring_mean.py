"""The mean on a ring: the segments of one exchange, as one rank sends, adds and stores them.

Theory of operation. The first contributor of a segment sends its numbers as they are. Each later
one adds its own. The last rank on the segment's way makes the mean and sends it around. A rank that
abstains passes on what it receives. If a chunk arrives for a block that backward has not made yet,
it waits here. Only this rank's own backward can end that wait, so a rank that stops reading because
its buffer is full cannot block anybody for ever.

The value gate. A rank checks its own numbers before they are sent, and every sum that it makes, and
so all of its own block before it has all means: it starts a segment, or adds to it. So if something
arrives that is not finite, the last contributor before this rank made it so, and is named. If a sum
is not finite though both its parts are, that is NON_FINITE_AVERAGE.

Sums are written into the same memory as the mean, and sums and means are sent from there, without a
copy. That is safe:

- a segment's mean arrives only after the last rank received the sum that was sent from there;
- the next exchange writes there only once this rank has the headers of all ranks, and a rank sends
  its header after it has all means of the exchange before. So what was to be sent has arrived;
- the next round begins after a commit, for which every rank has all means; or after a void round,
  and then the streams that send from there and receive to there are ended first.
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
from andon_trainer.core.ring_landing import Arrived, Landings, MeanLanding, SumLanding
from andon_trainer.core.values import (
    NotFinite,
    Source,
    add_product,
    bad_value_of,
    encode_own,
    first_not_finite,
    rounded,
)

__all__ = ["Faulty", "Forward", "RingEffect", "RingMean", "RingViolation", "Send"]

_At = tuple[int, int]
"""A segment's block and first element."""


class RingViolation(Exception):
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
    crc32c: int | None = None
    """A chunk's checksum, where it is known already."""
    unchecked: bool = False
    """Whether this rank's own numbers are in it, which nobody has checked: no NaN may leave."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Pass a message on to the next rank, unchanged."""

    arrived: Arrived


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
    landings: Landings
    waiting_bytes: int = 0
    """Size of the messages that wait for this rank's own blocks."""
    _missing: dict[_At, Segment] = field(default_factory=dict)
    """Segments whose mean has not arrived."""
    _taken: set[_At] = field(default_factory=set)
    """Segments whose sum has arrived: a second one breaks the protocol."""
    _own: dict[int, Floats] = field(default_factory=dict)
    _keeping: set[int] = field(default_factory=set)
    """Those of this rank's blocks whose elements become what the encoding lost of them.

    Each element is encoded once: it is in one segment, which this rank starts or adds to.
    """
    _waiting: dict[int, list[tuple[RingChunk, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """By block, the chunks that came before this rank's own, and their sizes."""

    def lay_out(self, layout: Layout) -> None:
        """Cuts the blocks of the call into segments."""
        most = segment_elements(self.policy.chunk_elements)
        for block in self.call.blocks:
            elements = layout.blocks[block].elements
            for segment in segments_of(block, elements, self._size, most):
                self._missing[block, segment.offset] = segment
                if self._answer is Encoding.FLOAT32 and segment.owner(self._size) != self._rank:
                    landing = MeanLanding(self._place(segment))
                    self.landings.add(RingStage.AVERAGE, block, segment.offset, landing)

    @property
    def whole(self) -> bool:
        """Whether all means are here."""
        return not self._missing

    def give(self, block: int, flat: Floats, *, keeps_loss: bool = False) -> list[RingEffect]:
        """Starts this rank's segments of a block, and adds the block to what waited."""
        assert self.shares.factors[self._rank] is not None, "a rank that abstains gives no block"
        self._own[block] = flat
        if keeps_loss:
            self._keeping.add(block)
        effects: list[RingEffect] = []
        most = segment_elements(self.policy.chunk_elements)
        for segment in segments_of(block, flat.size, self._size, most):
            if self.shares.first_contributor(segment) == self._rank:
                effects += self._start(segment, flat)
            else:
                self._let_land(segment, flat)
        for chunk, size in self._waiting.pop(block, ()):
            self.waiting_bytes -= size
            effects += self._add(chunk, self._missing[block, chunk.offset])
        return effects

    def _let_land(self, segment: Segment, flat: Floats) -> None:
        """Lets the sum of a segment be added to this rank's block while it is received."""
        expected, share = self._expected(segment), self.shares.factors[self._rank]
        assert expected is not None
        assert share is not None
        at = (segment.block, segment.offset)
        # A sum that came already waits in `_waiting`: nothing more will land for it.
        if at in self._taken or self._encoding is not Encoding.FLOAT32:
            return
        stage, _ = expected
        landing = SumLanding(
            own=flat[segment.offset : segment.offset + segment.count],
            share=share,
            came_share=self._share_of_what_came(stage, segment),
            out=self._place(segment),
            sent=self._sum_of(segment),
        )
        self.landings.add(stage, *at, landing)

    def receive(self, chunk: RingChunk, arrived: Arrived) -> list[RingEffect]:
        """Takes a chunk from the rank before.

        Raises:
            RingViolation: it does not fit the exchange.
        """
        segment = self._missing.get((chunk.block, chunk.offset))
        if segment is None or segment.count != chunk.count:
            raise RingViolation(
                f"{chunk.count} elements of block {chunk.block} from {chunk.offset} on, which are "
                "no segment of it or are averaged already"
            )
        if chunk.stage is RingStage.AVERAGE:
            return self._receive_average(chunk, segment, arrived)
        return self._receive_sum(chunk, segment, arrived)

    @property
    def _size(self) -> int:
        return self.assigned.world_size

    @property
    def _rank(self) -> int:
        return self.assigned.rank

    def _start(self, segment: Segment, flat: Floats) -> list[RingEffect]:
        """The first contribution to a segment."""
        numbers = flat[segment.offset : segment.offset + segment.count]
        encoding, keeps = self._encoding, segment.block in self._keeping
        if segment.owner(self._size) == self._rank:
            # First and last on the way: every other rank abstains, so this is already the mean.
            self._place(segment)[:] = rounded(numbers, encoding, keeps_loss=keeps)
            wrong = first_not_finite(self._place(segment))
            if wrong is not None:
                raise self._defect(segment, NotFinite(*wrong, Source.OWN))
            return self._settle(segment)
        payload = encode_own(numbers, encoding, keeps_loss=keeps)
        chunk = self._chunk(RingStage.CONTRIBUTION, segment, payload, encoding)
        # Float32 numbers are looked at while they are sent (`checked_own`). Those of other
        # encodings were looked at before they came here.
        return [Send(chunk, unchecked=encoding is Encoding.FLOAT32)]

    def _receive_sum(
        self, chunk: RingChunk, segment: Segment, arrived: Arrived
    ) -> list[RingEffect]:
        at = (chunk.block, chunk.offset)
        if at in self._taken or (chunk.stage, chunk.encoding) != self._expected(segment):
            raise RingViolation(
                f"a {chunk.stage.name.lower()} of block {chunk.block}, element {chunk.offset}, in "
                f"{chunk.encoding.label}, which can't come here or came before"
            )
        self._taken.add(at)
        if isinstance(arrived.landing, SumLanding):
            return self._added(arrived.landing, segment)
        # It came over gRPC, or its head was read before the landing was added. A sum comes only
        # once, so nobody else would take the landing.
        self.landings.withdraw(chunk)
        if self.shares.factors[self._rank] is not None:
            if chunk.block in self._own:
                return self._add(chunk, segment)
            # Backward has not made the block yet. `give` adds it.
            self._waiting[chunk.block].append((chunk, arrived.size))
            self.waiting_bytes += arrived.size
            return []
        if segment.owner(self._size) != self._rank:
            return [Forward(arrived)]
        # This rank abstains but is last on the way, so it still makes the mean. Nobody has checked
        # what came since its contributor sent it.
        came = decode(chunk.payload, chunk.encoding, chunk.count)
        wrong = first_not_finite(came)
        if wrong is not None:
            raise self._defect(segment, NotFinite(*wrong, Source.CAME))
        # Right for a single contribution too, which nobody multiplied: its share is 1.
        self._place(segment)[:] = came
        return self._settle(segment)

    def _expected(self, segment: Segment) -> tuple[RingStage, Encoding] | None:
        """What the rank before this one sends of a segment's sum; None: nothing."""
        first = self.shares.first_contributor(segment)
        if segment.hops_to(self._rank, self._size) <= segment.hops_to(first, self._size):
            return None
        if self.shares.last_contributor_before(segment, self._rank) == first:
            return RingStage.CONTRIBUTION, self._encoding
        return RingStage.PARTIAL_SUM, Encoding.FLOAT32

    def _add(self, chunk: RingChunk, segment: Segment) -> list[RingEffect]:
        """Adds this rank's product to what came."""
        share = self.shares.factors[self._rank]
        assert share is not None
        own = self._own[segment.block][segment.offset : segment.offset + segment.count]
        wrong = add_product(
            decode(chunk.payload, chunk.encoding, chunk.count),
            self._share_of_what_came(chunk.stage, segment),
            rounded(own, self._encoding, keeps_loss=segment.block in self._keeping),
            share,
            self._place(segment),
        )
        if wrong is not None:
            raise self._defect(segment, wrong)
        if segment.owner(self._size) == self._rank:
            return self._settle(segment)
        return [Send(self._sum_of(segment))]

    def _added(self, landing: SumLanding, segment: Segment) -> list[RingEffect]:
        """This rank's product was added while the sum was received."""
        if landing.wrong is not None:
            raise self._defect(segment, landing.wrong)
        if segment.owner(self._size) == self._rank:
            return self._settle(segment, landing.sent_crc32c)
        return [Send(landing.sent, landing.sent_crc32c)]

    def _share_of_what_came(self, stage: RingStage, segment: Segment) -> float | None:
        """The first contribution comes unmultiplied; later sums are of products."""
        if stage is not RingStage.CONTRIBUTION:
            return None
        return self.shares.factors[self.shares.first_contributor(segment)]

    def _sum_of(self, segment: Segment) -> RingChunk:
        """What this rank sends of a segment's sum in float32, from its place."""
        last = segment.owner(self._size) == self._rank
        payload = encode(self._place(segment), Encoding.FLOAT32)
        stage = RingStage.AVERAGE if last else RingStage.PARTIAL_SUM
        return self._chunk(stage, segment, payload, Encoding.FLOAT32)

    def _settle(self, segment: Segment, crc32c: int | None = None) -> list[RingEffect]:
        """This rank made a segment's mean, in place: sends it around.

        `crc32c` is that of the mean's chunk in float32, if it is known.
        """
        place = self._place(segment)
        try:
            payload = encode(place, self._answer)
        except EncodingOverflow as overflow:
            text = (
                f"the mean is {overflow.value:g}, beyond what {self._answer.label} holds: "
                "ask for float32 or bfloat16 answers, or scale the loss down"
            )
            raise self._fault(
                "ENCODING_OVERFLOW", text, segment, overflow.element, overflow.value
            ) from None
        if self._answer is not Encoding.FLOAT32:
            # The others will have the mean as encoded, so this rank must, too (C-RING-001).
            place[:] = decode(payload, self._answer, place.size)
        del self._missing[segment.block, segment.offset]
        if self._size == 1:
            return []
        average = self._chunk(RingStage.AVERAGE, segment, payload, self._answer)
        return [Send(average, crc32c if self._answer is Encoding.FLOAT32 else None)]

    def _receive_average(
        self, chunk: RingChunk, segment: Segment, arrived: Arrived
    ) -> list[RingEffect]:
        owner = segment.owner(self._size)
        # A mean that this rank has not contributed to yet can't be one.
        owes = self.shares.factors[self._rank] is not None and segment.block not in self._own
        if chunk.encoding is not self._answer or owner == self._rank or owes:
            raise RingViolation(f"an average of block {chunk.block} that can't be")
        if arrived.landing is None:
            # As for a sum: it came over gRPC, so nothing landed, and nothing will.
            self.landings.withdraw(chunk)
            self._place(segment)[:] = decode(chunk.payload, chunk.encoding, chunk.count)
        del self._missing[chunk.block, chunk.offset]
        # The rank after this one made the mean: the way around ends here.
        return [] if owner == (self._rank + 1) % self._size else [Forward(arrived)]

    @property
    def _encoding(self) -> Encoding:
        return self.call.encoding(self.policy)

    @property
    def _answer(self) -> Encoding:
        return self.call.answer_encoding(self.policy)

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

    def own_defect(self, block: int) -> Faulty:
        """This rank's own block has a value that must not be sent: names the first one."""
        bad = bad_value_of(self._own[block], self._encoding)
        assert bad is not None, "a value that was not finite has become so: the block was changed"
        return Faulty(bad.failure(self.assigned.key, self._rank, block))

    def _defect(self, segment: Segment, wrong: NotFinite) -> Faulty:
        """A sum is not finite: says whose fault that is."""
        if wrong.source is Source.OWN:
            return self.own_defect(segment.block)
        value = describe_value(wrong.value)
        if wrong.source is Source.CAME:
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
