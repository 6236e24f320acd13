"""The link to the next rank: one Pass call, and the TCP lane that carries its messages.

Theory of operation. The call asks the next rank for a lane. While the answer is awaited, messages
queue up. Then a lane carries all of them or, within seconds, the call itself: once one of the two
has its first message, the other gets none. With a lane the call stays open for what only it can
say: why the next rank ended the link.

A message is made into a frame on the thread that sends it, checksum and all, and its numbers are
sent from where they lie.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from google.protobuf.message import DecodeError

from andon.host.keepalive import RingKeepalive
from andon.host.logs import LogEvent
from andon.host.tls import host_of, open_channel
from andon.protocol.limits import MAX_MESSAGE_BYTES
from andon.protocol.messages import LaneReport, PassMessage, RingChunk, TcpOffer
from andon.protocol.records import Key
from andon.tcp.connecting import WITHIN_S, TcpUnavailable, connect
from andon.tcp.framing import Frame
from andon.tcp.proof import CAPABILITY, LaneDirection, LaneSession
from andon.tcp.sending import TcpSender
from andon.v1 import reducer_pb2, ring_pb2
from andon.wire import conversion
from andon.wire.frames import frame_pass, split_pass
from andon.wire.lane_reports import RING_METHOD
from andon_trainer.core.ring_landing import Arrived, Carrier
from andon_trainer.exchange.channels import close_in_children
from andon_trainer.exchange.star.lane_watch import (
    PATIENCE_S,
    LaneCounts,
    LaneTrust,
    LaneWatch,
    LaneWay,
    asking,
)

__all__ = [
    "OFFER_METADATA",
    "WANTED_METADATA",
    "LaneMemory",
    "MakePass",
    "RingLink",
    "forwarded",
    "framed",
]

log = logging.getLogger(__name__)

_METHOD = "/andon.v1.Ring/Pass"

WANTED_METADATA = "andon-capabilities"
"""Metadata of Pass: what the caller can do."""
OFFER_METADATA = "andon-tcp-bin"
"""Initial metadata of the answer: a serialized TcpOffer."""

MakePass = Callable[[Carrier], Frame | None]
"""Makes a message on the sending thread; None: nothing may be sent any more.

For a lane it is the head, and the payload where it lies. For a call all of it is the head.
"""

_VERDICT_S = 2.0
"""How long a call may take to say why its lane broke."""


def framed(
    message: PassMessage, carrier: Carrier, *, checksums: bool = False, crc32c: int | None = None
) -> Frame:
    """A message as its carrier takes it."""
    if carrier is Carrier.LANE:
        return split_pass(message, checksums=checksums, crc32c=crc32c)
    return frame_pass(message, checksums=checksums, crc32c=crc32c), None


def forwarded(arrived: Arrived, carrier: Carrier) -> Frame:
    """A message as it came, byte for byte unless it goes on over something else than it came."""
    message = arrived.message
    if not isinstance(message, RingChunk):
        return arrived.data, None
    if arrived.carrier is not carrier:
        crc32c = message.crc32c
        return framed(message, carrier, checksums=crc32c is not None, crc32c=crc32c)
    return arrived.data, message.payload if carrier is Carrier.LANE else None


@dataclass(slots=True)
class LaneMemory:
    """Which addresses had no lane lately: each try may cost seconds. Used by several threads."""

    wanted: bool = True
    """Whether lanes are used at all."""
    patience_s: float = PATIENCE_S
    """How long one may stand still while the rank at its other end answers over gRPC."""
    _trust: defaultdict[str, LaneTrust] = field(default_factory=lambda: defaultdict(LaneTrust))
    _said: str = ""

    def may_try(self, address: str) -> bool:
        """Whether to ask for a lane there."""
        return self.wanted and self._trust[address].may_try

    def failed(self, address: str, why: str) -> None:
        """Notes that gRPC carries the messages, and says so once."""
        self._trust[address].not_opened(why)
        self._say(f"the ring's next rank is reached over gRPC: {why}", logging.WARNING)

    def stood_still(self, address: str) -> str:
        """Notes that the lane there did, and says so; returns why, for people."""
        trust = self._trust[address]
        trust.stood_still(LaneWay.UP, self.patience_s)
        self._say(f"the ring's next rank is reached over gRPC: {trust.refused}", logging.WARNING)
        return trust.refused

    def conclude(self, address: str, watch: LaneWatch) -> None:
        """Takes over what the watch of a lane there suspected at the end."""
        watch.conclude(self._trust[address])

    def opened(self) -> None:
        """Notes that a lane carries them."""
        self._say("the ring's next rank is reached over a TCP lane", logging.INFO)

    def _say(self, text: str, level: int) -> None:
        if text != self._said:
            self._said = text
            log.log(level, LogEvent("path_chosen", text))


class RingLink:
    """One link to the next rank. `lost` is called once unless it was closed."""

    def __init__(
        self,
        address: str,
        keepalive: RingKeepalive,
        sent: Callable[[int], None],
        lost: Callable[[RingLink, str, Key | None], None],
        lanes: LaneMemory,
        tls: Path | None = None,
    ) -> None:
        """Opens the link, without waiting for it.

        Args:
            address: where the next rank listens.
            keepalive: how often a silent connection is pinged, and when it is given up.
            sent: called on the sending thread with the size of each message.
            lost: called with this link, why it ended, and the greatest key there if the round of
                this link is older.
            lanes: where lanes may be tried.
            tls: the folder of certificates; None: it is not encrypted.

        Raises:
            TlsError: the folder can't be used.
        """
        self.address = address
        self.alive = True
        self._sent, self._lost, self._lanes, self._tls = sent, lost, lanes, tls
        self._closed = False
        self._muted = False
        self._over = threading.Event()
        self._broke = ""
        """Why the lane broke; empty if it did not."""
        self._lock = threading.Lock()
        """Guards the choice between lane and call, and what is queued until it is made."""
        self._chosen = threading.Event()
        self._sender: TcpSender | None = None
        self._watch: LaneWatch | None = None
        self._outgoing: queue.SimpleQueue[MakePass | None] = queue.SimpleQueue()
        close_in_children(address)
        self._channel = open_channel(
            address,
            (
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                ("grpc.enable_retries", 0),
                *keepalive.client_options(),
                ("grpc.enable_http_proxy", 0),
            ),
            tls,
        )
        call: grpc.StreamUnaryMultiCallable[bytes, bytes] = self._channel.stream_unary(
            _METHOD, request_serializer=None, response_deserializer=None
        )
        tries = lanes.may_try(address)
        if not tries:
            self._chosen.set()
        wanted = ((WANTED_METADATA, CAPABILITY),) if tries else ()
        self._call = call.future(self._frames(), metadata=wanted)
        if tries:
            threading.Thread(target=self._open_lane, name="andon-ring-open", daemon=True).start()
        self._call.add_done_callback(self._ended)

    def send(self, make: MakePass) -> None:
        """Sends what `make` returns; it runs on the sending thread. Never blocks."""
        # `_choose` moves what waits to the lane under this lock, so no message overtakes another.
        with self._lock:
            if self._sender is None:
                self._outgoing.put(make)
            else:
                self._give(self._sender, make)

    def close(self) -> None:
        """Ends the link; what was not sent yet is dropped. No memory is read any more after it."""
        self._closed = True  # First: `_ended` must not report the end that follows.
        self.alive = False
        self._over.set()  # Nobody waits for a verdict any more.
        self._call.cancel()
        self._end_sending()
        self._channel.close()
        if self._watch is not None:
            self._lanes.conclude(self.address, self._watch)

    # ------------------------------------------------------------------ choosing

    def _open_lane(self) -> None:
        """Runs on a thread of its own: tries to open the lane that the next rank offers."""
        deadline = time.monotonic() + WITHIN_S
        # Waits for the connection, too; the call's end ends the wait.
        offer = _offer_in(self._call.initial_metadata())
        if self._chosen.is_set() or self._over.is_set():
            return
        why = "it offers no TCP lane"
        if offer is not None:
            close_in_children(f":{offer.port}")  # First: a child must not hold the connection.
            try:
                (connection,) = connect(
                    host_of(self.address),
                    offer,
                    LaneSession(b""),
                    (LaneDirection.CLIENT_SENDS,),
                    tls=self._tls,
                    within_s=max(0.1, deadline - time.monotonic()),
                )
            except TcpUnavailable as error:
                why = str(error)
            else:
                sender: TcpSender | None = None
                try:
                    sender = TcpSender(connection, self._lane_lost, "andon-ring-send")
                    if self._choose(sender, offer):
                        self._lanes.opened()
                    else:
                        sender.close()
                    return
                except RuntimeError as error:  # There is no thread left for it, or for its watch.
                    (sender or connection).close()
                    why = str(error)
        if self._choose(None):
            self._lanes.failed(self.address, why)

    def _choose(self, sender: TcpSender | None, offer: TcpOffer | None = None) -> bool:
        """Chooses a lane, or gRPC. False if that was chosen already, or the link is over."""
        with self._lock:
            # Two threads come here: the one that opens the lane, and gRPC's sending thread. The
            # first one decides.
            if self._chosen.is_set() or self._closed:
                return False
            if sender is not None and offer is not None and offer.reports:
                self._watch = self._watch_over(sender, offer)
            self._sender = sender
            while sender is not None and not self._outgoing.empty():
                make = self._outgoing.get()
                if make is not None:
                    self._give(sender, make)
            # Last: `_frames` waits for it, and would take out of the queue what belongs to the
            # lane.
            self._chosen.set()
            return True

    # ------------------------------------------------------------------ sending

    def _give(self, sender: TcpSender, make: MakePass) -> None:
        sender.send(lambda: self._made(make, Carrier.LANE), self._sent)

    def _made(self, make: MakePass, carrier: Carrier) -> Frame | None:
        """Makes a frame, on the sending thread; None: nothing more leaves this link."""
        if self._muted or self._closed:
            return None
        frame = make(carrier)
        if frame is None:
            # A value that must not be sent. What is queued behind it belongs to the same round.
            self._muted, self.alive = True, False
        return frame

    def _frames(self) -> Iterator[bytes]:
        """Runs on gRPC's sending thread."""
        if not self._chosen.wait(WITHIN_S) and self._choose(None):
            self._lanes.failed(self.address, f"no TCP lane could be opened within {WITHIN_S:g} s")
        # With a lane nothing is queued here, but the call stays open until the link ends.
        while (make := self._outgoing.get()) is not None and not self._closed:
            frame = self._made(make, Carrier.CALL)
            if frame is not None:
                self._sent(len(frame[0]))
                yield frame[0]

    def _watch_over(self, sender: TcpSender, offer: TcpOffer) -> LaneWatch:
        """Gives a lane up once it stands still while the next rank answers."""
        patience_s = self._lanes.patience_s
        ask = asking(self._channel, RING_METHOD, offer.nonce, patience_s)
        arrived = 0

        def counts() -> LaneCounts | None:
            return None if sender.sent_bytes == arrived else LaneCounts(sender.sent_bytes)

        def asked() -> LaneReport | None:
            nonlocal arrived
            if (told := ask()) is not None:
                arrived = told.received_bytes
            return told

        return LaneWatch(counts, asked, self._stood_still, patience_s)

    def _stood_still(self, _way: LaneWay) -> None:
        """Runs on the watch's thread."""
        self.alive = False
        why = self._lanes.stood_still(self.address)
        self._lost(
            self, f"the next rank, at {self.address}: {why}. gRPC carries the next try", None
        )
        # This rank's word first: it knows which link it is. If it has all averages already its word
        # counts for nothing, and the next rank hears of the end.
        if not self._over.wait(_VERDICT_S):
            self._call.cancel()

    def _end_sending(self) -> None:
        with self._lock:
            # Ends the wait in `_frames`, if nothing was chosen yet.
            self._chosen.set()
            sender = self._sender
            if self._watch is not None:
                self._watch.stop()
            self._outgoing.put(None)
        if sender is not None:
            sender.close()

    # ------------------------------------------------------------------ the end

    def _lane_lost(self, why: str) -> None:
        """Runs on the lane's sending thread: the call says why it ended, if the next rank can."""
        self._broke = why
        if not self._over.wait(_VERDICT_S):
            self._call.cancel()

    def _ended(self, call: grpc.Future[bytes]) -> None:
        """Runs on a thread of gRPC's, once the call is over, whoever ended it."""
        # First: the station asks for it before it uses this link in another round.
        self.alive = False
        self._over.set()
        self._end_sending()
        if self._closed:
            return
        why, greatest = f"the next rank, at {self.address}, ended the stream", None
        try:
            message = ring_pb2.PassResponse.FromString(call.result())
            greatest = conversion.optional_key_from_proto(message.greatest)
        except grpc.RpcError as error:
            why = f"the next rank, at {self.address}: {error.code().name}: {error.details()}"
        except (grpc.FutureCancelledError, DecodeError, ValueError) as error:
            why = f"{why} ({self._broke or type(error).__name__})"
        self._lost(self, why, greatest)


def _offer_in(metadata: object) -> TcpOffer | None:
    """The offer in a call's initial metadata; None: there is none, or it is not one."""
    for key, value in metadata if isinstance(metadata, tuple | list) else ():
        if key == OFFER_METADATA and isinstance(value, bytes):
            with contextlib.suppress(DecodeError):
                offer = reducer_pb2.TcpOffer.FromString(value)
                if 0 < offer.port < 2**16:
                    return TcpOffer(offer.port, offer.nonce, offer.reports)
    return None
