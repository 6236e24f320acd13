"""Serving: what every service of Andon has beside its own calls: a port, health, reflection."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health_pb2
from prometheus_client import CollectorRegistry

from andon.host.telemetry import RefusalCounter
from andon.host.tls import ServerIdentity, TlsError, add_port
from andon_reducer.config import ReducerConfig
from andon_server.admission import Admission
from andon_server.errors import ConsoleError, UsageError
from andon_server.handshakes import overheard
from andon_server.health import SERVICE_NAME, HealthService
from andon_server.limits import Limits, with_descriptors
from andon_server.reflection import reflect
from andon_server.security import Access
from andon_server.telemetry import Handshakes

__all__ = [
    "GRACE_S",
    "guarded_server",
    "identified",
    "introducing",
    "listen",
    "reducer_settings",
]

GRACE_S = 2.0
"""How long open calls have to end when a service stops."""


def guarded_server(
    options: Sequence[tuple[str, int]], limits: Limits, refusals: RefusalCounter
) -> grpc.aio.Server:
    """A server with a service's own channel options that keeps the limits, and counts to whom."""
    limits = with_descriptors(limits)
    return grpc.aio.server(
        interceptors=[Admission(limits, refusals.of("server"))],
        options=[*options, *limits.channel_options()],
    )


def reducer_settings(limits: Limits, shared_dir: Path | None) -> ReducerConfig:
    """A reducer that keeps the limits."""
    return ReducerConfig(
        max_payload_bytes=limits.max_payload_bytes,
        chunk_elements=limits.chunk_elements,
        shared_dir=shared_dir,
        opening_s=limits.first_message_s,
        state_pieces=limits.max_state_pieces,
        max_streams_per_worker=limits.max_streams_per_worker,
        max_held_bytes=limits.max_held_bytes,
    )


@asynccontextmanager
async def introducing(
    server: grpc.aio.Server, services: Sequence[str]
) -> AsyncIterator[HealthService]:
    """Tells health and answers reflection for `services`; at last says that all go away."""
    health = HealthService(services)
    health.add_to(server)
    end_reflection = reflect(server, (*services, SERVICE_NAME), health_pb2)
    try:
        yield health
    finally:
        await health.leave()
        end_reflection()


@contextmanager
def identified(access: Access, registry: CollectorRegistry) -> Iterator[ServerIdentity | None]:
    """What a service shows of itself, as `access` says; None: it speaks in the clear.

    Handshakes are counted while it is entered.

    Raises:
        UsageError: the folder of certificates can't be used.
    """
    handshakes = Handshakes(registry)
    if access.tls is None:
        yield None
        return
    try:
        identity = ServerIdentity(access.tls, handshakes.begun)
    except TlsError as error:
        raise UsageError(str(error)) from error
    with overheard(handshakes.failed):
        yield identity


def listen(
    server: grpc.aio.Server, bind: str, port: int, what: str, identity: ServerIdentity | None = None
) -> int:
    """Makes a server listen, over TLS if it has an identity; the port that it got.

    Raises:
        ConsoleError: the port is taken.
    """
    try:
        return add_port(server, f"{bind}:{port}", identity)
    except RuntimeError as error:
        raise ConsoleError(
            f"{what} can't be served on {bind}:{port}: end what listens there, "
            "or pass --port 0 for any free port"
        ) from error
