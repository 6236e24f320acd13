"""Limits: how much of a service anybody may take; every one a setting, with a default that is safe.

`docs/protocol.md`, section 25, lists them. An error that a limit causes names its flag.
"""

from __future__ import annotations

import argparse
import logging
import resource
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from andon.protocol.limits import CHUNK_ELEMENTS, MAX_MESSAGE_BYTES, MAX_PAYLOAD_BYTES
from andon_server.errors import UsageError

if TYPE_CHECKING:
    from andon_cli.settings import Settings

__all__ = ["Limits", "add_limit_flags", "limit_names", "limits_of", "with_descriptors"]

_BESIDE_BYTES = MAX_MESSAGE_BYTES - MAX_PAYLOAD_BYTES
"""What a message has beside its payload, at most."""

_LEAST_WAITING_CALLS = 32
"""Some come at the same moment though nobody means any harm."""

_OWN_DESCRIPTORS = 256
"""Files of the service's own: the journal, its log, listeners, shared memory."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one process takes; see each field."""

    max_message_bytes: int = MAX_MESSAGE_BYTES
    """The largest message that is taken, and sent: no client may be asked for more than 4 MiB."""
    chunk_elements: int = CHUNK_ELEMENTS
    """Elements in a chunk: `Policy.chunk_elements`; the same for a line and its reducers."""
    max_connections: int = 4096
    """TCP connections at once; the next is closed as it comes."""
    max_streams_per_connection: int = 128
    """Calls at once on one connection; HTTP/2 makes the client wait with the next."""
    max_calls: int = 4096
    """Calls at once in all."""
    max_calls_per_host: int = 1024
    """Calls at once from one host."""
    max_silent_calls: int = 128
    """Calls whose first message is not there: one more ends the oldest of them. As many more may
    wait for the event loop to come to them."""
    max_watchers: int = 64
    """Calls at once that only watch: WatchStatus, health's Watch, reflection."""
    max_streams_per_worker: int = 8
    """Streams of one worker at one reducer: Reduce; and as many PutState and GetState together."""
    max_held_bytes: int = 4 * 2**30
    """Contributions and averages that a reducer holds at once, of all runs and streams."""
    max_state_pieces: int = 4
    """Pieces of one state transfer that a reducer holds at once."""
    first_message_s: float = 30.0
    """How long a call has to send its first message."""

    def __post_init__(self) -> None:
        """Refuses limits that nothing could work within."""
        for each in fields(self):
            if not getattr(self, each.name) > 0:
                raise UsageError(f"{_flag(each.name)} must be above 0")
        if not 2 * _BESIDE_BYTES <= self.max_message_bytes <= MAX_MESSAGE_BYTES:
            raise UsageError(
                f"--max-message-bytes must be from {2 * _BESIDE_BYTES} to {MAX_MESSAGE_BYTES}, "
                "which is what any client of gRPC takes"
            )
        if 4 * self.chunk_elements > self.max_payload_bytes:
            raise UsageError(
                f"--chunk-elements {self.chunk_elements} of float32 do not fit a payload of "
                f"{self.max_payload_bytes} bytes: lower it, or raise --max-message-bytes"
            )
        if self.max_held_bytes < 2**28:
            raise UsageError("--max-held-bytes must be at least 268435456: two windows and more")

    @property
    def max_payload_bytes(self) -> int:
        """The largest payload of a chunk."""
        return self.max_message_bytes - _BESIDE_BYTES

    def channel_options(self) -> tuple[tuple[str, int], ...]:
        """What gRPC itself keeps; they go after the service's own, and win."""
        return (
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.max_allowed_incoming_connections", self.max_connections),
            ("grpc.max_concurrent_streams", self.max_streams_per_connection),
            # Calls that the event loop has not come to yet: gRPC holds what they have sent so far.
            ("grpc.server.max_pending_requests", self.max_waiting_calls),
            ("grpc.server.max_pending_requests_hard_limit", self.max_waiting_calls),
            # What a stream may send before it is read: gRPC would widen it with rate and delay, and
            # a paused stream, or one of an attacker, fill it.
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", self.max_message_bytes),
            # Who says nothing to a handshake is hung up on; a silent one that did, by its pings.
            ("grpc.server_handshake_timeout_ms", 10_000),
            ("grpc.http2.settings_timeout", 10_000),
            ("grpc.max_connection_idle_ms", 600_000),
        )

    @property
    def max_waiting_calls(self) -> int:
        """Calls that gRPC keeps until the event loop comes to them; one more it ends itself."""
        return max(_LEAST_WAITING_CALLS, self.max_silent_calls)

    def remedy(self, name: str) -> str:
        """What to do about a limit: half a sentence."""
        return f"the operator may raise {_flag(name)}"

    def flags(self) -> list[tuple[str, object]]:
        """Flag and value of each limit that is not the default's."""
        return [
            (_flag(each.name), getattr(self, each.name))
            for each in fields(self)
            if getattr(self, each.name) != each.default
        ]


def limit_names() -> tuple[str, ...]:
    """The names under which a command line has the limits."""
    return tuple(_setting(each.name) for each in fields(Limits))


def limits_of(settings: Settings) -> Limits:
    """The limits that were given.

    Raises:
        UsageError: a value can't be read, or nothing could work within it.
    """
    given = {
        each.name: settings.whole(_setting(each.name), int(each.default), least=1)
        for each in fields(Limits)
        if isinstance(each.default, int)
    }
    patience = settings.seconds("first_message_timeout", Limits().first_message_s, least=0.1)
    return Limits(**given, first_message_s=patience)


def add_limit_flags(verb: argparse.ArgumentParser) -> None:
    """The flags of all limits, in a group of their own."""
    group = verb.add_argument_group(
        "limits", "what anybody may take (docs/protocol.md, section 25)"
    )
    for name, what in _HELP.items():
        default = Limits.__dataclass_fields__[name].default
        shown = "SECONDS" if name.endswith("_s") else "N"
        group.add_argument(_flag(name), metavar=shown, help=f"{what} (default: {default})")


def with_descriptors(limits: Limits) -> Limits:
    """Lets this process have as many open files as its connections may need, as far as it may.

    Out of descriptors it could open no file of its own either: so if the system gives fewer, the
    limits that come back take fewer connections.

    Raises:
        UsageError: there are too few for any.
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
    _log.warning("connections_limited to=%d why='%d open files are allowed'", room, hard)
    return replace(limits, max_connections=room)


def _setting(name: str) -> str:
    return "first_message_timeout" if name == "first_message_s" else name


def _flag(name: str) -> str:
    return "--" + _setting(name).replace("_", "-")


_HELP = {
    "max_message_bytes": "the largest message",
    "chunk_elements": "elements in a chunk, the same for a line and its reducers",
    "max_connections": "connections at once",
    "max_streams_per_connection": "calls at once on one connection",
    "max_calls": "calls at once",
    "max_calls_per_host": "calls at once from one host",
    "max_silent_calls": "calls without a first message; one more ends the oldest",
    "max_watchers": "calls at once that only watch",
    "max_streams_per_worker": "streams of one worker at one reducer",
    "max_held_bytes": "bytes that a reducer holds at once, of all workers",
    "max_state_pieces": "pieces of a state transfer that are held at once",
    "first_message_s": "how long a call has to send its first message",
}
