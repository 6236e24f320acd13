"""The service grpc.health.v1.Health: whether a process lives, and which services want newcomers.

The empty name is the process: SERVING until it is told to end, also while the line is halted or
drains, since a restart would destroy the evidence. A service's name is its readiness.
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
"""The service's full name, for reflection."""

_TELL_S = 0.25
"""How long whoever watches has to take the last word; one that does not read gets none."""

Context = Any  # grpc.aio's context; the stubs of the generated servicer know the sync one, too.


class HealthService(pb_grpc.HealthServicer):  # type: ignore[misc]  # it has no types
    """Tells the health of one process. All but the calls is for the event loop's own thread."""

    def __init__(self, services: Iterable[str]) -> None:
        """SERVING: the process, and each of `services`."""
        self._states = dict.fromkeys(("", *services), pb.HealthCheckResponse.SERVING)
        self._changed = asyncio.Event()
        self._leaving = False
        self._watching = 0
        self._alone = asyncio.Event()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds itself to a server that has not started."""
        pb_grpc.add_HealthServicer_to_server(self, server)

    def set(self, service: str, *, ready: bool) -> None:
        """Says from now on whether `service` wants newcomers; nothing more once it is leaving."""
        if not self._leaving:
            self._states[service] = (
                pb.HealthCheckResponse.SERVING if ready else pb.HealthCheckResponse.NOT_SERVING
            )
            self._stir()

    async def leave(self) -> None:
        """Says NOT_SERVING of all, for good, and returns once whoever watches was told."""
        self._states = dict.fromkeys(self._states, pb.HealthCheckResponse.NOT_SERVING)
        self._leaving = True
        self._stir()
        if self._watching:
            try:
                await asyncio.wait_for(self._alone.wait(), _TELL_S)
            except TimeoutError:
                return

    async def Check(self, request: pb.HealthCheckRequest, context: Context) -> Any:
        """A service's health now; NOT_FOUND if it is not served here."""
        state = self._states.get(request.service)
        if state is None:
            served = ", ".join(filter(None, self._states))
            text = f"{request.service[:100]} is not served here, but {served}"
            await context.abort(grpc.StatusCode.NOT_FOUND, text)
        return pb.HealthCheckResponse(status=state)

    async def List(self, request: Any, context: Context) -> Any:
        """Every service's health now."""
        return pb.HealthListResponse(
            statuses={
                name: pb.HealthCheckResponse(status=state) for name, state in self._states.items()
            }
        )

    async def Watch(self, request: pb.HealthCheckRequest, context: Context) -> None:
        """A service's health, now and at each change; who reads slowly skips."""
        sent: int | None = None
        self._watching += 1
        self._alone.clear()
        try:
            while True:
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
                self._alone.set()

    def _stir(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def _leave(context: Context) -> NoReturn:
    await context.abort_with_status(
        status_of(Reason.SERVICE_LEAVING, "the process is going away: it watches no more")
    )
    raise AssertionError("abort_with_status returned")
