"""The wire exchange: a worker's blocks to the reducer, and the averages back.

Theory of operation. The training thread submits blocks in the layout's order while backward still
runs. Chunks wait in a queue as views of the block's buffer; gRPC's own sending thread takes them
out and frames them, so that a chunk is copied once, into its frame. A receiving thread writes the
averages into one buffer a block, and says into the inbox when the last one is there. The two
threads run at the same time (rule 16: workers read while they write).

A round that is over without its averages leaves frames behind, here and on the way. The reducer may
have no room for them as long as a rank is missing, and what is sent after them would wait behind
them for ever. So their stream ends with the round, and the next one opens another.

A round is one exchange of all blocks, or several `Call`s one after the other. Rank 0's bytes of a
broadcast travel as a block of single bytes, and arrive in the call's own buffer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from andon.encoding import Encoding, EncodingOverflow, decode, encode
from andon.frames import FrameError, frame_request, parse_response
from andon.halts import describe_value
from andon.layout import Chunk, Layout
from andon.messages import (
    Abstain,
    AveragedBlock,
    BlockFault,
    BlockGradient,
    FaultyBlockKind,
    OpenRound,
    Operation,
    RoundAborted,
    RoundOpened,
    StaleRound,
)
from andon.records import Key
from andon.terms import Policy
from andon_trainer.exchange.calls import Bytes, Call
from andon_trainer.exchange.events import Assigned, AveragesComplete, ExchangeFailed
from andon_trainer.exchange.inbox import Inbox
from andon_trainer.exchange.stream import BulkStream

__all__ = ["Round", "WireExchange"]

Floats = npt.NDArray[np.float32]

_FAULTS = {
    FaultyBlockKind.NON_FINITE: "NON_FINITE_GRADIENT",
    FaultyBlockKind.NON_FINITE_AVERAGE: "NON_FINITE_AVERAGE",
    FaultyBlockKind.ENCODING_OVERFLOW: "ENCODING_OVERFLOW",
    FaultyBlockKind.INCONSISTENT: "PROTOCOL",
}


@dataclass(slots=True)
class Round:
    """What is being exchanged of a round; the receiving thread alone counts what arrives."""

    key: Key
    rank: int
    world_size: int
    weight: float
    call: Call
    chunks_missing: int
    total_weight: float | None = None
    mispaired: bool = False
    """Whether another rank made another call; said once."""


class WireExchange:
    """One stream to one reducer. Used by one thread; `averages` are valid until `begin`."""

    def __init__(self, layout: Layout, policy: Policy, inbox: Inbox) -> None:
        """Makes the buffers of the averages; opens nothing yet."""
        self._layout = layout
        self._policy = policy
        self._inbox = inbox
        self._chunks = [
            list(layout.chunks_of(block, policy.chunk_elements))
            for block in range(len(layout.blocks))
        ]
        self._whole = Call(name="line.backward", blocks=range(len(layout.blocks)))
        self.averages: list[Floats] = [
            np.zeros(block.elements, dtype=np.float32) for block in layout.blocks
        ]
        self._round: Round | None = None
        self._stream: BulkStream | None = None
        self._failed = False
        self.first_sent: float | None = None
        """When the round's first block was sent, by time.perf_counter()."""
        self.sent_bytes = self.received_bytes = 0
        """Bytes of chunks so far; one thread sends and counts, another receives and counts."""

    def open(self, address: str, opening: OpenRound) -> None:
        """Opens the stream, in place of an older one.

        Raises:
            grpc.RpcError: the reducer can't be reached or refuses the stream.
        """
        self.close()
        self._stream = BulkStream(address, opening, self._received, self._lost)

    @property
    def is_open(self) -> bool:
        """Whether the stream is open, as far as this end knows."""
        return self._stream is not None and self._stream.alive

    @property
    def refused(self) -> bool:
        """Whether a block of the present exchange held a value that can't be sent."""
        return self._failed

    def begin(self, assigned: Assigned, weight: float, call: Call | None = None) -> None:
        """Starts an exchange of an assignment's round, to which this worker gives `weight`.

        The exchange is all blocks, or `call`: one of several, each awaited before the next.
        """
        self._failed = False
        self.first_sent = None
        call = call or self._whole
        if call.data is None:
            chunks = sum(len(self._chunks[block]) for block in call.blocks)
        else:
            chunks = -(-call.data.size // self._policy.chunk_elements)
        self._round = Round(assigned.key, assigned.rank, assigned.world_size, weight, call, chunks)

    def submit(self, block: int, flat: Floats) -> None:
        """Sends one block, checked; `flat` must stay as it is until the round is over.

        A value that is not finite, or beyond the encoding, is reported in place of the block, and
        nothing of this round is sent after it.
        """
        assert self._round is not None
        if self._failed or self._stream is None:
            return
        fault = self._defect(block, flat)
        if fault is not None:
            self._failed = True
            self._inbox.put(fault)
            return
        if self.first_sent is None:
            self.first_sent = time.perf_counter()
        for chunk in self._chunks[block]:
            self._stream.send(self._counted(self._framed(self._round, chunk, flat)))

    def submit_data(self) -> None:
        """Sends the call's bytes to all; rank 0 alone does."""
        assert self._round is not None
        data = self._round.call.data
        assert data is not None
        if self._stream is None:
            return
        self.first_sent = time.perf_counter()
        step = self._policy.chunk_elements
        for offset in range(0, data.size, step):
            chunk = Chunk(0, offset, min(step, data.size - offset))
            self._stream.send(self._counted(self._framed_data(self._round, chunk, data)))

    def abstain(self) -> None:
        """Gives nothing to the round, and still gets its averages."""
        assert self._round is not None
        if self._stream is None:
            return
        abstention = Abstain(
            key=self._round.key,
            rank=self._round.rank,
            world_size=self._round.world_size,
            sequence=self._round.call.sequence,
        )
        self._stream.send(lambda: frame_request(abstention))

    def end(self) -> None:
        """Forgets the round, and the stream with it if something of it may still be on the way."""
        current, self._round = self._round, None
        if current is not None and current.chunks_missing and self.first_sent is not None:
            self.close()

    def close(self) -> None:
        """Ends the stream."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _counted(self, frame: Callable[[], bytes]) -> Callable[[], bytes]:
        def counted() -> bytes:
            data = frame()
            self.sent_bytes += len(data)
            return data

        return counted

    def _framed(self, current: Round, chunk: Chunk, flat: Floats) -> Callable[[], bytes]:
        """The framing of one chunk, left to the sending thread."""

        def frame() -> bytes:
            return frame_request(
                BlockGradient(
                    key=current.key,
                    rank=current.rank,
                    world_size=current.world_size,
                    block=chunk.block,
                    offset=chunk.offset,
                    count=chunk.count,
                    weight=current.weight,
                    sequence=current.call.sequence,
                    payload=encode(
                        flat[chunk.offset : chunk.offset + chunk.count], self._policy.encoding
                    ),
                    encoding=self._policy.encoding,
                    answer_encoding=self._policy.answer_encoding,
                )
            )

        return frame

    @staticmethod
    def _framed_data(current: Round, chunk: Chunk, data: Bytes) -> Callable[[], bytes]:
        """The framing of one chunk of bytes, left to the sending thread."""

        def frame() -> bytes:
            return frame_request(
                BlockGradient(
                    key=current.key,
                    rank=current.rank,
                    world_size=current.world_size,
                    block=chunk.block,
                    offset=chunk.offset,
                    count=chunk.count,
                    weight=current.weight,
                    sequence=current.call.sequence,
                    operation=Operation.BROADCAST,
                    payload=data[chunk.offset : chunk.offset + chunk.count].data,
                    encoding=Encoding.UINT8,
                )
            )

        return frame

    def _defect(self, block: int, flat: Floats) -> ExchangeFailed | None:
        """A cheap look (a sum is finite only if its terms are), and an exact one if it trips."""
        assert self._round is not None
        with np.errstate(all="ignore"):
            finite = bool(np.isfinite(np.add.reduce(flat)))
        if not finite:
            wrong = np.flatnonzero(~np.isfinite(flat))
            if wrong.size:
                element = int(wrong[0])
                return self._fault("NON_FINITE_GRADIENT", block, element, float(flat[element]))
        if self._policy.encoding is not Encoding.FLOAT32:
            try:
                encode(flat, self._policy.encoding)
            except EncodingOverflow as overflow:
                return self._fault("ENCODING_OVERFLOW", block, overflow.element, overflow.value)
        return None

    def _fault(self, kind: str, block: int, element: int, value: float) -> ExchangeFailed:
        assert self._round is not None
        return ExchangeFailed(
            key=self._round.key,
            kind=kind,
            message="",
            rank=self._round.rank,
            block=block,
            element=element,
            value=describe_value(value),
        )

    def _received(self, data: bytes) -> None:
        """Runs on the receiving thread."""
        message = parse_response(data)
        if isinstance(message, AveragedBlock):
            self.received_bytes += len(data)
        current = self._round
        if current is None or isinstance(message, RoundOpened) or message.key != current.key:
            return
        match message:
            case AveragedBlock():
                self._average(message, current)
            case BlockFault():
                failed = ExchangeFailed(
                    key=message.key,
                    kind=_FAULTS[message.kind],
                    message=message.message,
                    rank=message.rank,
                    block=message.block if current.call.blocks else None,
                    element=message.element,
                    value=message.value,
                )
                self._inbox.put(failed)
            case StaleRound():
                failed = ExchangeFailed(
                    key=message.key,
                    kind="STALE_ROUND",
                    message="the reducer has seen a greater key",
                    greatest=message.greatest,
                )
                self._inbox.put(failed)
            case RoundAborted():
                failed = ExchangeFailed(
                    key=message.key, kind="DATA_STREAM_LOST", message=message.message
                )
                self._inbox.put(failed)

    def _average(self, message: AveragedBlock, current: Round) -> None:
        call = current.call
        if message.sequence != call.sequence or current.mispaired:
            return
        if _is_of_another_call(message, call):
            current.mispaired = True
            self._inbox.put(_mispaired(current))
            return
        if current.total_weight is None:
            current.total_weight = message.total_weight
        if (message.total_weight, message.world_size) != (
            current.total_weight,
            current.world_size,
        ):
            raise FrameError("averages of one round disagree on weight or roster")
        if message.count == 0:
            for block in call.blocks:
                self.averages[block].fill(0.0)
            current.chunks_missing = 0
        else:
            self._keep(message, call)
            current.chunks_missing -= 1
        if current.chunks_missing == 0:
            self._inbox.put(AveragesComplete(current.key, current.total_weight, message.world_size))

    def _keep(self, message: AveragedBlock, call: Call) -> None:
        """Puts one chunk where it belongs."""
        start, stop = message.offset, message.offset + message.count
        if call.data is not None:
            call.data[start:stop] = np.frombuffer(message.payload, dtype=np.uint8)
            return
        average = self.averages[message.block]
        if stop > average.size:
            raise FrameError(f"an average lies beyond block {message.block}")
        average[start:stop] = decode(message.payload, message.encoding)

    def _lost(self, message: str) -> None:
        """Runs on the receiving thread."""
        current = self._round
        if current is not None:
            self._inbox.put(
                ExchangeFailed(key=current.key, kind="DATA_STREAM_LOST", message=message)
            )


def _is_of_another_call(message: AveragedBlock, call: Call) -> bool:
    """Whether another rank called something else: its answer is not of what was called here."""
    if message.count == 0:
        return call.data is not None  # rank 0 never abstains from a broadcast
    if message.operation is not call.operation:
        return True
    if call.data is None:
        return message.block not in call.blocks
    stop = message.offset + message.count
    head = call.data[message.offset : min(stop, call.head_bytes)]
    return stop > call.data.size or bytes(head) != bytes(message.payload[: head.size])


def _mispaired(current: Round) -> ExchangeFailed:
    return ExchangeFailed(
        key=current.key,
        kind="PROTOCOL",
        message=f"rank {current.rank} called {current.call.name} as call "
        f"{current.call.sequence + 1} of the step, and another rank something else, or with other "
        "tensors: all workers make the same calls in the same order",
    )
