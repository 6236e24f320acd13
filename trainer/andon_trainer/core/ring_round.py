"""A rank's part in one exchange of a ring: terms first, then chunks. No stream, no thread.

Theory of operation. Each rank first tells its terms, which go around once: after N-1 hops all know
all weights, and that all called the same. Only then do chunks leave. So whoever gets a chunk has
all terms already, since they came before it on the same stream, and never has to keep chunks for
the sake of terms that wait behind them. After a fault nothing more of the round is sent: nobody can
complete it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from andon.protocol.encoding import Encoding
from andon.protocol.layout import Layout
from andon.protocol.messages import Operation, RingChunk, RingHeader, RingStage
from andon.protocol.ring import normalize_weights
from andon.protocol.run_settings import Policy
from andon.wire.checksums import is_intact
from andon_trainer.core.calls import Call
from andon_trainer.core.events import Assigned, AveragesComplete
from andon_trainer.core.ring_effects import Effect, Faulty, Forward, Send, Violation
from andon_trainer.core.ring_mean import RingMean
from andon_trainer.exchange.path import Floats

__all__ = ["RingRound"]


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
    checked: bool = False
    """Whether the chunks that this rank makes have checksums."""
    failed: bool = False
    """Whether this rank sends nothing more of the round."""
    complete: bool = False
    """Whether this rank has all that it is to get."""
    _terms: dict[int, RingHeader] = field(default_factory=dict)
    _mean: RingMean | None = None
    """Once all terms are here, unless all abstain or rank 0 alone gives bytes."""
    _agreed: bool = False
    """Whether all terms are here."""
    _made: dict[int, Floats] = field(default_factory=dict)
    """Blocks that were made before all terms were here."""
    _missing_data: int = 0
    """Bytes of the broadcast that did not come here yet."""
    _data_given: bool = False

    @property
    def own_terms(self) -> RingHeader:
        """What this rank gives to the exchange."""
        call, data = self.call, self.call.data
        return RingHeader(
            key=self.assigned.key,
            rank=self.assigned.rank,
            weight=self.weight,
            sequence=call.sequence,
            operation=call.operation,
            first_block=call.blocks.start,
            stop_block=call.blocks.stop,
            data_bytes=0 if data is None else data.size,
            data_head=b"" if data is None else data[: call.head_bytes].tobytes(),
            crc32c=self.checked,
        )

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the messages that wait for this rank's own blocks."""
        return 0 if self._mean is None or self.failed else self._mean.waiting_bytes

    def begin(self) -> list[Effect]:
        """Tells this rank's terms."""
        terms = self.own_terms
        told: list[Effect] = [] if self._size == 1 else [Send(terms)]
        return told + self._guarded(lambda: self._take_terms(terms))

    def submit(self, block: int, flat: Floats) -> list[Effect]:
        """This rank's block is made, and was looked at: all its elements are finite."""
        mean = self._mean
        if mean is None:
            self._made[block] = flat
            return []
        return self._guarded(lambda: mean.give(block, flat))

    def submit_data(self) -> list[Effect]:
        """Rank 0's bytes may leave."""
        self._data_given = True
        return self._guarded(self._give_data) if self._agreed else []

    def receive(self, message: RingHeader | RingChunk, data: bytes) -> list[Effect]:
        """Takes a message of the rank before; `data` is its bytes.

        Raises:
            Violation: it can't be.
        """
        if message.sequence != self.call.sequence:
            raise Violation(
                f"exchange {message.sequence} in the midst of exchange {self.call.sequence}"
            )
        if isinstance(message, RingHeader):
            return self._guarded(lambda: self._receive_terms(message, data))
        return self._guarded(lambda: self._receive_chunk(message, data))

    @property
    def _size(self) -> int:
        return self.assigned.world_size

    @property
    def _rank(self) -> int:
        return self.assigned.rank

    def _guarded(self, act: Callable[[], list[Effect]]) -> list[Effect]:
        """What `act` answers, and that all is here; or what is wrong, and nothing after it."""
        if self.failed:
            return []
        try:
            return act() + self._completed()
        except Faulty as faulty:
            self.failed = True
            return [faulty.failed]

    def _completed(self) -> list[Effect]:
        means_missing = self._mean is not None and not self._mean.whole
        if self.complete or not self._agreed or means_missing or self._missing_data:
            return []
        self.complete = True
        total = sum((self._terms[rank].weight for rank in range(self._size)), 0.0)
        return [AveragesComplete(self.assigned.key, total, self._size)]

    # ------------------------------------------------------------------ terms

    def _receive_terms(self, terms: RingHeader, data: bytes) -> list[Effect]:
        if terms.rank >= self._size or terms.rank in self._terms:
            raise Violation(f"the terms of rank {terms.rank} again, or of no rank of the round")
        goes_on = terms.rank != (self._rank + 1) % self._size
        passed: list[Effect] = [Forward(data)] if goes_on else []
        return passed + self._take_terms(terms)

    def _take_terms(self, terms: RingHeader) -> list[Effect]:
        self._terms[terms.rank] = terms
        if terms.what != self.own_terms.what:
            raise Faulty.protocol(
                self.assigned.key,
                f"rank {self._rank} called {self.call.name} as call {self.call.sequence + 1} of "
                f"the step, and rank {terms.rank} something else, or with other tensors: all "
                "workers make the same calls in the same order",
            )
        return self._agree() if len(self._terms) == self._size else []

    def _agree(self) -> list[Effect]:
        """All terms are here: what was made before may leave."""
        try:
            shares = normalize_weights(
                tuple(self._terms[rank].weight for rank in range(self._size))
            )
        except ValueError as error:
            raise Faulty.protocol(self.assigned.key, str(error)) from None
        self._agreed = True
        if self.call.operation is Operation.BROADCAST:
            if shares.shares[0] is None or shares.contributors > 1:
                raise Faulty.protocol(self.assigned.key, "a broadcast is rank 0's, and its alone")
            assert self.call.data is not None
            self._missing_data = self.call.data.size
            return self._give_data() if self._data_given else []
        if not shares.contributors:
            for block in self.call.blocks:
                self.averages[block].fill(0.0)
            return []
        self._mean = RingMean(self.assigned, self.call, self.policy, shares, self.averages)
        self._mean.lay_out(self.layout)
        made, self._made = self._made, {}
        return [effect for block in made for effect in self._mean.give(block, made[block])]

    # ------------------------------------------------------------------ chunks

    def _receive_chunk(self, chunk: RingChunk, data: bytes) -> list[Effect]:
        if not self._agreed:
            raise Violation("a chunk before the terms of all ranks")
        self._require_intact(chunk)
        if chunk.stage is RingStage.BROADCAST:
            return self._receive_data(chunk, data)
        if self._mean is None:
            raise Violation("numbers in an exchange that has none")
        return self._mean.receive(chunk, data)

    def _require_intact(self, chunk: RingChunk) -> None:
        """Looks at a chunk's checksum, also of one that is only passed on: so the link is named."""
        if not self.checked:
            return  # This machine would need long for it.
        if chunk.crc32c is None:
            if all(terms.crc32c for terms in self._terms.values()):
                raise Violation("a chunk without a checksum, though all ranks make them")
        elif not is_intact(chunk):
            before = (self._rank - 1) % self._size
            broadcast = chunk.stage is RingStage.BROADCAST
            raise Faulty.corrupt(chunk, before, self._rank, bytes_=broadcast)

    def _give_data(self) -> list[Effect]:
        """Rank 0's bytes, in order."""
        data, step = self.call.data, self.policy.chunk_elements
        assert data is not None
        if self._size == 1:
            self._missing_data = 0
            return []
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
        """Bytes of rank 0 go all the way around: back there they tell that all have them."""
        into = self.call.data
        if into is None:
            raise Violation("bytes in an exchange that is no broadcast")
        offset = into.size - self._missing_data
        told = (chunk.offset, chunk.encoding)
        if told != (offset, Encoding.UINT8) or not 0 < chunk.count <= self._missing_data:
            raise Violation(f"{chunk.count} bytes at {chunk.offset} of a broadcast")
        self._missing_data -= chunk.count
        if self._rank == 0:
            return []
        into[offset : offset + chunk.count] = np.frombuffer(chunk.payload, dtype=np.uint8)
        return [Forward(data)]
