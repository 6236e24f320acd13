"""Serving: what every service of Andon has beside its own calls: a port, health, reflection."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from andon_cli.errors import ConsoleError

__all__ = ["GRACE_S", "introducing", "listen"]

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


def listen(server: grpc.aio.Server, bind: str, port: int, what: str) -> int:
    """Makes a server listen; the port that it got.

    Raises:
        ConsoleError: the port is taken.
    """
    try:
        return server.add_insecure_port(f"{bind}:{port}")
    except RuntimeError as error:
        raise ConsoleError(
            f"{what} can't be served on {bind}:{port}: end what listens there, "
            "or pass --port 0 for any free port"
        ) from error
