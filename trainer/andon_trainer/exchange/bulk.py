"""The wire exchange: a worker's blocks to the reducer, and the averages back.

Theory of operation. The training thread submits blocks in the layout's order while backward still
runs. Chunks wait in a queue as views of the block's buffer; gRPC's own sending thread takes them
out and frames them, so that a chunk is copied once, into its frame. A receiving thread writes the
averages into one buffer a block, and says into the inbox when the last one is there. The two
threads run at the same time (rule 16: workers read while they write). Frames of a void key may
still leave: a key is never used twice, so they can do no harm.
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
    RoundAborted,
    RoundOpened,
    StaleRound,
)
from andon.records import Key
from andon.terms import Policy
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
    """The round that is being exchanged; the receiving thread alone counts what arrives."""

    key: Key
    rank: int
    world_size: int
    weight: float
    chunks_missing: int
    total_weight: float | None = None


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
        self._chunk_count = sum(map(len, self._chunks))
        self.averages: list[Floats] = [
            np.zeros(block.elements, dtype=np.float32) for block in layout.blocks
        ]
        self._round: Round | None = None
        self._stream: BulkStream | None = None
        self._failed = False
        self.first_sent: float | None = None
        """When the round's first block was sent, by time.perf_counter()."""

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

    def begin(self, assigned: Assigned, weight: float) -> None:
        """Starts the round of an assignment, to which this worker gives `weight`."""
        self._failed = False
        self.first_sent = None
        self._round = Round(
            assigned.key, assigned.rank, assigned.world_size, weight, self._chunk_count
        )

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
            self._stream.send(self._framed(self._round, chunk, flat))

    def abstain(self) -> None:
        """Gives nothing to the round, and still gets its averages."""
        assert self._round is not None
        if self._stream is None:
            return
        abstention = Abstain(
            key=self._round.key, rank=self._round.rank, world_size=self._round.world_size
        )
        self._stream.send(lambda: frame_request(abstention))

    def end(self) -> None:
        """Forgets the round: averages that still arrive are dropped."""
        self._round = None

    def close(self) -> None:
        """Ends the stream."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

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
                    payload=encode(
                        flat[chunk.offset : chunk.offset + chunk.count], self._policy.encoding
                    ),
                    encoding=self._policy.encoding,
                    answer_encoding=self._policy.answer_encoding,
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
                    block=message.block,
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
        if current.total_weight is None:
            current.total_weight = message.total_weight
        if (message.total_weight, message.world_size) != (
            current.total_weight,
            current.world_size,
        ):
            raise FrameError("averages of one round disagree on weight or roster")
        if message.count == 0:
            for average in self.averages:
                average.fill(0.0)
            current.chunks_missing = 0
        else:
            average = self.averages[message.block]
            if message.offset + message.count > average.size:
                raise FrameError(f"an average lies beyond block {message.block}")
            average[message.offset : message.offset + message.count] = decode(
                message.payload, message.encoding
            )
            current.chunks_missing -= 1
        if current.chunks_missing == 0:
            self._inbox.put(AveragesComplete(current.key, current.total_weight, message.world_size))

    def _lost(self, message: str) -> None:
        """Runs on the receiving thread."""
        current = self._round
        if current is not None:
            self._inbox.put(
                ExchangeFailed(key=current.key, kind="DATA_STREAM_LOST", message=message)
            )
