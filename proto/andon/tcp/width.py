"""How many connections a lane needs, from what the kernel says of those that it has.

Theory of operation. A network may limit each connection by itself: a cloud caps one flow, a long
way fills one window, a lost packet slows one sender down. Then twice as many carry more. Nobody
says so beforehand, so it is tried: the rate is measured while bytes are under way, then with twice
as many connections, and these stay if they raised it. Else the lane goes back, and the next try is
a minute later, then two, and so on: a lane that one connection fills loses next to nothing.

The rate is what the other end has acknowledged, in the time in which bytes were under way. So it
means the same whether a lane is busy all the time or a tenth of it. Two things say nothing of the
network: the first moments with other connections, in which they find their speed, and moments in
which the other end takes nothing, since it waits for a slow rank.
"""

from __future__ import annotations

from andon.protocol.limits import MAX_CONNECTIONS
from andon.tcp.kernel import LaneFlow

__all__ = ["GAIN", "LaneWidth"]

GAIN = 1.15
"""Twice as many connections stay if they make the rate this many times as high."""

_SETTLE_S = 0.2
_MEASURE_S = 0.5
"""Of the time in which bytes were under way."""
_SETTLE_ROUND_TRIPS, _MEASURE_ROUND_TRIPS = 15, 10
"""Both last at least so many: a connection doubles its speed in one, from 10 packets on."""
_AGAIN_S, _MOST_AGAIN_S = 60.0, 3600.0
"""How long after a try that came to nothing another one follows."""


class LaneWidth:
    """Decides for one direction of a lane. Its caller looks a few times a second."""

    def __init__(self, most: int, start: int = 1) -> None:
        """Begins with `start` connections, and never wants more than `most`.

        Raises:
            ValueError: there are not 1 to MAX_CONNECTIONS.
        """
        if not 1 <= start <= most <= MAX_CONNECTIONS:
            raise ValueError(f"{start} of {most} connections: 1 to {MAX_CONNECTIONS} can be used")
        self._most = most
        self.wanted = start
        """How many to use."""
        self._base: tuple[int, float] | None = None
        """While a try runs: how many there were before it, and their rate in bytes a second."""
        self._from: LaneFlow | None = None
        """Where the measurement, or the settling before it, began."""
        self._settled = False
        self._not_before = 0.0
        self._pause_s = _AGAIN_S

    def look(self, flow: LaneFlow, connections: int, now: float) -> int:
        """Takes what the kernel says now; returns how many connections to use.

        Args:
            flow: of all connections that there are.
            connections: how many of them are in use: fewer than wanted while others are opened.
            now: a monotonic time, in seconds.
        """
        if now < self._not_before or self._most == 1:
            return self.wanted
        if connections < self.wanted or self._from is None or flow.shut:
            # A measurement that was begun is of no use: it begins anew.
            self._from = flow
            return self.wanted
        busy_s = flow.busy_s - self._from.busy_s
        if busy_s < 0 or flow.acked_bytes < self._from.acked_bytes:
            self._from = flow  # These are other connections.
        elif not self._settled:
            if busy_s >= max(_SETTLE_S, _SETTLE_ROUND_TRIPS * flow.rtt_s):
                self._settled, self._from = True, flow
        elif busy_s >= max(_MEASURE_S, _MEASURE_ROUND_TRIPS * flow.rtt_s):
            self._judge((flow.acked_bytes - self._from.acked_bytes) / busy_s, now)
        return self.wanted

    def opened(self, connections: int) -> None:
        """The other end opened so many: they are used until it shows that fewer carry as much."""
        if connections > self.wanted:
            self._base = None
            self._begin(min(connections, self._most))

    def could_not_open(self, connections: int, now: float) -> None:
        """No more than so many connections could be opened."""
        self._base = None
        self._rest(min(self.wanted, max(1, connections)), now)

    def _judge(self, rate: float, now: float) -> None:
        before, self._base = self._base, None
        if before is not None and rate < GAIN * before[1]:
            self._rest(before[0], now)
            return
        if before is not None:
            self._pause_s = _AGAIN_S  # The network is another one than it was.
        if self.wanted == self._most:
            self._rest(self.wanted, now)
            return
        self._base = self.wanted, rate
        self._begin(min(2 * self.wanted, self._most))

    def _begin(self, wanted: int) -> None:
        self.wanted = wanted
        self._from, self._settled = None, False

    def _rest(self, wanted: int, now: float) -> None:
        """Stays with so many for a while."""
        self._begin(wanted)
        self._not_before = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _MOST_AGAIN_S)
