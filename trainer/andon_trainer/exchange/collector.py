"""The collector: what comes back of a round, until it is whole.

Streams' receiving threads give it what they read. It writes averages into one buffer a block, and
says into the inbox when the last one is there, or that none will be.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from andon.protocol.encoding import decode_into
from andon.protocol.layout import Layout
from andon.protocol.messages import (
    AveragedBlock,
    BlockFault,
    BlockFaultKind,
    CorruptChunk,
    Response,
    RoundAborted,
    RoundOpened,
    StaleRound,
)
from andon.protocol.records import Key
from andon.wire.frames import FrameError
from andon_trainer.core.calls import Call, Floats
from andon_trainer.core.events import AveragesComplete, ExchangeFailed
from andon_trainer.exchange.inbox import Inbox

__all__ = ["Collector", "Round"]

_FAULTS = {
    BlockFaultKind.NON_FINITE: "NON_FINITE_GRADIENT",
    BlockFaultKind.NON_FINITE_AVERAGE: "NON_FINITE_AVERAGE",
    BlockFaultKind.ENCODING_OVERFLOW: "ENCODING_OVERFLOW",
    BlockFaultKind.INCONSISTENT: "PROTOCOL",
}


@dataclass(slots=True)
class Round:
    """What is being exchanged of a round; once it is begun, the collector alone writes to it."""

    key: Key
    rank: int
    world_size: int
    weight: float
    call: Call
    missing: int
    """Elements, or bytes of a broadcast, whose averages are not here."""
    zeros_missing: int = 1
    """How many reducers say so if every rank abstains."""
    total_weight: float | None = None
    mispaired: bool = False
    """Whether another rank made another call; said once."""


class Collector:
    """The receiving half of an exchange. Any thread may give it messages."""

    def __init__(self, layout: Layout, inbox: Inbox) -> None:
        """Makes the buffers of the averages."""
        self.averages: list[Floats] = [
            np.zeros(block.elements, dtype=np.float32) for block in layout.blocks
        ]
        self._inbox = inbox
        self._round: Round | None = None
        self._lock = threading.Lock()

    def begin(self, current: Round) -> None:
        """Collects for a round."""
        self._round = current

    def end(self) -> None:
        """Collects no more."""
        self._round = None

    def receive(self, message: Response) -> None:
        """Takes a message of a stream.

        Raises:
            FrameError: it can't be; the stream is of no use any more.
        """
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
            case RoundAborted(corrupt=None):
                self._inbox.put(_lost(message.key, message.message))
            case RoundAborted(corrupt=CorruptChunk() as corrupt):
                failed = ExchangeFailed(
                    key=message.key,
                    kind="CORRUPT_CHUNK",
                    message=message.message,
                    rank=corrupt.rank,
                    block=corrupt.block if current.call.blocks else None,
                    element=corrupt.element,
                )
                self._inbox.put(failed)

    def lost(self, message: str) -> None:
        """A stream is gone."""
        current = self._round
        if current is not None:
            self._inbox.put(_lost(current.key, message))

    def refuse_corrupt(self, message: AveragedBlock) -> None:
        """An average does not match its checksum: the round can't be finished."""
        current = self._round
        if current is None:
            return
        self._inbox.put(
            ExchangeFailed(
                key=current.key,
                kind="CORRUPT_CHUNK",
                message=f"the average at element {message.offset} of block {message.block} does "
                "not match its CRC-32C: the network, or the memory of a machine, changed it on "
                f"its way to rank {current.rank}",
                rank=current.rank,
                block=message.block if current.call.blocks else None,
                element=message.offset,
            )
        )

    def _average(self, message: AveragedBlock, current: Round) -> None:
        call = current.call
        if message.sequence != call.sequence or current.mispaired:
            return
        if _is_of_another_call(message, call):
            current.mispaired = True
            self._inbox.put(_mispaired(current))
            return
        if message.count:
            self._keep(message, call)
        else:
            self._clear(call)
        with self._lock:
            if current.total_weight is None:
                current.total_weight = message.total_weight
            if (message.total_weight, message.world_size) != (
                current.total_weight,
                current.world_size,
            ):
                raise FrameError("averages of one round disagree on weight or roster")
            if message.count:
                current.missing -= message.count
                whole = current.missing == 0
            else:
                current.zeros_missing -= 1
                whole = current.zeros_missing == 0
                current.missing = 0 if whole else current.missing
        if whole:
            self._inbox.put(AveragesComplete(current.key, current.total_weight, message.world_size))

    def _clear(self, call: Call) -> None:
        """Every rank abstained: zeros everywhere."""
        for block in call.blocks:
            self.averages[block].fill(0.0)

    def _keep(self, message: AveragedBlock, call: Call) -> None:
        """Puts one chunk where it belongs."""
        start, stop = message.offset, message.offset + message.count
        if call.data is not None:
            call.data[start:stop] = np.frombuffer(message.payload, dtype=np.uint8)
            return
        average = self.averages[message.block]
        if stop > average.size:
            raise FrameError(f"an average lies beyond block {message.block}")
        decode_into(message.payload, message.encoding, average[start:stop])


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


def _lost(key: Key, message: str) -> ExchangeFailed:
    return ExchangeFailed(key=key, kind="DATA_STREAM_LOST", message=message)
