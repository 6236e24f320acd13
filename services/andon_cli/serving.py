"""Serving: what every service of Andon has beside its own calls: a port, health, reflection."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc.aio
from grpc_health.v1 import health_pb2

from andon_cli.errors import ConsoleError
from andon_cli.health_service import SERVICE_NAME, HealthService
from andon_cli.reflection import reflect

__all__ = ["GRACE_S", "introducing", "listen"]

GRACE_S = 2.0
"""How long open calls have to end when a service stops."""


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
