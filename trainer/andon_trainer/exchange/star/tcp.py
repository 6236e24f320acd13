"""A worker's TCP lanes: the two connections that carry a stream's messages in place of gRPC.

Both are opened before anything is sent, and then all messages of the stream travel over them. The
call of gRPC stays open: it ends the stream, and says why. If the reducer can, too, each lane may
get more connections later (`lane_growth`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from andon.host.tls import host_of
from andon.protocol.limits import MAX_PAYLOAD_BYTES
from andon.protocol.messages import AveragedBlock, OpenRound, Request, Response, TcpOffer
from andon.tcp.connecting import TcpUnavailable, connect, connect_further
from andon.tcp.kernel import LaneFlow
from andon.tcp.proof import WIDE_CAPABILITY, LaneDirection, LaneSession
from andon.tcp.receiving import FrameReader, TcpReceiver
from andon.tcp.sending import TcpSender
from andon.tcp.wide_receiving import WideReceiver
from andon.tcp.wide_sending import WideSender
from andon.wire import checksums
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


class _Scratch:
    """Memory for payloads that have no place: each is used again once its message was taken."""

    def __init__(self) -> None:
        self._free: list[bytearray] = []
        self._lent: list[bytearray] = []

    def lend(self, size: int) -> memoryview:
        memory = self._free.pop() if self._free else bytearray()
        if len(memory) < size:
            memory = bytearray(size)
        self._lent.append(memory)
        return memoryview(memory)[:size]

    def take_back(self, view: memoryview) -> bool:
        """Whether a view was lent here; it is not used any more then."""
        for at, memory in enumerate(self._lent):
            if memory is view.obj:
                self._free.append(self._lent.pop(at))
                return True
        return False

    def has_lent(self, view: memoryview) -> bool:
        return any(memory is view.obj for memory in self._lent)


class WorkerLanes:
    """The lanes of one stream to one reducer. A thread for each connection sends, or receives."""

    def __init__(
        self,
        address: str,
        offer: TcpOffer,
        opening: OpenRound,
        events: LaneEvents,
        *,
        tls: Path | None,
        agreed: Collection[str],
    ) -> None:
        """Opens both.

        Args:
            address: where the call of gRPC was opened, as host:port.
            offer: the reducer's.
            opening: the call's first message.
            events: what to do with what comes.
            tls: the folder of certificates; None: nothing is encrypted.
            agreed: the capabilities that both ends have: with checksums, what is sent has some;
                with wide lanes, frames travel in segments, and there may be more connections.

        Raises:
            TcpUnavailable: they can't be opened; gRPC can carry the same.
        """
        # First: a child that is forked meanwhile must not hold the connections.
        close_in_children(f":{offer.port}")
        session = LaneSession(opening.session_token, opening.run_id, opening.worker)
        self._connect = partial(connect_further, host_of(address), offer, session, tls=tls)
        both = LaneDirection.CLIENT_SENDS, LaneDirection.CLIENT_RECEIVES
        up, down = connect(host_of(address), offer, session, both, tls=tls)
        # Before the threads start, which use all of this.
        self._events = events
        self._checksums = checksums.CAPABILITY in agreed
        self._scratch = _Scratch()
        """For payloads that have no place."""
        self._sender: TcpSender | WideSender
        self._receiver: TcpReceiver[Response] | WideReceiver[Response]
        reading: FrameReader[Response] = FrameReader(
            parse=parse_response_head,
            place=self._place,
            received=self._received,
            ended=self._ended,
            max_payload_bytes=MAX_PAYLOAD_BYTES,
            batch=_round_of,
        )
        is_wide = WIDE_CAPABILITY in agreed
        with ExitStack() as undone:
            for each in (up, down):
                undone.callback(each.close)
            try:
                self._sender = (WideSender if is_wide else TcpSender)(
                    up, events.lost, "andon-lane-out"
                )
                undone.callback(self._sender.close)
                self._receiver = (WideReceiver if is_wide else TcpReceiver)(
                    down, reading, "andon-lane-in"
                )
            except RuntimeError as error:  # There is no thread left.
                raise TcpUnavailable(str(error)) from None
            undone.pop_all()

    @property
    def counts(self) -> LaneCounts:
        """What both have moved; any thread may ask."""
        receiver = self._receiver
        return LaneCounts(self._sender.sent_bytes, receiver.received_bytes, receiver.reading)

    @property
    def flow_up(self) -> LaneFlow | None:
        """What the kernel says of what is sent; None: nothing."""
        return self._sender.flow if isinstance(self._sender, WideSender) else None

    @property
    def sent_bytes(self) -> int:
        """How many bytes left."""
        return self._sender.sent_bytes

    @property
    def received_bytes(self) -> int:
        """How many bytes came."""
        return self._receiver.received_bytes

    @property
    def used(self) -> dict[LaneDirection, int]:
        """On how many connections each lane carries frames, as far as this end knows."""
        sender = self._sender
        return {
            LaneDirection.CLIENT_SENDS: sender.used if isinstance(sender, WideSender) else 1,
            LaneDirection.CLIENT_RECEIVES: self.connections(LaneDirection.CLIENT_RECEIVES),
        }

    def connections(self, direction: LaneDirection) -> int:
        """How many a lane has."""
        lane = self._sender if direction is LaneDirection.CLIENT_SENDS else self._receiver
        return lane.connections if isinstance(lane, WideSender | WideReceiver) else 1

    def add(self, direction: LaneDirection, index: int) -> None:
        """Opens one more connection of a lane.

        Raises:
            TcpUnavailable: it can't be opened. The lane goes on as it is.
            RuntimeError: there is no thread left for it.
        """
        lane = self._sender if direction is LaneDirection.CLIENT_SENDS else self._receiver
        assert isinstance(lane, WideSender | WideReceiver), "these lanes are not wide"
        lane.add(self._connect(direction, index))

    def use_up(self, count: int) -> None:
        """Sends on so many connections, if there are as many."""
        if isinstance(self._sender, WideSender):
            self._sender.use(count)

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
        return self._scratch.lend(size) if place is None else place

    def _received(self, message: Response, payload: memoryview, size: int) -> None:
        placed = not self._scratch.has_lent(payload)
        self._events.received(with_payload(message, payload), size, placed=placed)
        # `received` has copied what it needs when it returns.
        self._scratch.take_back(payload)

    def _ended(self, error: Exception | None) -> None:
        if isinstance(error, FrameError):
            self._events.lost(f"the reducer sent what can't be read: {error}")
        else:
            self._events.lost(f"its TCP lane ended{'' if error is None else f': {error}'}")


def _round_of(message: Response) -> Hashable:
    """What is written to other places than an average of another round: never the same memory."""
    return (message.key, message.sequence) if isinstance(message, AveragedBlock) else None
