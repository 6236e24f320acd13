"""Attending: a rank's Attend call, from its first message to its end.

It has two tasks, as Train has: one reads messages and tells the core, the other writes what waits
on the call's stream. Whatever ends the reading is the end of the rank.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from andon.host.logs import LogEvent
from andon.protocol.limits import clipped
from andon.v1 import session_pb2 as pb
from andon_coordinator.transport.access_control import AccessControl
from andon_coordinator.transport.session_messages import (
    SessionTokens,
    attend_from,
    host_of_peer,
    session_event_from,
)
from andon_coordinator.transport.session_task import RankStream
from andon_coordinator.transport.streams import ending, next_of, see_end
from andon_coordinator.transport.task import LineTask

__all__ = ["RankAttendance"]

log = logging.getLogger(__name__)

Context = Any  # grpc.aio's context; the stubs of the generated servicer know the sync one, too.


class RankAttendance:
    """Serves Attend: admits ranks to the sessions of a run."""

    def __init__(
        self, task: LineTask, *, access: AccessControl, tokens: SessionTokens, attend_s: float
    ) -> None:
        """Serves the sessions of `task`; a stream has `attend_s` to send Attend."""
        self._task = task
        self._access = access
        self._tokens = tokens
        self._attend_s = attend_s

    async def serve(self, requests: AsyncIterator[pb.AttendRequest], context: Context) -> None:
        """Serves one call of Attend to its end.

        Raises:
            LineError: it ends with an error.
        """
        stream = self._task.open_attendance()
        host = host_of_peer(context.peer())
        reader = asyncio.create_task(self._read(stream, requests, host))
        writer = asyncio.create_task(self._write(stream, context))
        writer.add_done_callback(see_end)
        stream.cut = writer.cancel
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # First, and on every way out: until then the session waits for this rank.
            self._task.attendance_ended(stream)
            reader.cancel()
            if not stream.over:
                stream.end()
            if context.cancelled():
                writer.cancel()
        # What the core sent before the end is still written, for a while.
        await asyncio.wait({writer})
        if stream.error is not None:
            why = clipped(str(stream.error))
            log.info(LogEvent("attendance_ended", stream=stream.number, why=why))
            raise stream.error

    async def _read(
        self, stream: RankStream, requests: AsyncIterator[pb.AttendRequest], host: str
    ) -> None:
        with ending(stream, "an AttendRequest"):
            messages = aiter(requests)
            first = await next_of(messages, "attend", self._attend_s)
            # Before anything else is said: who does not know the token learns nothing of the run.
            self._access.check_rank(first.attend.token, first.attend.run_id)
            self._task.attend(stream, attend_from(first, host))
            async for message in messages:
                self._task.put_session(session_event_from(stream.number, message))

    async def _write(self, stream: RankStream, context: Context) -> None:
        # Made into messages here, one after the other: a rank of many needs as many tokens.
        async for effect in stream.messages():
            await context.write(self._tokens.message_to(effect))
