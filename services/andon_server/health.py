"""The service grpc.health.v1.Health: whether a process is up, and which services are ready.

The empty name stands for the process: it is SERVING until it shuts down, even while the line is
halted or drains, since a restart would destroy the evidence. A service's name stands for whether it
takes new clients.
"""

# ruff: noqa: N802 - the protocol names its methods

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, NoReturn

import grpc.aio
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc as pb_grpc

from andon.protocol.reasons import Reason
from andon.wire.statuses import status_of

__all__ = ["SERVICE_NAME", "HealthService"]

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["Health"].full_name
"""The full name of the service, for reflection."""

_LAST_STATE_S = 0.25
"""How long watchers may take to read the last state. Slower ones do not get it."""

Context = Any  # grpc.aio's context; the stubs of the generated servicer know the sync one, too.


class HealthService(pb_grpc.HealthServicer):  # type: ignore[misc]  # it has no types
    """Reports the health of one process. Use it on the event loop's thread only."""

    def __init__(self, services: Iterable[str]) -> None:
        """Starts with the process and each of `services` as SERVING."""
        self._states = dict.fromkeys(("", *services), pb.HealthCheckResponse.SERVING)
        self._changed = asyncio.Event()
        self._leaving = False
        self._watching = 0
        self._nobody_watches = asyncio.Event()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds itself to a server that has not started."""
        pb_grpc.add_HealthServicer_to_server(self, server)

    def set(self, service: str, *, ready: bool) -> None:
        """Changes whether `service` is ready. Does nothing once the process is shutting down."""
        if not self._leaving:
            self._states[service] = (
                pb.HealthCheckResponse.SERVING if ready else pb.HealthCheckResponse.NOT_SERVING
            )
            self._wake_watchers()

    async def leave(self) -> None:
        """Reports NOT_SERVING for everything from now on. Returns once the watchers know."""
        self._states = dict.fromkeys(self._states, pb.HealthCheckResponse.NOT_SERVING)
        self._leaving = True
        self._wake_watchers()
        # The server stops right after this. Without the wait, watchers would see a broken stream
        # where they should see NOT_SERVING.
        if self._watching:
            try:
                async with asyncio.timeout(_LAST_STATE_S):
                    await self._nobody_watches.wait()
            except TimeoutError:
                return

    async def Check(self, request: pb.HealthCheckRequest, context: Context) -> Any:
        """The health of a service now; NOT_FOUND if it is not served here."""
        state = self._states.get(request.service)
        if state is None:
            served = ", ".join(filter(None, self._states))
            text = f"{request.service[:100]} is not served here, but {served}"
            await context.abort(grpc.StatusCode.NOT_FOUND, text)
        return pb.HealthCheckResponse(status=state)

    async def List(self, request: Any, context: Context) -> Any:
        """The health of all services now."""
        return pb.HealthListResponse(
            statuses={
                name: pb.HealthCheckResponse(status=state) for name, state in self._states.items()
            }
        )

    async def Watch(self, request: pb.HealthCheckRequest, context: Context) -> None:
        """The health of a service, now and at each change. A slow reader skips states."""
        sent: int | None = None
        self._watching += 1
        self._nobody_watches.clear()
        try:
            while True:
                # Take the event before reading the state: a change between the two wakes us again.
                changed, leaving = self._changed, self._leaving
                state = self._states.get(request.service, pb.HealthCheckResponse.SERVICE_UNKNOWN)
                if state != sent:
                    await context.write(pb.HealthCheckResponse(status=state))
                    sent = state
                if leaving:
                    await _leave(context)
                await changed.wait()
        finally:
            self._watching -= 1
            if not self._watching:
                self._nobody_watches.set()

    def _wake_watchers(self) -> None:
        # A new event each time: whoever waits on the old one wakes, and nobody can miss a change.
        self._changed.set()
        self._changed = asyncio.Event()


async def _leave(context: Context) -> NoReturn:
    await context.abort_with_status(
        status_of(Reason.SERVICE_LEAVING, "the process is shutting down: watch again later")
    )
    raise AssertionError("abort_with_status returned")
