"""The watch over TCP lanes: finds a lane whose bytes are taken on the way and never arrive.

Theory of operation. What lies between two hosts may acknowledge a lane's bytes and pass none of
them on, while gRPC is sound. Neither end can see that alone: the one has sent everything, and the
other waits as it would for a slow rank. So a thread asks the other end over gRPC what arrived
there, as long as this end's own counts stand still, and compares.

Time alone counts for nothing, since either process may be stopped, and a slow network is no dead
one. What counts are answers in a row that all say the same: bytes are under way, their receiver
reads, and none has come since the answer before (docs/tcp-lane.md).
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from andon.protocol.messages import LaneReport
from andon.wire.fields import FrameError
from andon.wire.lane_reports import frame_asked, read_report

__all__ = [
    "PATIENCE_S",
    "LaneCounts",
    "LaneStillness",
    "LaneTrust",
    "LaneWatch",
    "LaneWay",
    "asking",
]

PATIENCE_S = 10.0
"""How long a lane may stand still, at least."""

_ANSWERS = 10
"""So many answers in a row, after a first one, say that a lane stands still."""
_SUSPICIOUS = 5
"""After so many the next stream uses gRPC, whatever ended this one."""

_AGAIN_S = 60.0
"""How long no lanes are tried where they could not be opened, or stood still for the first time."""
_MOST_S = 3600.0


class LaneWay(enum.Enum):
    """Which of a stream's lanes; values are for people."""

    UP = "its TCP lane for what this worker sends"
    DOWN = "its TCP lane for what this worker receives"


@dataclass(frozen=True, slots=True)
class LaneCounts:
    """What this end knows of its lanes; bytes are those of frames."""

    sent_bytes: int
    """The size of all frames that were begun."""
    received_bytes: int = 0
    reading: bool = False
    """Whether it waits for more."""


@dataclass(slots=True)
class _Way:
    """One lane over the answers so far."""

    received: int = -1
    waited: bool = False
    still: int = 0
    """Between how many answers in a row it stood still."""

    def look(self, *, sent: int, received: int, reading: bool) -> None:
        waits = reading and sent > received
        # All of it must hold at this answer and at the one before (docs/tcp-lane.md).
        stood = waits and self.waited and received == self.received
        self.still = self.still + 1 if stood else 0
        self.received, self.waited = received, waits


@dataclass(slots=True)
class LaneTrust:
    """Whether lanes to one address are worth a try. Used by one thread at a time."""

    refused: str = ""
    """Why the last ones carry nothing; empty if they do."""
    _not_before: float = 0.0
    _pause_s: float = 0.0
    """How long they were not tried when one last stood still."""

    @property
    def may_try(self) -> bool:
        """Whether to ask for lanes. A try may cost seconds."""
        return time.monotonic() >= self._not_before

    def opened(self) -> None:
        """They carry messages."""
        self.refused = ""

    def not_opened(self, why: str) -> None:
        """They could not be opened."""
        self.refused, self._not_before = why, time.monotonic() + _AGAIN_S

    def stood_still(self, way: LaneWay, for_s: float) -> None:
        """One of them did. They may open well next time, and do it again: so longer each time."""
        self._pause_s = min(2 * self._pause_s, _MOST_S) or _AGAIN_S
        self._not_before = time.monotonic() + self._pause_s
        self.refused = (
            f"{way.value} stood still for {for_s:g} s while gRPC answered: something between the "
            "two, such as a proxy, a port forward or a firewall, takes its bytes and passes none on"
        )


class LaneStillness:
    """Judges the lanes of one stream by what both ends count."""

    def __init__(self) -> None:
        """Knows nothing."""
        self._ways = {way: _Way() for way in LaneWay}

    @property
    def suspicious(self) -> LaneWay | None:
        """The lane that most likely stands still, if one has done so for long."""
        return self._longest(_SUSPICIOUS)

    def forget(self) -> None:
        """Begins anew: an answer is missing, or nothing is expected."""
        self._ways = {way: _Way() for way in LaneWay}

    def judge(self, asked: LaneCounts, told: LaneReport, now: LaneCounts) -> LaneWay | None:
        """The lane that stands still, once that is certain.

        Args:
            asked: this end when it asked. What it began to send later is not missing at the other.
            told: the other end.
            now: this end, after the answer came.
        """
        self._ways[LaneWay.UP].look(
            sent=asked.sent_bytes, received=told.received_bytes, reading=told.reading
        )
        self._ways[LaneWay.DOWN].look(
            sent=told.sent_bytes, received=now.received_bytes, reading=now.reading
        )
        return self._longest(_ANSWERS)

    def _longest(self, least: int) -> LaneWay | None:
        way = max(self._ways, key=lambda each: self._ways[each].still)
        return way if self._ways[way].still >= least else None


class LaneWatch:
    """Watches the lanes of one stream, on a thread of its own."""

    def __init__(
        self,
        counts: Callable[[], LaneCounts | None],
        ask: Callable[[], LaneReport | None],
        still: Callable[[LaneWay], None],
        patience_s: float,
    ) -> None:
        """Starts the thread.

        Args:
            counts: what this end counts; None while nothing is expected of the lanes.
            ask: asks the other end; None: it did not answer.
            still: called once, at the end, with the lane that stands still.
            patience_s: how long a lane may do so.
        """
        self._counts, self._ask, self._still = counts, ask, still
        self._every_s = patience_s / _ANSWERS
        self._stillness = LaneStillness()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="andon-lane-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends it; a question that is under way ends with the channel. Any thread may call it."""
        self._closing.set()

    def conclude(self, trust: LaneTrust) -> None:
        """Waits for its end, after `stop`; distrusts a lane that had stood still for long by then.

        Another worker behind the same proxy may have said so first, which voided the round.
        """
        # Joined first: that thread may use `trust`, too, when it finds a lane that stands still.
        self._thread.join()
        way = self._stillness.suspicious
        if way is not None and trust.may_try:
            trust.stood_still(way, _SUSPICIOUS * self._every_s)

    def _run(self) -> None:
        before: LaneCounts | None = None
        while not self._closing.wait(self._every_s):
            asked = self._counts()
            if asked is None:
                self._stillness.forget()
            elif before is not None and _have_moved(before, asked):
                pass  # No answer is needed to know that. What one said before still counts.
            elif (way := self._look(asked)) is not None:
                self._still(way)
                return
            before = asked

    def _look(self, asked: LaneCounts) -> LaneWay | None:
        told = self._ask()
        if self._closing.is_set():
            return None  # It ended the question, too.
        now = self._counts()
        if told is None or now is None:
            self._stillness.forget()
            return None
        return self._stillness.judge(asked, told, now)


def _have_moved(before: LaneCounts, now: LaneCounts) -> bool:
    sent, received = before.sent_bytes, before.received_bytes
    return (sent, received) != (now.sent_bytes, now.received_bytes)


def asking(
    channel: grpc.Channel, method: str, nonce: bytes, patience_s: float
) -> Callable[[], LaneReport | None]:
    """What asks the other end of a call about the lanes of its offer."""
    call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
        method, request_serializer=None, response_deserializer=None
    )

    def ask() -> LaneReport | None:
        try:
            return read_report(call(frame_asked(nonce), timeout=patience_s))
        # The channel may be closed meanwhile, which gRPC calls a ValueError.
        except (grpc.RpcError, FrameError, ValueError):
            return None

    return ask
