"""A worker's TCP lanes: the two connections that carry a stream's messages in place of gRPC.

Both are opened before anything is sent, and then all messages of the stream travel over them. The
call of gRPC stays open: it ends the stream, and says why.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from andon.host.tls import host_of
from andon.protocol.limits import MAX_PAYLOAD_BYTES
from andon.protocol.messages import OpenRound, Request, Response, TcpOffer
from andon.tcp.connecting import TcpUnavailable, connect
from andon.tcp.proof import LaneDirection, LaneSession
from andon.tcp.receiving import FrameReader, TcpReceiver
from andon.tcp.sending import TcpSender
from andon.wire.fields import FrameError
from andon.wire.frames import parse_response_head, split_request, with_payload
from andon_trainer.exchange.channels import close_in_children
from andon_trainer.exchange.star.lane_watch import LaneCounts

__all__ = ["LaneEvents", "WorkerLanes"]


class Receives(Protocol):
    """Takes what came."""

    def __call__(self, message: Response, size: int, *, placed: bool) -> None:
        """Takes a message, its frame's bytes, and whether `place` said where its payload is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneEvents:
    """What a stream does with the messages of its lanes. All of it runs on the lanes' threads."""

    place: Callable[[Response, int], memoryview | None]
    """Where a payload belongs, if that is known before it is read."""
    received: Receives
    sent: Callable[[Request, int], None]
    """A message was sent, in a frame of so many bytes."""
    lost: Callable[[str], None]


class WorkerLanes:
    """The lanes of one stream to one reducer. One thread sends, and one receives."""

    def __init__(
        self,
        address: str,
        offer: TcpOffer,
        opening: OpenRound,
        events: LaneEvents,
        *,
        tls: Path | None,
        checksums: bool,
    ) -> None:
        """Opens both.

        Args:
            address: where the call of gRPC was opened, as host:port.
            offer: the reducer's.
            opening: the call's first message.
            events: what to do with what comes.
            tls: the folder of certificates; None: nothing is encrypted.
            checksums: whether what is sent has checksums.

        Raises:
            TcpUnavailable: they can't be opened; gRPC can carry the same.
        """
        # First: a child that is forked meanwhile must not hold the connections.
        close_in_children(f":{offer.port}")
        session = LaneSession(opening.session_token, opening.run_id, opening.worker)
        both = LaneDirection.CLIENT_SENDS, LaneDirection.CLIENT_RECEIVES
        up, down = connect(host_of(address), offer, session, both, tls=tls)
        # Before the threads start, which use all of this.
        self._events = events
        self._checksums = checksums
        self._placed = False
        """Whether the payload that is being read goes to its place."""
        self._scratch = memoryview(b"")
        """For payloads that have no place. Of the receiving thread alone."""
        reading: FrameReader[Response] = FrameReader(
            parse=parse_response_head,
            place=self._place,
            received=self._received,
            ended=self._ended,
            max_payload_bytes=MAX_PAYLOAD_BYTES,
        )
        with ExitStack() as undone:
            for each in (up, down):
                undone.callback(each.close)
            try:
                self._sender = TcpSender(up, events.lost, "andon-lane-out")
                undone.callback(self._sender.close)
                self._receiver = TcpReceiver(down, reading, "andon-lane-in")
            except RuntimeError as error:  # There is no thread left.
                raise TcpUnavailable(str(error)) from None
            undone.pop_all()

    @property
    def counts(self) -> LaneCounts:
        """What both have moved; any thread may ask."""
        receiver = self._receiver
        return LaneCounts(self._sender.sent_bytes, receiver.received_bytes, receiver.reading)

    def send(self, make: Callable[[], Request]) -> None:
        """Sends what `make` returns, which runs on the sending thread. Never blocks.

        The message's payload must stay as it is until the round is over.
        """
        made: list[Request] = []

        def split() -> tuple[bytes, memoryview | None]:
            made.append(make())
            return split_request(made[0], checksums=self._checksums)

        self._sender.send(split, lambda size: self._events.sent(made[0], size))

    def close(self) -> None:
        """Ends both; nothing is received after it returns."""
        self._sender.close()
        self._receiver.close()

    def _place(self, message: Response, size: int) -> memoryview:
        place = self._events.place(message, size)
        # `_received` reads it for the same frame: the receiving thread takes one after the other.
        self._placed = place is not None
        if place is not None:
            return place
        # Used for one payload after the other: `received` has copied what it needs when it returns.
        if self._scratch.nbytes < size:
            self._scratch = memoryview(bytearray(size))
        return self._scratch[:size]

    def _received(self, message: Response, payload: memoryview, size: int) -> None:
        self._events.received(with_payload(message, payload), size, placed=self._placed)

    def _ended(self, error: Exception | None) -> None:
        if isinstance(error, FrameError):
            self._events.lost(f"the reducer sent what can't be read: {error}")
        else:
            self._events.lost(f"its TCP lane ended{'' if error is None else f': {error}'}")
