"""The wire exchange: a worker's blocks to the reducer, and the averages back.

Theory of operation. The training thread submits blocks in the layout's order while backward still
runs. Chunks wait in a queue as views of the block's buffer; gRPC's own sending thread takes them
out and frames them, so that a chunk is copied once, into its frame. A receiving thread gives what
comes to the collector. The two threads run at the same time (rule 16: workers read while they
write).

A round that is over without its averages leaves frames behind, here and on the way. The reducer may
have no room for them as long as a rank is missing, and what is sent after them would wait behind
them for ever. So their stream ends with the round, and the next one opens another.

If worker and reducer both can, each chunk has a checksum both ways. One that does not match voids
the round: nothing of it is kept, and the step is tried again.

A round is one exchange of all blocks, or several `Call`s one after the other. Rank 0's bytes of a
broadcast travel as a block of single bytes, and arrive in the call's own buffer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from andon.protocol.encoding import Encoding, encode
from andon.protocol.layout import Chunk, Layout
from andon.protocol.messages import Abstain, AveragedBlock, BlockGradient, OpenRound
from andon.protocol.run_settings import Policy
from andon.wire import checksums
from andon.wire.frames import frame_request, parse_response
from andon_trainer.core.calls import Bytes, Call, Floats
from andon_trainer.core.events import Assigned, ExchangeFailed
from andon_trainer.core.values import bad_value_of
from andon_trainer.exchange.collector import Collector, Round
from andon_trainer.exchange.inbox import Inbox
from andon_trainer.exchange.lane import Lane
from andon_trainer.exchange.stream import OPENING_S, BulkStream
from andon_trainer.exchange.traffic import Traffic

__all__ = ["ReducerUnfit", "WireExchange", "missing_of", "refused_block"]


class ReducerUnfit(ValueError):
    """A reducer that can't take what the policy asks for: to try again is no use."""


class WireExchange:
    """One stream to one reducer; an `Exchange`, or one lane of several."""

    def __init__(
        self,
        layout: Layout,
        policy: Policy,
        inbox: Inbox,
        lane: Lane | None = None,
        *,
        tls: Path | None = None,
    ) -> None:
        """Opens nothing yet.

        Args:
            layout: what is exchanged.
            policy: how.
            inbox: is told what comes of it.
            lane: what it carries; None: everything.
            tls: the folder of certificates; None: it is not encrypted.
        """
        self._tls = tls
        self._policy = policy
        self._inbox = inbox
        if lane is None:
            whole = [
                list(layout.chunks_of(block, policy.chunk_elements))
                for block in range(len(layout.blocks))
            ]
            lane = Lane(whole, Collector(layout, inbox), OPENING_S)
        self._chunks, self._collector = lane.chunks, lane.collector
        self._opening_s = lane.opening_s
        self._whole = Call(name="line.backward", blocks=range(len(layout.blocks)))
        self._round: Round | None = None
        self._stream: BulkStream | None = None
        self._checked = False
        """Whether chunks have checksums on the present stream."""
        self._failed = False
        self.first_sent: float | None = None
        self.sent_bytes = self.received_bytes = 0
        # One thread sends and counts, another receives and counts.

    def open(self, address: str, opening: OpenRound) -> None:
        """See `Exchange`."""
        self.close()

        def lost(why: str) -> None:
            self._collector.lost(f"the reducer at {address}: {why}")

        self._stream = BulkStream(
            address, opening, self._received, lost, opening_s=self._opening_s, tls=self._tls
        )
        self._refuse_small_payloads(address, self._stream.opened.max_payload_bytes)
        # Nothing that it speaks of comes before something is sent.
        self._checked = checksums.CAPABILITY in self._stream.opened.capabilities

    def _refuse_small_payloads(self, address: str, most: int) -> None:
        """Refuses a reducer that takes no payload as large as a chunk; `most` of 0 says nothing."""
        counts = (chunk.count for chunks in self._chunks for chunk in chunks)
        largest = max(counts, default=0) * self._policy.encoding.itemsize
        if not 0 < most < largest:
            return
        self.close()
        raise ReducerUnfit(
            f"the reducer at {address} takes payloads of {most} bytes, and this model's chunks "
            f"have {largest}: serve the line with a lower --chunk-elements, or the reducer with a "
            "higher --max-message-bytes"
        )

    @property
    def averages(self) -> list[Floats]:
        """See `Exchange`."""
        return self._collector.averages

    @property
    def traffic(self) -> Traffic:
        """See `Exchange`."""
        return Traffic.over("wire", self.sent_bytes, self.received_bytes)

    @property
    def is_open(self) -> bool:
        """See `Exchange`."""
        return self._stream is not None and self._stream.alive

    @property
    def refused(self) -> bool:
        """See `Exchange`."""
        return self._failed

    def begin(self, assigned: Assigned, weight: float, call: Call | None = None) -> None:
        """See `Exchange`."""
        call = call or self._whole
        missing = missing_of(call, self._chunks)
        current = Round(assigned.key, assigned.rank, assigned.world_size, weight, call, missing)
        self.carry(current)
        self._collector.begin(current)

    def carry(self, current: Round) -> None:
        """See `Carrier`."""
        self._failed = False
        self.first_sent = None
        self._round = current

    def submit(self, block: int, flat: Floats) -> None:
        """See `Exchange`."""
        assert self._round is not None
        if self._failed or self._stream is None:
            return
        refused = refused_block(self._round, block, flat, self._policy.encoding)
        if refused is not None:
            self._failed = True
            self._inbox.put(refused)
            return
        self.send(block, flat)

    def send(self, block: int, flat: Floats) -> None:
        """See `Carrier`."""
        assert self._round is not None
        if self._stream is None:
            return
        if self.first_sent is None:
            self.first_sent = time.perf_counter()
        for chunk in self._chunks[block]:
            self._stream.send(self._numbers(self._round, chunk, flat))

    def submit_data(self) -> None:
        """See `Exchange`."""
        assert self._round is not None
        data = self._round.call.data
        assert data is not None
        if self._stream is None:
            return
        self.first_sent = time.perf_counter()
        step = self._policy.chunk_elements
        for offset in range(0, data.size, step):
            chunk = Chunk(0, offset, min(step, data.size - offset))
            self._stream.send(self._bytes(self._round, chunk, data))

    def abstain(self) -> None:
        """See `Exchange`."""
        assert self._round is not None
        if self._stream is None:
            return
        abstention = Abstain(
            key=self._round.key,
            rank=self._round.rank,
            world_size=self._round.world_size,
            sequence=self._round.call.sequence,
        )
        self._stream.send(lambda: frame_request(abstention, checksums=self._checked))

    def end(self) -> None:
        """See `Exchange`; the stream goes too if something of the round may be on the way."""
        current, self._round = self._round, None
        self._collector.end()
        if current is not None and current.missing and self.first_sent is not None:
            self.close()

    def close(self) -> None:
        """Ends the stream."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _numbers(self, current: Round, chunk: Chunk, flat: Floats) -> Callable[[], bytes]:
        """The framing of one chunk of a block, left to the sending thread."""
        part, encoding = flat[chunk.offset : chunk.offset + chunk.count], self._policy.encoding
        answer = self._policy.answer_encoding
        return lambda: self._framed(
            _gradient(current, chunk, encode(part, encoding), encoding, answer)
        )

    def _bytes(self, current: Round, chunk: Chunk, data: Bytes) -> Callable[[], bytes]:
        """The framing of one chunk of a broadcast's bytes, left to the sending thread."""
        part = data[chunk.offset : chunk.offset + chunk.count].data
        return lambda: self._framed(_gradient(current, chunk, part, Encoding.UINT8))

    def _framed(self, gradient: BlockGradient) -> bytes:
        data = frame_request(gradient, checksums=self._checked)
        self.sent_bytes += len(data)
        return data

    def _received(self, data: bytes) -> None:
        """Runs on the receiving thread."""
        message = parse_response(data)
        if isinstance(message, AveragedBlock):
            self.received_bytes += len(data)
            # Before its key is looked at: a changed one would be dropped, and waited for for ever.
            if self._checked and not checksums.is_intact(message):
                self._collector.refuse_corrupt(message)
                return
        self._collector.receive(message)


def missing_of(call: Call, chunks: Sequence[Sequence[Chunk]]) -> int:
    """How many elements of `chunks`, or bytes, come back of a call."""
    if call.data is not None:
        return call.data.size
    return sum(chunk.count for block in call.blocks for chunk in chunks[block])


def refused_block(
    current: Round, block: int, flat: Floats, encoding: Encoding
) -> ExchangeFailed | None:
    """What is reported in place of a block that must not be sent; None if it may be."""
    defect = bad_value_of(flat, encoding)
    if defect is None:
        return None
    return ExchangeFailed(
        key=current.key,
        kind=defect.kind,
        message="",
        rank=current.rank,
        block=block,
        element=defect.element,
        value=defect.value,
    )


def _gradient(
    current: Round,
    chunk: Chunk,
    payload: memoryview,
    encoding: Encoding,
    answer: Encoding | None = None,
) -> BlockGradient:
    """One chunk of what this worker gives to a round."""
    operation = current.call.operation
    assert operation is not None
    return BlockGradient(
        key=current.key,
        rank=current.rank,
        world_size=current.world_size,
        block=chunk.block,
        offset=chunk.offset,
        count=chunk.count,
        weight=current.weight,
        sequence=current.call.sequence,
        operation=operation,
        payload=payload,
        encoding=encoding,
        answer_encoding=answer,
    )
