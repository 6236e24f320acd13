"""The relay: a worker's state on its way to another, a bounded number of pieces at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from andon.protocol.reasons import Reason
from andon_reducer.core.effects import CallRefusal
from andon_reducer.transport.admission import CallRefused

__all__ = ["Header", "Piece", "Relay", "RelayTransfer", "TransferId", "WantedState"]

TransferId = tuple[str, int]
"""Run and transfer."""


@dataclass(frozen=True, slots=True)
class Header:
    """What the sender announces before the state's first byte. `head` is (term, round)."""

    head: tuple[int, int]
    size_bytes: int
    sha256: bytes
    base_bytes: int = 0
    """How many of the last bytes are weights that are not trained."""
    base_sha256: bytes = b""


@dataclass(frozen=True, slots=True)
class WantedState:
    """What the receiver asks for: the state of `head`.

    After an interruption it already holds the first `offset` bytes of a state with `sha256`. It may
    hold the last bytes, too: those that no worker trains.
    """

    head: tuple[int, int]
    offset: int = 0
    sha256: bytes = b""
    base_sha256: bytes = b""
    shared_folder: bytes = b""
    file_name: str = ""
    """A file of its own that a sender which sees that folder may write to; empty: it has none."""

    def start_in(self, header: Header) -> int:
        """The first byte of the sender's state that the receiver lacks."""
        # Another sender may serialise the state of the same head differently. What the receiver
        # holds is of use only if it is the beginning of the very same bytes.
        same = self.sha256 == header.sha256 and self.offset <= header.size_bytes
        return self.offset if same else 0

    def left_out_of(self, header: Header) -> int:
        """How many of the state's last bytes the receiver holds already."""
        if not self.base_sha256 or self.base_sha256 != header.base_sha256:
            return 0
        # An earlier transfer may have brought a part of them.
        overlaps = self.start_in(header) > header.size_bytes - header.base_bytes
        return 0 if overlaps else header.base_bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """A message of the sender's, which is passed on as it is."""

    message: bytes
    file_bytes: int = 0
    """How many bytes of state lie in the receiver's file; 0: they are in the message."""


@dataclass(slots=True)
class RelayTransfer:
    """One state between its two ends. Each waits for the other, and the loss of one ends both.

    All methods run on one event loop. `_changed` wakes both ends whenever anything changes.
    """

    id: TransferId
    max_pieces: int
    patience_s: float
    header: Header | None = None
    """Set once the sender is there."""
    wanted: WantedState | None = None
    """Set once the receiver is there."""
    failure: CallRefusal | None = None
    done: bool = False
    """The receiver took everything."""
    _pieces: deque[Piece | None] = field(default_factory=deque)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def both(self) -> tuple[Header, range]:
        """Waits until both ends are there. Returns the header, and the bytes to send.

        Raises:
            CallRefused: the ends are of different heads, or one is gone, or did not come in time.
        """
        # Limited, since the other end may never hear of the transfer, and an end that waits here
        # gets no other message.
        try:
            async with asyncio.timeout(self.patience_s):
                await self._until(lambda: self.header is not None and self.wanted is not None)
        except TimeoutError:
            text = f"the other end of the transfer did not come within {self.patience_s:g} s"
            raise CallRefused(Reason.PEER_GONE, text) from None
        assert self.header is not None, "waited for"
        assert self.wanted is not None, "waited for"
        if self.header.head != self.wanted.head:
            text = "the two ends of the transfer are of different heads"
            raise CallRefused(Reason.PEER_GONE, text)
        stop = self.header.size_bytes - self.wanted.left_out_of(self.header)
        return self.header, range(self.wanted.start_in(self.header), stop)

    async def put(self, piece: Piece | None) -> None:
        """Passes a piece on as soon as there is room; None after the last.

        Raises:
            CallRefused: the receiver is gone.
        """
        # The back-pressure: the sender's call is not read meanwhile.
        await self._until(lambda: len(self._pieces) < self.max_pieces)
        self._pieces.append(piece)
        self._changed.set()

    async def get(self) -> Piece | None:
        """The next piece, or None after the last.

        Raises:
            CallRefused: the sender is gone.
        """
        await self._until(lambda: bool(self._pieces))
        piece = self._pieces.popleft()
        self._changed.set()
        return piece

    async def taken(self) -> None:
        """Waits until the receiver took everything.

        Raises:
            CallRefused: it is gone.
        """
        await self._until(lambda: self.done)

    async def lost(self) -> None:
        """Waits until the transfer fails.

        Raises:
            CallRefused: it failed.
        """
        await self._until(lambda: False)

    def finish(self) -> None:
        """The receiver took everything."""
        # Set before either end leaves: `leave` calls `fail`, which does nothing from now on.
        self.done = True
        self._changed.set()

    def fail(self, reason: Reason, message: str) -> None:
        """Ends the transfer at both ends, unless it is done."""
        if not self.done and self.failure is None:
            self.failure = CallRefusal(reason, message)
            # Nobody will take them, and the other end may keep the transfer for a while.
            self._pieces.clear()
            self._changed.set()

    def changed(self) -> None:
        """Wakes both ends."""
        self._changed.set()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while True:
            if self.failure is not None:
                raise CallRefused(self.failure.reason, self.failure.message)
            if condition():
                return
            # No change can be missed: nothing else runs between the check above and the wait. One
            # end may clear the event that was set for the other, but that end was already woken,
            # and checks its own condition when it runs.
            self._changed.clear()
            await self._changed.wait()


class Relay:
    """All transfers with at least one end connected to this reducer."""

    def __init__(self, max_pieces: int, *, patience_s: float) -> None:
        """Holds at most `max_pieces` pieces of a transfer; an end waits `patience_s` at most."""
        self._max_pieces = max_pieces
        self._patience_s = patience_s
        self._transfers: dict[TransferId, RelayTransfer] = {}

    def send(self, id_: TransferId, header: Header) -> RelayTransfer:
        """The transfer, now that its sender is here.

        Raises:
            CallRefused: it has a sender.
        """
        transfer = self._transfer(id_)
        # One sender: a second one would mix its pieces with those of the first.
        if transfer.header is not None:
            raise CallRefused(Reason.INVALID_MESSAGE, f"transfer {id_[1]} has a sender already")
        transfer.header = header
        transfer.changed()
        return transfer

    def receive(self, id_: TransferId, wanted: WantedState) -> RelayTransfer:
        """The transfer, now that its receiver is here.

        Raises:
            CallRefused: it has a receiver.
        """
        transfer = self._transfer(id_)
        if transfer.wanted is not None:
            raise CallRefused(Reason.INVALID_MESSAGE, f"transfer {id_[1]} has a receiver already")
        transfer.wanted = wanted
        transfer.changed()
        return transfer

    def leave(self, transfer: RelayTransfer, end: str) -> None:
        """One end is over. If the transfer is not done, it fails for the other end."""
        transfer.fail(Reason.PEER_GONE, f"the {end} of the transfer is gone")
        # The first end to leave frees the id. A second try under the same id may have begun by the
        # time the other one leaves, and must stay.
        if self._transfers.get(transfer.id) is transfer:
            del self._transfers[transfer.id]

    def close(self) -> None:
        """Ends all transfers: the reducer is going away."""
        for transfer in list(self._transfers.values()):
            transfer.fail(Reason.SERVICE_LEAVING, "the reducer is going away")

    def _transfer(self, id_: TransferId) -> RelayTransfer:
        transfer = self._transfers.get(id_)
        if transfer is None:
            transfer = self._transfers[id_] = RelayTransfer(id_, self._max_pieces, self._patience_s)
        return transfer
