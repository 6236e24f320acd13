"""The collector: gathers the averages of one exchange until all of them are here.

Theory of operation. The receiving threads of one or more streams give it what they read. It writes
averages into one vector a block, or finds them already in shared memory, and puts one event into
the inbox: when the last average is here, or when none will come. Different threads never write to
the same elements, so only the count of what is missing needs a lock.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from andon.protocol.encoding import Encoding, decode_into
from andon.protocol.layout import Layout
from andon.protocol.messages import (
    AveragedBlock,
    BlockFault,
    BlockFaultKind,
    CorruptChunk,
    Operation,
    Response,
    RoundAborted,
    RoundOpened,
    StaleRound,
    TreeNode,
)
from andon.protocol.records import Key
from andon.wire.frames import FrameError
from andon_trainer.core.calls import Call, Floats
from andon_trainer.core.events import AveragesComplete, ExchangeFailed
from andon_trainer.exchange.path import Inbox

__all__ = ["Collector", "OpenCall", "SharedAverages"]

_FAULTS = {
    BlockFaultKind.NON_FINITE: "NON_FINITE_GRADIENT",
    BlockFaultKind.NON_FINITE_AVERAGE: "NON_FINITE_AVERAGE",
    BlockFaultKind.ENCODING_OVERFLOW: "ENCODING_OVERFLOW",
    BlockFaultKind.INCONSISTENT: "PROTOCOL",
}


class SharedAverages(Protocol):
    """Memory that the reducer writes averages into, and this worker only reads."""

    averages: list[Floats]
    """One vector a block."""

    def holds(self, average: AveragedBlock) -> bool:
        """Whether a message's average is at its place in the memory."""


@dataclass(slots=True)
class OpenCall:
    """One call that is being exchanged. Once it is begun, only the collector writes to it."""

    key: Key
    rank: int
    world_size: int
    weight: float
    call: Call
    missing: int
    """Elements, or bytes of a broadcast, whose averages are not here."""
    zeros_missing: int = 1
    """If every rank abstains: how many reducers have not said so yet."""
    total_weight: float | None = None
    mispaired: bool = False
    """Whether another rank made another call. That is reported once."""
    operation: Operation | None = field(init=False)
    """The call's, which every chunk is asked for."""

    def __post_init__(self) -> None:
        """Asks the call."""
        self.operation = self.call.operation

    @property
    def contributions(self) -> list[tuple[float, TreeNode | None]]:
        """Weight and node of each contribution of this worker, in the order of sending."""
        if not self.call.nodes:
            return [(self.weight, None)]
        return [(part.weight, part.node) for part in self.call.nodes]


class Collector:
    """The receiving half of an exchange. Any thread may give it messages."""

    def __init__(self, layout: Layout, inbox: Inbox) -> None:
        """Allocates nothing until averages are received over a wire."""
        self._layout = layout
        self._inbox = inbox
        self._own: list[Floats] = []
        self._shared: SharedAverages | None = None
        self._averages: list[Floats] | None = None
        self._open: OpenCall | None = None
        self._lock = threading.Lock()

    @property
    def averages(self) -> list[Floats]:
        """One vector a block."""
        if self._averages is None:
            self._averages = self._present_vectors()
        return self._averages

    def read_from(self, shared: SharedAverages | None) -> None:
        """Reads averages where a reducer wrote them; None: copies them out of messages."""
        self._shared = shared
        self._averages = None

    def begin(self, open_call: OpenCall) -> None:
        """Collects for a call."""
        # Here, on the training thread: two receiving threads must not both make vectors. And anew
        # for each call: `_clear` may have put zeros in the place of shared averages.
        self._averages = self._present_vectors()
        # Last: a receiving thread that sees the call writes to its vectors.
        self._open = open_call

    def _present_vectors(self) -> list[Floats]:
        if self._shared is not None:
            return self._shared.averages
        if not self._own:
            self._own = [np.zeros(block.elements, np.float32) for block in self._layout.blocks]
        return self._own

    def end(self) -> None:
        """Collects no more."""
        self._open = None

    def place_of(self, message: Response, size: int) -> memoryview | None:
        """Where an average's bytes belong, before they are read; None: `receive` copies them.

        Whoever writes there must give the message to `receive` next, as placed.
        """
        current = self._open
        if (
            current is None
            or self._shared is not None
            or not isinstance(message, AveragedBlock)
            or (message.key, message.sequence) != (current.key, current.call.sequence)
            or message.encoding is not Encoding.FLOAT32
            or current.call.data is not None
            or current.mispaired
            or _is_of_another_call(message, current)
        ):
            return None
        assert self._averages is not None
        average = self._averages[message.block]
        place = average[message.offset : message.offset + message.count]
        # Shorter if it lies beyond the block, which `receive` refuses.
        return place.view(np.uint8).data if place.nbytes == size else None

    def receive(self, message: Response, *, placed: bool = False) -> None:
        """Takes a message of a stream; `placed`: its payload is where `place_of` said.

        Raises:
            FrameError: it breaks the protocol, and the stream is of no use any more.
        """
        # Read once: the training thread may end the call at any moment.
        current = self._open
        # What is still on its way for a void round has an older key, and is dropped.
        if current is None or isinstance(message, RoundOpened) or message.key != current.key:
            return
        match message:
            case AveragedBlock():
                self._average(message, current, placed=placed)
            case BlockFault():
                self._inbox.put(_fault(message, current))
            case StaleRound():
                self._inbox.put(
                    ExchangeFailed(
                        key=message.key,
                        kind="STALE_ROUND",
                        message="the reducer has seen a greater key",
                        greatest=message.greatest,
                    )
                )
            case RoundAborted(corrupt=None):
                self._inbox.put(_lost(message.key, message.message))
            case RoundAborted(corrupt=CorruptChunk() as corrupt):
                self._inbox.put(
                    ExchangeFailed(
                        key=message.key,
                        kind="CORRUPT_CHUNK",
                        message=message.message,
                        rank=corrupt.rank,
                        block=corrupt.block if current.call.blocks else None,
                        element=corrupt.element,
                    )
                )

    def lost(self, message: str) -> None:
        """A stream is gone."""
        current = self._open
        if current is not None:
            self._inbox.put(_lost(current.key, message))

    def refuse_corrupt(self, message: AveragedBlock) -> None:
        """An average does not match its checksum: the round can't be finished."""
        current = self._open
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

    def _average(self, message: AveragedBlock, current: OpenCall, *, placed: bool) -> None:
        call = current.call
        if message.sequence != call.sequence or current.mispaired:
            return
        if _is_of_another_call(message, current):
            current.mispaired = True
            self._inbox.put(_mispaired(current))
            return
        # Stored before it is counted: whoever counts the last one announces that all are here.
        if message.count and not placed:
            self._store(message, call)
        elif not message.count:
            self._clear(call)
        # True for one thread only, so the event is put once.
        if self._count(message, current):
            assert current.total_weight is not None
            self._inbox.put(AveragesComplete(current.key, current.total_weight, message.world_size))

    def _count(self, message: AveragedBlock, current: OpenCall) -> bool:
        """Counts an average that is stored; returns whether it was the last one."""
        with self._lock:
            # Rule 15: all averages of a round agree on the weight and on the roster's size.
            if current.total_weight is None:
                current.total_weight = message.total_weight
            if (message.total_weight, message.world_size) != (
                current.total_weight,
                current.world_size,
            ):
                raise FrameError("averages of one round disagree on weight or roster")
            if message.count:
                current.missing -= message.count
                return current.missing == 0
            # Every rank abstained, and one reducer says so for all of its elements.
            current.zeros_missing -= 1
            if current.zeros_missing:
                return False
            # Nothing more of the call comes: `StarExchange.end` and the watch over lanes go by
            # this.
            current.missing = 0
            return True

    def _clear(self, call: Call) -> None:
        """Every rank abstained: zeros everywhere."""
        if self._shared is not None:
            # Shared averages are mapped read-only: to write there would end the process.
            self._averages = list(self.averages)
            for block in call.blocks:
                self._averages[block] = np.zeros_like(self._averages[block])
            return
        for block in call.blocks:
            self.averages[block].fill(0.0)

    def _store(self, message: AveragedBlock, call: Call) -> None:
        """Puts one chunk where it belongs."""
        start, stop = message.offset, message.offset + message.count
        if call.data is not None:
            call.data[start:stop] = np.frombuffer(message.payload, dtype=np.uint8)
            return
        if self._shared is not None:
            if not self._shared.holds(message):
                raise FrameError("an average is not where it must be in the shared memory")
            return
        assert self._averages is not None
        average = self._averages[message.block]
        if stop > average.size:
            raise FrameError(f"an average lies beyond block {message.block}")
        try:
            decode_into(message.payload, message.encoding, average[start:stop])
        except ValueError as error:
            raise FrameError(f"an average that can't be read: {error}") from None


def _is_of_another_call(message: AveragedBlock, current: OpenCall) -> bool:
    """Whether another rank called something else, so that this answers a call not made here."""
    call = current.call
    if message.count == 0:
        return call.data is not None  # Rank 0 never abstains from a broadcast.
    if message.operation is not current.operation:
        return True
    if call.data is None:
        return message.block not in call.blocks
    stop = message.offset + message.count
    head = call.data[message.offset : min(stop, call.head_bytes)]
    return stop > call.data.size or bytes(head) != bytes(message.payload[: head.size])


def _mispaired(current: OpenCall) -> ExchangeFailed:
    return ExchangeFailed(
        key=current.key,
        kind="PROTOCOL",
        message=f"rank {current.rank} called {current.call.name} as call "
        f"{current.call.sequence + 1} of the step, and another rank something else, or with other "
        "tensors: all workers make the same calls in the same order",
    )


def _fault(message: BlockFault, current: OpenCall) -> ExchangeFailed:
    return ExchangeFailed(
        key=message.key,
        kind=_FAULTS[message.kind],
        message=message.message,
        rank=message.rank,
        block=message.block if current.call.blocks else None,
        element=message.element,
        value=message.value,
    )


def _lost(key: Key, message: str) -> ExchangeFailed:
    return ExchangeFailed(key=key, kind="DATA_STREAM_LOST", message=message)
