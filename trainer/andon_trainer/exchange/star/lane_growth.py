"""What opens more connections of a worker's lanes: all at once, or as they raise the rate.

It works beside the rounds, on a thread of its own: a lane carries frames from its first connection
on, and takes others whenever they are there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

from andon.protocol.messages import LaneReport
from andon.tcp.connecting import TcpUnavailable
from andon.tcp.kernel import LaneFlow
from andon.tcp.proof import LaneDirection
from andon.tcp.width import LaneWidth

__all__ = ["LaneGrowth", "Widened"]

UP, DOWN = LaneDirection

_EVERY_S, _AT_REST_S = 0.25, 1.0
"""How often it looks at lanes that carry something, and at others: to wake up costs more than to
look."""
_AT_ONCE = 4
"""How many connections are opened at a time: a listener keeps few that have not proven anything."""

_log = logging.getLogger(__name__)


class Widened(Protocol):
    """A pair of lanes as what opens more of their connections sees it. Any thread may use it."""

    @property
    def flow_up(self) -> LaneFlow | None:
        """What the kernel says of what is sent."""

    @property
    def sent_bytes(self) -> int:
        """How many bytes left."""

    @property
    def received_bytes(self) -> int:
        """How many bytes came."""

    def connections(self, direction: LaneDirection) -> int:
        """How many a lane has."""

    def add(self, direction: LaneDirection, index: int) -> None:
        """Opens one more. Raises TcpUnavailable if that does not work."""

    def use_up(self, count: int) -> None:
        """Sends on so many."""


class LaneGrowth:
    """Opens connections of the lanes of one stream, on a thread of its own."""

    def __init__(
        self,
        lanes: Widened,
        ask: Callable[[], LaneReport | None],
        *,
        most: int,
        adaptive: bool,
        start: dict[LaneDirection, int],
    ) -> None:
        """Starts the thread.

        Args:
            lanes: what gets more connections.
            ask: asks the reducer, which says on how many it would send.
            most: how many there may be each way.
            adaptive: whether to begin with `start`; else there are `most` as soon as possible.
            start: how many the stream before this one used.
        """
        self._lanes, self._ask, self._most, self._adaptive = lanes, ask, most, adaptive
        self._first = {way: start.get(way, 1) if adaptive else most for way in LaneDirection}
        self._up = LaneWidth(most, min(self._first[UP], most))
        self._down_most = most
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="andon-lane-growth", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Opens none any more; lanes that are closed close what comes late."""
        self._closing.set()

    def _run(self) -> None:
        try:
            for way, count in self._first.items():
                self._widen(way, min(count, self._most))
            self._lanes.use_up(self._first[UP])
            sent, received, pause_s = -1, -1, _EVERY_S
            while self._adaptive and not self._closing.wait(pause_s):
                before = sent, received
                sent, received = self._lanes.sent_bytes, self._lanes.received_bytes
                # Of a lane on which nothing moved there is nothing to learn.
                if sent != before[0]:
                    self._look_up()
                if received != before[1]:
                    self._look_down()
                pause_s = _AT_REST_S if (sent, received) == before else _EVERY_S
        except Exception:
            # The lanes carry all that there is as they are.
            _log.exception("the connections of a TCP lane are not looked after any more")

    def _look_up(self) -> None:
        flow = self._lanes.flow_up
        if flow is None:
            return
        there = self._lanes.connections(UP)
        wanted = self._up.look(flow, min(there, self._up.wanted), time.monotonic())
        if not self._widen(UP, wanted):
            self._up.could_not_open(self._lanes.connections(UP), time.monotonic())
        self._lanes.use_up(self._up.wanted)

    def _look_down(self) -> None:
        told = self._ask()
        if told is None or self._closing.is_set():
            return
        if not self._widen(DOWN, min(told.connections, self._down_most)):
            self._down_most = self._lanes.connections(DOWN)

    def _widen(self, way: LaneDirection, count: int) -> bool:
        """Opens connections until there are so many; returns whether that worked."""
        there = self._lanes.connections(way)
        if count <= there:
            return True
        with ThreadPoolExecutor(_AT_ONCE, "andon-lane-open") as pool:
            opened = list(pool.map(partial(self._add, way), range(there, count)))
        return all(opened)

    def _add(self, way: LaneDirection, index: int) -> bool:
        if self._closing.is_set():
            return False
        try:
            self._lanes.add(way, index)
        except (TcpUnavailable, RuntimeError) as why:  # There may be no thread left.
            if not self._closing.is_set():
                _log.warning("a TCP lane gets no further connection: %s", why)
            return False
        return True
