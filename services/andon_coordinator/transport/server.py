"""Options of the gRPC server that serves a coordinator, its workers' leases among them.

Theory of operation: the server's HTTP/2 pings are the lease. A peer that answers none for `lease_s`
loses its connection, and with it its streams: a stopped process, a dead link. Pings are answered
by gRPC's C core, so a worker whose Python holds the interpreter's lock for long is not taken for
dead, as it would be if its heartbeats were waited for.
"""

from __future__ import annotations

from andon.host.keepalive import Keepalive, Options
from andon.protocol.limits import MAX_MESSAGE_BYTES
from andon.protocol.run_settings import Liveness

__all__ = ["server_options"]


def server_options(liveness: Liveness | None = None) -> Options:
    """Channel arguments for `grpc.aio.server(options=...)`; `liveness` is the line's.

    A second server on the port is refused.
    """
    return (
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        *Keepalive.of(liveness or Liveness()).server_options(),
    )
