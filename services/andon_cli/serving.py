"""Serving: what every service of Andon has beside its own calls: a port, health, reflection."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from andon.tls import ServerIdentity, TlsError, add_port
from andon_cli.errors import ConsoleError, UsageError
from andon_cli.security import Access
from andon_cli.telemetry import handshakes_in

__all__ = ["GRACE_S", "identity_of", "introducing", "listen"]

GRACE_S = 2.0
"""How long open calls have to end when a service stops."""


@asynccontextmanager
async def introducing(server: grpc.aio.Server, services: Sequence[str]) -> AsyncIterator[None]:
    """Answers SERVING while it is entered, also for a halted line: a restart would destroy the
    evidence. Then it tells watchers that the service goes away. Reflection lists `services`.
    """
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    for name in ("", *services):
        await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    try:
        yield
    finally:
        await servicer.enter_graceful_shutdown()


def identity_of(access: Access, registry: CollectorRegistry) -> ServerIdentity | None:
    """What a service shows of itself, as `access` says; None: it speaks in the clear.

    Raises:
        UsageError: the folder of certificates can't be used.
    """
    handshakes = handshakes_in(registry)
    if access.tls is None:
        return None
    try:
        return ServerIdentity(access.tls, handshakes.inc)
    except TlsError as error:
        raise UsageError(str(error)) from error


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
