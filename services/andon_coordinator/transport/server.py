"""Options of the gRPC server that serves a coordinator, its workers' leases among them.

Theory of operation: the server's HTTP/2 pings are the lease. A peer that answers none for `lease_s`
loses its connection, and with it its streams: a stopped process, a dead link. Pings are answered
by gRPC's C core, so a worker whose Python holds the interpreter's lock for long is not taken for
dead, as it would be if its heartbeats were waited for.
"""

from __future__ import annotations

from andon.limits import MAX_MESSAGE_BYTES
from andon.terms import Liveness

__all__ = ["SILENCE_LEASES", "server_options"]

SILENCE_LEASES = 20
"""A worker whose connection lives is lost only if it says nothing for so many leases."""


def server_options(liveness: Liveness | None = None) -> tuple[tuple[str, int], ...]:
    """Channel arguments for `grpc.aio.server(options=...)`; `liveness` is the line's.

    A second server on the port is refused, and clients may ping from every 10 s.
    """
    lease_ms = int((liveness or Liveness()).lease_s * 1000)
    answer_ms = lease_ms - lease_ms // 3
    return (
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", lease_ms // 3),
        ("grpc.keepalive_timeout_ms", answer_ms),
        # What counts, and a minute unless it is set: the wait for a ping's answer.
        ("grpc.http2.ping_timeout_ms", answer_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    )
