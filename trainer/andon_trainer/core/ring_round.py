"""One rank's part in one exchange of a ring: headers first, then chunks.

Theory of operation. Each rank first sends its header: its weight, and which call it makes. Headers
go around once, so after N-1 hops every rank knows all weights, and that all made the same call.
Only then do chunks leave. So a rank that receives a chunk already has every header, since they came
before it on the same stream, and never has to store chunks while headers wait behind them. After a
fault this rank sends nothing more of the round: nobody can complete it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from andon.protocol.encoding import Encoding
from andon.protocol.layout import Layout
from andon.protocol.messages import EnterRound, Operation, RingChunk, RingHeader, RingStage
from andon.protocol.ring import normalize_weights
from andon.protocol.run_settings import Policy
from andon.protocol.sums import sum_in_order
from andon.wire.checksums import is_intact
from andon_trainer.core.calls import Call, Floats
from andon_trainer.core.events import Assigned, AveragesComplete
from andon_trainer.core.ring_landing import Arrived, Landing, Landings
from andon_trainer.core.ring_mean import Faulty, Forward, RingEffect, RingMean, RingViolation, Send

__all__ = ["RingRound"]


@dataclass(slots=True)
class RingRound:
    """One exchange of a round, at one rank. Every method returns what is to be done."""

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
    """Whether this rank has received all that it is to receive."""
    landings: Landings = field(init=False)
    """Where chunks may land while they are received; empty until all headers are here."""
    _headers: dict[int, RingHeader] = field(default_factory=dict)
    _mean: RingMean | None = None
    """Set once all headers are here, unless all abstain or the call is a broadcast."""
    _agreed: bool = False
    """Whether all headers are here."""
    _made: dict[int, tuple[Floats, bool]] = field(default_factory=dict)
    """Blocks that backward made before all headers were here, and whether they keep the loss."""
    _missing_data: int = 0
    """Bytes of the broadcast that have not arrived."""
    _data_given: bool = False

    def __post_init__(self) -> None:
        """Lets nothing land yet."""
        self.landings = Landings(self.assigned.key, self.call.sequence, self.checked)

    @property
    def own_header(self) -> RingHeader:
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
        """Size of the messages that wait for this rank's own blocks."""
        return 0 if self._mean is None or self.failed else self._mean.waiting_bytes

    def begin(self) -> list[RingEffect]:
        """Sends this rank's header."""
        header = self.own_header
        sent: list[RingEffect] = [] if self._size == 1 else [Send(header)]
        return sent + self._guarded(lambda: self._take_header(header))

    def submit(self, block: int, flat: Floats, *, keeps_loss: bool = False) -> list[RingEffect]:
        """Takes this rank's block. Unless its encoding is float32, it was checked for bad values.

        With `keeps_loss` each element becomes what the encoding lost of it.
        """
        mean = self._mean
        if mean is None:
            self._made[block] = flat, keeps_loss
            return []
        return self._guarded(lambda: mean.give(block, flat, keeps_loss=keeps_loss))

    def refuse(self, block: int) -> list[RingEffect]:
        """This rank's own block has a value that is not finite, which was about to be sent."""
        mean = self._mean
        assert mean is not None, "nothing is sent before all headers are here"

        def found() -> list[RingEffect]:
            raise mean.own_defect(block)

        return self._guarded(found)

    def submit_data(self) -> list[RingEffect]:
        """Lets rank 0's bytes leave."""
        self._data_given = True
        return self._guarded(self._give_data) if self._agreed else []

    def receive(self, arrived: Arrived) -> list[RingEffect]:
        """Takes a header or a chunk from the rank before.

        Raises:
            RingViolation: it breaks the protocol.
        """
        message = arrived.message
        assert not isinstance(message, EnterRound)
        if message.sequence != self.call.sequence:
            raise RingViolation(
                f"exchange {message.sequence} in the midst of exchange {self.call.sequence}"
            )
        if isinstance(message, RingHeader):
            return self._guarded(lambda: self._receive_header(message, arrived))
        return self._guarded(lambda: self._receive_chunk(message, arrived))

    @property
    def _size(self) -> int:
        return self.assigned.world_size

    @property
    def _rank(self) -> int:
        return self.assigned.rank

    def _guarded(self, act: Callable[[], list[RingEffect]]) -> list[RingEffect]:
        """Runs `act`, and adds AveragesComplete or the fault. After a fault it runs nothing."""
        if self.failed:
            return []
        try:
            return act() + self._completed()
        except Faulty as faulty:
            self.failed = True
            return [faulty.failed]

    def _completed(self) -> list[RingEffect]:
        means_missing = self._mean is not None and not self._mean.whole
        if self.complete or not self._agreed or means_missing or self._missing_data:
            return []
        self.complete = True
        # Summed in rank order, so that every rank reports the same float (rule 15).
        total = sum_in_order(self._headers[rank].weight for rank in range(self._size))
        return [AveragesComplete(self.assigned.key, total, self._size)]

    # ------------------------------------------------------------------ headers

    def _receive_header(self, header: RingHeader, arrived: Arrived) -> list[RingEffect]:
        if header.rank >= self._size or header.rank in self._headers:
            raise RingViolation(
                f"a second header of rank {header.rank}, or of no rank of the round"
            )
        # The rank after this one made it: its way around ends here.
        goes_on = header.rank != (self._rank + 1) % self._size
        passed: list[RingEffect] = [Forward(arrived)] if goes_on else []
        # In this order: the header leaves before the chunks that it lets leave. So the next rank
        # has all headers before any chunk.
        return passed + self._take_header(header)

    def _take_header(self, header: RingHeader) -> list[RingEffect]:
        self._headers[header.rank] = header
        if header.agreed_fields != self.own_header.agreed_fields:
            raise Faulty.protocol(
                self.assigned.key,
                f"rank {self._rank} called {self.call.name} as call {self.call.sequence + 1} of "
                f"the step, and rank {header.rank} something else, or with other tensors: all "
                "workers make the same calls in the same order",
            )
        return self._agree() if len(self._headers) == self._size else []

    def _agree(self) -> list[RingEffect]:
        """All headers are here: what was made before may leave."""
        try:
            shares = normalize_weights(
                tuple(self._headers[rank].weight for rank in range(self._size))
            )
        except ValueError as error:
            raise Faulty.protocol(self.assigned.key, str(error)) from None
        self._agreed = True
        if self.call.operation is Operation.BROADCAST:
            if shares.factors[0] is None or shares.contributors > 1:
                raise Faulty.protocol(self.assigned.key, "only rank 0 may give to a broadcast")
            assert self.call.data is not None
            self._missing_data = self.call.data.size
            return self._give_data() if self._data_given else []
        if not shares.contributors:
            # Every rank abstains: the mean is zero, and nothing travels (rule 15).
            for block in self.call.blocks:
                self.averages[block].fill(0.0)
            return []
        self._mean = RingMean(
            self.assigned, self.call, self.policy, shares, self.averages, self.landings
        )
        self._mean.lay_out(self.layout)
        made, self._made = self._made, {}
        return [
            effect
            for block, (flat, keeps_loss) in made.items()
            for effect in self._mean.give(block, flat, keeps_loss=keeps_loss)
        ]

    # ------------------------------------------------------------------ chunks

    def _receive_chunk(self, chunk: RingChunk, arrived: Arrived) -> list[RingEffect]:
        if not self._agreed:
            raise RingViolation("a chunk before the headers of all ranks")
        # Before anything is done with it, and also if it is only passed on: otherwise the fault
        # would be found further along, and the wrong link would be blamed.
        self._require_intact(chunk, arrived.landing)
        if chunk.stage is RingStage.BROADCAST:
            return self._receive_data(chunk, arrived)
        if self._mean is None:
            raise RingViolation("numbers in an exchange that has none")
        return self._mean.receive(chunk, arrived)

    def _require_intact(self, chunk: RingChunk, landing: Landing | None) -> None:
        """Raises Faulty if a chunk does not match its checksum."""
        if not self.checked:
            return
        if chunk.crc32c is None:
            # Allowed if some rank can't make checksums, and a chunk is passed on as it was made.
            if all(header.crc32c for header in self._headers.values()):
                raise RingViolation("a chunk without a checksum, though all ranks make them")
            return
        # What has landed was summed up on the way.
        intact = is_intact(chunk) if landing is None else chunk.crc32c == landing.crc32c
        if not intact:
            before = (self._rank - 1) % self._size
            broadcast = chunk.stage is RingStage.BROADCAST
            raise Faulty.corrupt(chunk, before, self._rank, bytes_=broadcast)

    def _give_data(self) -> list[RingEffect]:
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

    def _receive_data(self, chunk: RingChunk, arrived: Arrived) -> list[RingEffect]:
        """Stores bytes of rank 0 and passes them on."""
        into = self.call.data
        if into is None:
            raise RingViolation("bytes in an exchange that is no broadcast")
        offset = into.size - self._missing_data
        where = (chunk.offset, chunk.encoding)
        if where != (offset, Encoding.UINT8) or not 0 < chunk.count <= self._missing_data:
            raise RingViolation(f"{chunk.count} bytes at {chunk.offset} of a broadcast")
        self._missing_data -= chunk.count
        # The bytes go all the way around. Back at rank 0 they prove that every rank has them.
        if self._rank == 0:
            return []
        into[offset : offset + chunk.count] = np.frombuffer(chunk.payload, dtype=np.uint8)
        return [Forward(arrived)]
