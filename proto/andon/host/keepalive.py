"""Keepalive: how often each end of a connection pings the other.

Theory of operation: HTTP/2 pings find a peer that disappeared without closing its connection, which
TCP would not notice. gRPC's C core answers them, so a process whose Python is busy does not look
dead. A server counts pings that come sooner than it allows, and ends the connection of a client
that goes on, with all its streams: GOAWAY, ENHANCE_YOUR_CALM ("too_many_pings"). So the numbers of
both ends must fit, and are kept in one object.
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
    """The pings of both ends of a connection to a service, in seconds."""

    ping_s: float = _LEASE_S / 3
    """The server pings a client after so long without data."""
    answer_s: float = 2 * _LEASE_S / 3
    """A client that does not answer within it is lost."""
    client_ping_s: float = 60.0
    """A client pings the server after so long without data."""
    client_answer_s: float = 60.0
    """So long the server has to answer: on a slow link, a ping waits long behind bulk data."""
    least_s: float = MIN_PING_S
    """A client must not ping more often than this."""

    def __post_init__(self) -> None:
        """Refuses times that are not positive, and a client whose connections would be ended."""
        numbers = self.ping_s, self.answer_s, self.client_ping_s, self.client_answer_s, self.least_s
        if min(numbers) <= 0:
            raise ValueError(f"times of pings and answers must be above 0 s, not {min(numbers)} s")
        if self.client_ping_s < self.least_s:
            raise ValueError(
                f"a client must not ping every {self.client_ping_s:g} s: a server allows one ping "
                f"in {self.least_s:g} s, and ends the connection of a client that sends more"
            )

    @classmethod
    def of(cls, liveness: Liveness) -> Keepalive:
        """The pings of a line: a client that does not answer for a lease is lost."""
        third_s = liveness.lease_s / 3
        return cls(ping_s=third_s, answer_s=liveness.lease_s - third_s)

    def server_options(self) -> Options:
        """The options of a server.

        It tolerates pings twice as often as allowed: a network may delay one, so that two arrive
        close together.
        """
        answer_ms = _ms(self.answer_s)
        return (
            ("grpc.keepalive_time_ms", _ms(self.ping_s)),
            ("grpc.keepalive_timeout_ms", answer_ms),
            # The wait for a ping's answer that counts; a minute unless it is set.
            ("grpc.http2.ping_timeout_ms", answer_ms),
            # Clients without a call are pinged, too, and may ping.
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.http2.min_ping_interval_without_data_ms", _ms(self.least_s / 2)),
        )

    def client_options(self) -> Options:
        """The options of a client's channel. It pings only while it has a call."""
        answer_ms = _ms(self.client_answer_s)
        return (
            ("grpc.keepalive_time_ms", _ms(self.client_ping_s)),
            ("grpc.keepalive_timeout_ms", answer_ms),
            ("grpc.http2.ping_timeout_ms", answer_ms),
            ("grpc.keepalive_permit_without_calls", 0),
            # By default only two pings are sent without data between them, then one a minute.
            ("grpc.http2.max_pings_without_data", 0),
        )


@dataclass(frozen=True, slots=True)
class RingKeepalive:
    """The pings of a ring's link: each end pings so often, and waits as long for the answer."""

    ping_s: float

    @classmethod
    def of(cls, lease_s: float) -> RingKeepalive:
        """The pings on a line with this lease.

        They are slower than the coordinator's: a ping waits behind the chunks on the way, and on a
        slow link that takes seconds.
        """
        return cls(max(3 * lease_s, MIN_PING_S))

    def server_options(self) -> Options:
        """The options of the listener."""
        return (
            *self._pings(),
            # A stream has no answer before its end, so no data goes back that would reset the count
            # of early pings. Any would end the link some time.
            ("grpc.http2.max_ping_strikes", 0),
        )

    def client_options(self) -> Options:
        """The options of the link's channel."""
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
