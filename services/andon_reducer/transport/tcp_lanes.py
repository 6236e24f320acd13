"""TCP lanes as the adapter sees them: what a stream's two connections bring, and take.

Theory of operation. A stream's offer goes out with RoundOpened. Its lanes are *in use* from the
first frame that comes over them: before that, the end of one only ends the other, and a message
over gRPC takes the offer back. So a worker whose connections came too late, or did not come, goes
on over gRPC. A worker that listens sends no frame: its lanes are in use once both are proven.

One thread receives, and at most FRAMES_AHEAD frames wait for the event loop: a stream that is
paused, or a core that is busy, stops it. One thread sends what it is given. Neither waits for the
loop while it works.

If both ends can, a lane may have several connections, each with a thread. The worker opens them.
On how many of the lane down to send is decided here, whenever the worker asks for a report: it asks
a few times a second while bytes move.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import NamedTuple

from andon.protocol.limits import MAX_CONNECTIONS
from andon.protocol.messages import LaneReport, OpenRound, Request, TcpOffer
from andon.protocol.reasons import Reason
from andon.tcp.connection import TcpConnection, TcpLost
from andon.tcp.framing import Frame, FrameTooLarge
from andon.tcp.listening import OpenOffer, TcpListener
from andon.tcp.proof import WIDE_CAPABILITY, LaneDirection, LaneSession
from andon.tcp.receiving import FrameReader, TcpReceiver
from andon.tcp.sending import TcpSender
from andon.tcp.wide_receiving import WideReceiver
from andon.tcp.wide_sending import WideSender
from andon.tcp.width import LaneWidth
from andon.wire.fields import FrameError
from andon.wire.frames import parse_request_head, with_payload
from andon_reducer.config import ReducerConfig
from andon_reducer.core.effects import CallRefusal, Direction
from andon_reducer.transport.buffers import Buffers
from andon_reducer.transport.loop_calls import LoopCalls

__all__ = ["FRAMES_AHEAD", "LaneOffers", "LaneRequest", "StreamLanes"]

FRAMES_AHEAD = 2
"""How many frames of a stream may wait for the event loop."""


_WAYS = {
    Direction.UP: LaneDirection.CLIENT_SENDS,
    Direction.DOWN: LaneDirection.CLIENT_RECEIVES,
}


class LaneRequest(NamedTuple):
    """One message that came over a lane, and the bytes of its frame."""

    request: Request
    size: int


class StreamLanes:
    """The lanes of one stream. Everything public is for the event loop."""

    def __init__(
        self,
        listener: TcpListener,
        opening: OpenRound,
        refuse: Callable[[CallRefusal], None],
        calls: LoopCalls,
        buffers: Buffers,
        config: ReducerConfig,
    ) -> None:
        """Offers them to the worker that opened the stream; `refuse` gets why it must end.

        Raises:
            ConnectionError: the listener takes no connections any more.
        """
        self._calls = calls
        self._most = config.lane_connections or MAX_CONNECTIONS
        self.is_wide = self._most > 1 and WIDE_CAPABILITY in opening.capabilities
        """Whether they may have several connections."""
        self._width: LaneWidth | None = None
        if self.is_wide and config.lane_connections is None:
            self._width = LaneWidth(self._most)
        self._listener = listener
        self._refuse = refuse
        self._buffers = buffers
        self._max_payload_bytes = config.max_payload_bytes
        self._room = threading.Semaphore(FRAMES_AHEAD)
        self._closing = False
        self._listens = opening.listens
        self._connections: dict[LaneDirection, TcpConnection] = {}
        self._receiver: TcpReceiver[Request] | WideReceiver[Request] | None = None
        self._sender: TcpSender | WideSender | None = None
        self._arrived: deque[LaneRequest] = deque()
        self._ended = False
        """Whether the worker sends no more."""
        self._came = asyncio.Event()
        self.in_use = False
        """Whether a frame has come over them, or will come to a worker that sends none."""
        session = LaneSession(opening.session_token, opening.run_id, opening.worker)
        offer = listener.offer(
            session,
            self._joined,
            connections=self._most if self.is_wide else 1,
            adaptive=self._width is not None,
        )
        if offer is None:
            raise ConnectionError("the listener takes no connections any more")
        self._offer: OpenOffer = offer

    @property
    def offer(self) -> TcpOffer:
        """For RoundOpened."""
        return self._offer.message

    def report(self) -> LaneReport:
        """What came over them, and what was sent."""
        receiver, sender = self._receiver, self._sender
        if receiver is None or sender is None:
            return LaneReport(0, reading=False, sent_bytes=0)
        return LaneReport(
            receiver.received_bytes, receiver.reading, sender.sent_bytes, self._wanted()
        )

    @property
    def connections(self) -> dict[LaneDirection, int]:
        """On how many connections each lane carries frames."""
        receiver, sender = self._receiver, self._sender
        if receiver is None or sender is None:
            return {}
        return {
            LaneDirection.CLIENT_SENDS: (
                receiver.connections if isinstance(receiver, WideReceiver) else 1
            ),
            LaneDirection.CLIENT_RECEIVES: sender.used if isinstance(sender, WideSender) else 1,
        }

    def _wanted(self) -> int:
        """On how many connections to send; 0: on all that there are."""
        sender = self._sender
        if self._width is None or not isinstance(sender, WideSender):
            return 0
        if (flow := sender.flow) is not None:
            self._width.look(flow, sender.used, time.monotonic())
            sender.use(self._width.wanted)
        return self._width.wanted

    async def requests(self) -> AsyncIterator[LaneRequest]:
        """What the worker sends, until it sends no more."""
        while True:
            while not self._arrived:
                if self._ended:
                    return
                self._came.clear()
                # No await lies between the look at `_arrived` and this, so nothing is missed.
                await self._came.wait()
            arrived = self._arrived.popleft()
            yield arrived
            # The name would keep the payload alive while this waits.
            del arrived
            # Only now, when the message was taken: the thread may receive one more.
            self._room.release()

    def send(self, frame: Frame, sent: Callable[[int], None]) -> None:
        """Sends a frame; `sent` gets its bytes, on the loop, once the kernel has it."""
        assert self._sender is not None, "lanes are in use once the worker has sent over them"
        self._sender.send(lambda: frame, partial(self._calls.call, sent))

    def close(self) -> None:
        """Ends the lanes, or takes the offer back. A second call does nothing."""
        if self._closing:
            return
        self._closing = True
        self._listener.withdraw(self._offer)
        # The receiving thread may wait for room, and sees then that this is closing.
        self._room.release()
        if self._receiver is not None:
            self._receiver.close()
        if self._sender is not None:
            self._sender.close()
        for connection in self._connections.values():
            connection.end()
            connection.close()

    def _joined(self, direction: LaneDirection, connection: TcpConnection) -> None:
        """Runs on the accepting thread."""
        if not self._calls.call(self._join, direction, connection):
            connection.close()

    def _join(self, direction: LaneDirection, connection: TcpConnection) -> None:
        # The stream may have ended while the connection was on its way to the loop.
        if self._closing:
            connection.close()
            return
        if self._receiver is not None and self._sender is not None:
            self._add(direction, connection)
            return
        self._connections[direction] = connection
        if len(self._connections) < len(LaneDirection):
            return
        reading: FrameReader[Request] = FrameReader(
            parse=self._parse,
            place=lambda _, size: self._buffers.lend(size),
            received=self._received,
            ended=partial(self._calls.call, self._end),
            max_payload_bytes=self._max_payload_bytes,
        )
        up = self._connections.pop(LaneDirection.CLIENT_SENDS)
        down = self._connections.pop(LaneDirection.CLIENT_RECEIVES)
        try:
            # The sender first: an answer may be due as soon as something is received.
            if self.is_wide:
                self._sender = WideSender(down, self._lost, "andon-lane-out")
                self._receiver = WideReceiver(up, reading, "andon-lane-in")
            else:
                self._sender = TcpSender(down, self._lost, "andon-lane-out")
                self._receiver = TcpReceiver(up, reading, "andon-lane-in")
        except RuntimeError:
            # There is no thread left. The worker believes in its lanes until they end.
            for connection in (up, down):
                connection.end()
                connection.close()
            raise
        # Not before both threads run.
        self.in_use = self._listens

    def _add(self, direction: LaneDirection, connection: TcpConnection) -> None:
        """One more connection of a lane. The listener lets in none of a lane that is not wide."""
        assert isinstance(self._receiver, WideReceiver)
        assert isinstance(self._sender, WideSender)
        if direction is LaneDirection.CLIENT_SENDS:
            self._receiver.add(connection)
            return
        self._sender.add(connection)
        count = self._sender.connections
        if self._width is not None:
            self._width.opened(count)
            count = self._width.wanted
        self._sender.use(count)

    def _parse(self, head: memoryview, payload_bytes: int) -> Request:
        """Runs on the receiving thread, which waits here while the loop is behind."""
        self._room.acquire()
        # Looked at after the wait: `close` ends it by giving room.
        if self._closing:
            raise TcpLost("the stream has ended")
        return parse_request_head(head, payload_bytes)

    def _received(self, request: Request, payload: memoryview, size: int) -> None:
        """Runs on the receiving thread."""
        self._calls.call(self._take, LaneRequest(with_payload(request, payload), size))

    def _lost(self, why: str) -> None:
        """Runs on the sending thread."""
        self._calls.call(self._end, ConnectionError(why))

    def _take(self, arrived: LaneRequest) -> None:
        self.in_use = True
        self._arrived.append(arrived)
        self._came.set()

    def _end(self, error: Exception | None) -> None:
        """One of the lanes is over; without an error, the worker sends no more."""
        if self._closing:
            return
        if not (self.in_use or isinstance(error, FrameError)):
            # Nothing came over them: gRPC may carry it. Both end, since a worker whose first frame
            # was lost with this one learns of that by the other.
            self.close()
            return
        if error is not None:
            # At once, and not behind what arrived before: the stream may be paused.
            self._refuse(_refusal_of(error))
        self._ended = True
        self._came.set()


class LaneOffers:
    """Offers lanes to streams, as many at once as there may be threads for."""

    def __init__(
        self, listener: TcpListener | None, config: ReducerConfig, calls: LoopCalls
    ) -> None:
        """Without a listener it offers none."""
        self._calls = calls
        self._listener = listener
        self._left = config.max_lane_streams
        self._open: dict[bytes, StreamLanes] = {}
        """By the whole nonce of their offer."""
        self.buffers = Buffers(config.window_bytes)
        """Where payloads are received, and means are made."""
        self._config = config

    def offer(
        self, opening: OpenRound, refuse: Callable[[CallRefusal], None]
    ) -> StreamLanes | None:
        """The lanes of a stream that was opened so; None: it gets none."""
        if self._listener is None or not self._left:
            return None
        self._calls.attach()
        try:
            lanes = StreamLanes(
                self._listener, opening, refuse, self._calls, self.buffers, self._config
            )
        except ConnectionError:
            return None
        self._left -= 1
        self._open[lanes.offer.nonce] = lanes
        return lanes

    def report(self, nonce: bytes) -> LaneReport | None:
        """What the lanes of an offer have moved; None: there is no stream that has this offer."""
        lanes = self._open.get(nonce)
        return None if lanes is None else lanes.report()

    def connections(self, direction: Direction) -> int:
        """On how many connections frames travel on all lanes of a direction; any thread may ask."""
        way = _WAYS[direction]
        return sum(each.connections.get(way, 0) for each in list(self._open.values()))

    def take_back(self, lanes: StreamLanes) -> None:
        """Ends lanes, or takes their offer back. Call it once for each."""
        lanes.close()
        # After the lanes were closed: their threads have ended, and others may begin.
        del self._open[lanes.offer.nonce]
        self._left += 1


def _refusal_of(error: Exception) -> CallRefusal:
    if isinstance(error, FrameTooLarge):
        return CallRefusal(Reason.TOO_LARGE, f"{error}: send smaller chunks")
    if isinstance(error, FrameError):
        return CallRefusal(Reason.INVALID_MESSAGE, str(error))
    return CallRefusal(Reason.PEER_GONE, f"a TCP lane of this stream broke: {error}")
