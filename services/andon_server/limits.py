"""Limits: how much of a service its clients may take.

Every limit is a setting with a safe default. `docs/protocol-servers.md`, section 25, lists them.
The error that a limit causes names its flag.
"""

from __future__ import annotations

import logging
import resource
from dataclasses import dataclass, field, replace
from typing import Annotated

from cyclopts import Parameter

from andon.host.errors import UsageError
from andon.host.logs import LogEvent
from andon.host.settings import LIMITS, Count, check, flag_of, seconds, whole
from andon.protocol.limits import CHUNK_ELEMENTS, MAX_MESSAGE_BYTES, MAX_PAYLOAD_BYTES
from andon_reducer.config import ReducerLimits

__all__ = ["Limits", "with_descriptors"]

_BESIDE_BYTES = MAX_MESSAGE_BYTES - MAX_PAYLOAD_BYTES
"""The most that a message may hold beside its payload."""

_LEAST_WAITING_CALLS = 32
"""Well-meaning clients may start a few calls at the same moment."""

_OWN_DESCRIPTORS = 256
"""Files that the service itself needs: the journal, its log, listeners, shared memory."""

_log = logging.getLogger(__name__)


@Parameter(name="*", group=LIMITS)
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much one process accepts. Each field is a setting; its docstring is the help."""

    max_message_bytes: Annotated[int, whole(2 * _BESIDE_BYTES, MAX_MESSAGE_BYTES)] = (
        MAX_MESSAGE_BYTES
    )
    """The largest message in bytes. gRPC clients accept 4 MiB at most."""
    chunk_elements: Count = CHUNK_ELEMENTS
    """Elements in a chunk. The line and its reducers need the same number."""
    max_connections: Count = 4096
    """TCP connections at once; the next one is closed as it arrives."""
    max_streams_per_connection: Count = 128
    """Calls at once on one connection; HTTP/2 makes the client wait with the next one."""
    max_calls: Count = 4096
    """Calls at once, from all hosts."""
    max_calls_per_host: Count = 1024
    """Calls at once from one host."""
    max_silent_calls: Count = 128
    """Calls that have sent no message yet; one more ends the oldest of them."""
    max_watchers: Count = 64
    """Calls at once that only watch: WatchStatus, health's Watch, reflection."""
    first_message_timeout_s: Annotated[float, seconds(0.1)] = 30.0
    """How long a call may take to send its first message."""
    reducer: ReducerLimits = field(default_factory=ReducerLimits)
    """The limits of the reducer in this process."""

    def __post_init__(self) -> None:
        """Refuses limits that nothing could work within."""
        check(self)
        if 4 * self.chunk_elements > self.max_payload_bytes:
            raise UsageError(
                f"--chunk-elements {self.chunk_elements} of float32 do not fit a payload of "
                f"{self.max_payload_bytes} bytes: lower it, or raise --max-message-bytes"
            )

    @property
    def max_payload_bytes(self) -> int:
        """The largest payload of a chunk."""
        return self.max_message_bytes - _BESIDE_BYTES

    def channel_options(self) -> tuple[tuple[str, int], ...]:
        """The limits that gRPC itself keeps. They go after the service's own options, and win."""
        return (
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.max_allowed_incoming_connections", self.max_connections),
            ("grpc.max_concurrent_streams", self.max_streams_per_connection),
            # Calls that the event loop has not started yet. gRPC buffers what they have sent.
            ("grpc.server.max_pending_requests", self.max_waiting_calls),
            ("grpc.server.max_pending_requests_hard_limit", self.max_waiting_calls),
            # What a stream may send before we read it. With the probe on, gRPC would widen this
            # window with rate and delay, and a paused stream (or an attacker's) would fill it.
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", self.max_message_bytes),
            # Close connections that never finish their handshake. Those that did and fall silent
            # are found by keepalive pings.
            ("grpc.server_handshake_timeout_ms", 10_000),
            ("grpc.http2.settings_timeout", 10_000),
            ("grpc.max_connection_idle_ms", 600_000),
        )

    @property
    def max_waiting_calls(self) -> int:
        """Calls that gRPC queues for the event loop; it refuses one more by itself."""
        return max(_LEAST_WAITING_CALLS, self.max_silent_calls)

    def remedy(self, name: str) -> str:
        """What to do about a limit, as half a sentence."""
        return f"the operator may raise {flag_of(name)}"


def with_descriptors(limits: Limits) -> Limits:
    """Raises this process's limit of open files to what its connections may need.

    A process without free descriptors could not open files of its own either. So where the system
    allows fewer, the limits that come back accept fewer connections.

    Raises:
        UsageError: there are too few descriptors for any connection.
    """
    wanted = limits.max_connections + _OWN_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    given = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < given:
        resource.setrlimit(resource.RLIMIT_NOFILE, (given, hard))
    if given == wanted:
        return limits
    room = given - _OWN_DESCRIPTORS
    if room < 1:
        raise UsageError(f"this process may have {hard} open files, too few: raise `ulimit -n`")
    why = f"{hard} open files are allowed"
    _log.warning(LogEvent("connections_limited", to=room, why=why))
    return replace(limits, max_connections=room)
