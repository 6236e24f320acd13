"""Keepalive: how often each end pings the other, in one place, so that they fit.

Theory of operation: HTTP/2 pings find a peer that is gone without a word, which no TCP connection
tells. gRPC's C core answers them, so a process whose Python is busy is not taken for gone. A
server counts pings that come sooner than it allows, and sends whoever goes on GOAWAY with
ENHANCE_YOUR_CALM ("too_many_pings"), and with it all streams of the connection. So what a client
is told, what it does and what a server allows are numbers of one object.
"""

from __future__ import annotations

from dataclasses import dataclass

from andon.protocol.run_settings import Liveness

__all__ = ["MIN_PING_S", "Keepalive", "Options", "RingKeepalive"]

Options = tuple[tuple[str, int], ...]
"""Channel arguments of gRPC."""

MIN_PING_S = 10.0
"""No client may ping a service of Andon's more often than this."""

_LEASE_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Keepalive:
    """The pings of both ends of a connection to a service; all are in seconds."""

    ping_s: float = _LEASE_S / 3
    """The server pings a silent client so often,"""
    answer_s: float = 2 * _LEASE_S / 3
    """and gives it so long to answer."""
    client_ping_s: float = 60.0
    """A client pings a silent server so often,"""
    client_answer_s: float = 60.0
    """and gives it so long to answer: a ping waits behind bulk, on a slow link for long."""
    least_s: float = MIN_PING_S
    """More often a client must not ping."""

    def __post_init__(self) -> None:
        """Refuses a client that the server would send away."""
        numbers = self.ping_s, self.answer_s, self.client_ping_s, self.client_answer_s, self.least_s
        if min(numbers) <= 0:
            raise ValueError(f"pings and answers take time, not {min(numbers)} s")
        if self.client_ping_s < self.least_s:
            raise ValueError(
                f"a client that pings every {self.client_ping_s:g} s would be sent away: once in "
                f"{self.least_s:g} s is what a server allows"
            )

    @classmethod
    def of(cls, liveness: Liveness) -> Keepalive:
        """The pings of a line: a client that answers none for a lease is lost."""
        third_s = liveness.lease_s / 3
        return cls(ping_s=third_s, answer_s=liveness.lease_s - third_s)

    def server_options(self) -> Options:
        """What a server is made with.

        It tolerates twice as many pings as are allowed: two of them may come together by a network
        that held one back.
        """
        answer_ms = _ms(self.answer_s)
        return (
            ("grpc.keepalive_time_ms", _ms(self.ping_s)),
            ("grpc.keepalive_timeout_ms", answer_ms),
            # What counts, and a minute unless it is set: the wait for a ping's answer.
            ("grpc.http2.ping_timeout_ms", answer_ms),
            # A client without a call is pinged, too, and may ping.
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.http2.min_ping_interval_without_data_ms", _ms(self.least_s / 2)),
        )

    def client_options(self) -> Options:
        """What a channel is made with. It pings only while it has a call."""
        answer_ms = _ms(self.client_answer_s)
        return (
            ("grpc.keepalive_time_ms", _ms(self.client_ping_s)),
            ("grpc.keepalive_timeout_ms", answer_ms),
            ("grpc.http2.ping_timeout_ms", answer_ms),
            ("grpc.keepalive_permit_without_calls", 0),
            # Else only two pings go out before data does, and then one a minute.
            ("grpc.http2.max_pings_without_data", 0),
        )


@dataclass(frozen=True, slots=True)
class RingKeepalive:
    """The pings of a ring's link: each end pings the other so often, and waits as long."""

    ping_s: float

    @classmethod
    def of(cls, lease_s: float) -> RingKeepalive:
        """A link's, on a line of this lease.

        A ping waits behind the chunks that are on the way: on a slow link, for seconds.
        """
        return cls(max(3 * lease_s, MIN_PING_S))

    def server_options(self) -> Options:
        """What the listener is made with."""
        return (
            *self._pings(),
            # The answer to a stream is its end: no data goes back that would clear strikes.
            ("grpc.http2.max_ping_strikes", 0),
        )

    def client_options(self) -> Options:
        """What the link's channel is made with."""
        return self._pings()

    def _pings(self) -> Options:
        ping_ms = _ms(self.ping_s)
        return (
            ("grpc.keepalive_time_ms", ping_ms),
            ("grpc.keepalive_timeout_ms", ping_ms),
            ("grpc.http2.max_pings_without_data", 0),
        )


def _ms(seconds: float) -> int:
    return max(1, int(seconds * 1000))
