"""Serving: what every service of Andon has beside its own calls: a port, health, reflection."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from andon_cli.admission import Admission
from andon_cli.errors import ConsoleError
from andon_cli.limits import Limits, with_descriptors
from andon_reducer.config import ReducerConfig

__all__ = ["GRACE_S", "guarded_server", "introducing", "listen", "reducer_settings"]

GRACE_S = 2.0
"""How long open calls have to end when a service stops."""


def guarded_server(options: Sequence[tuple[str, int]], limits: Limits) -> grpc.aio.Server:
    """A server with a service's own channel options that keeps the limits."""
    limits = with_descriptors(limits)
    return grpc.aio.server(
        interceptors=[Admission(limits)], options=[*options, *limits.channel_options()]
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
