"""The service: andon.v1.Coordinator on grpc.aio. It translates calls and decides nothing."""

# ruff: noqa: N802 - the protocol names its methods

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

import grpc.aio
from google.protobuf.message import DecodeError

from andon.protocol.halts import HaltAnswer
from andon.protocol.limits import clipped
from andon.protocol.reasons import Reason
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import coordinator_pb2_grpc as pb_grpc
from andon.wire import conversion
from andon_coordinator.core import events
from andon_coordinator.transport.errors import (
    InternalError,
    InvalidMessage,
    LineError,
    TooLarge,
    status_of,
)
from andon_coordinator.transport.guard import Guard
from andon_coordinator.transport.registration import Desk
from andon_coordinator.transport.status import same_for_people, status_to
from andon_coordinator.transport.stream import Stream
from andon_coordinator.transport.task import LineTask
from andon_coordinator.transport.translation import (
    event_from,
    join_from,
    require_readable,
)

__all__ = ["SERVICE_NAME", "CoordinatorService"]

log = logging.getLogger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Coordinator"].full_name
"""The service's full name, for health and reflection."""

_RESET_WITHIN_S = 0.05
"""How long after a stream's last message its reset may come, if it was reset.

A call that was reset reads as one that was half-closed; gRPC cancels the handler just after.
"""

_WATCH_EVERY_S = 1.0
"""Watchers get a status so often even if nothing happened: hearts beat."""

Context = Any  # grpc.aio's context; the stubs of the generated servicer know the sync one, too.


class CoordinatorService(pb_grpc.CoordinatorServicer):
    """Serves one line."""

    def __init__(
        self,
        task: LineTask,
        desk: Desk,
        *,
        guard: Guard,
        metrics_url: str,
        join_s: float,
        count: Callable[[Reason], None],
    ) -> None:
        """Serves the line of `task`.

        Args:
            task: owns the line.
            desk: takes reducers.
            guard: knows who may look and who may operate.
            metrics_url: shown in statuses.
            join_s: how long a stream has to send Join.
            count: told why a call was ended.
        """
        self._task = task
        self._desk = desk
        self._guard = guard
        self._metrics_url = metrics_url
        self._join_s = join_s
        self._count = count
        self._reading = asyncio.Lock()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds itself to a server that has not started."""
        pb_grpc.add_CoordinatorServicer_to_server(self, server)

    async def Train(  # type: ignore[override]  # grpc.aio takes coroutines, the stubs do not know
        self, request_iterator: AsyncIterator[pb.TrainRequest], context: Context
    ) -> None:
        """One worker's stream, from Join to its end."""
        stream = await self._open(context)
        reader = asyncio.create_task(self._read(stream, request_iterator))
        writer = asyncio.create_task(self._write(stream, context))
        stream.cut = writer.cancel
        gone = True
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            if not writer.done():
                await asyncio.wait({writer}, timeout=_RESET_WITHIN_S)
            # Still not cancelled: the peer half-closed, or we end the call ourselves.
            gone = context.cancelled() or _broke(writer)
        finally:
            self._task.stream_ended(stream, gone=gone)
            reader.cancel()
            if gone:
                writer.cancel()
        await asyncio.wait({writer})
        if stream.error is not None:
            log.info("stream_closed stream=%d why=%r", stream.number, clipped(str(stream.error)))
            await self._abort(context, stream.error)

    async def RegisterReducer(  # type: ignore[override]  # as Train
        self, request_iterator: AsyncIterator[pb.RegisterReducerRequest], context: Context
    ) -> None:
        """One reducer's stream, from its offer to its end."""
        try:
            await self._desk.serve(request_iterator, context)
        except LineError as error:
            log.info("reducer_ended why=%r", clipped(str(error)))
            await self._abort(context, error)

    async def GetStatus(
        self, request: pb.GetStatusRequest, context: Context
    ) -> pb.GetStatusResponse:
        """What the line is doing now."""
        await self._check(self._guard.let_look, request.run_id, context)
        return pb.GetStatusResponse(status=self._status())

    async def WatchStatus(  # type: ignore[override]  # as Train
        self, request: pb.WatchStatusRequest, context: Context
    ) -> None:
        """What the line is doing, until the coordinator goes away; who reads slowly skips."""
        await self._check(self._guard.let_look, request.run_id, context)
        sent: pb.LineStatus | None = None
        happened = goes_on = True
        while goes_on:
            status = self._status()
            if not (happened and same_for_people(sent, status)):
                await context.write(pb.WatchStatusResponse(status=status))
                sent = status
            happened, goes_on = await self._task.changed(_WATCH_EVERY_S)
        if not same_for_people(sent, self._status()):
            await context.write(pb.WatchStatusResponse(status=self._status()))

    async def PullCord(self, request: pb.PullCordRequest, context: Context) -> pb.PullCordResponse:
        """Stops the line."""
        await self._check(self._guard.let_operate, request.run_id, context)
        await self._ask(
            events.CordPulled(clipped(request.reason), clipped(request.operator)), context
        )
        return pb.PullCordResponse(halt=conversion.evidence_to_proto(self._task.status().halt))

    async def ClearHalt(
        self, request: pb.ClearHaltRequest, context: Context
    ) -> pb.ClearHaltResponse:
        """Answers a halt."""
        await self._check(self._guard.let_operate, request.run_id, context)
        try:
            answer = conversion.enum_from_proto(HaltAnswer, request.answer)
        except conversion.WireError as error:
            await self._abort(context, InvalidMessage(f"answer: {error}"))
        worker = request.worker if answer is HaltAnswer.DROP else None
        operator = clipped(request.operator)
        await self._ask(events.HaltCleared(request.halt_id, answer, worker, operator), context)
        return pb.ClearHaltResponse(status=self._status())

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """RunEnd the run after the present step."""
        await self._check(self._guard.let_operate, request.run_id, context)
        await self._ask(events.DrainRequested(clipped(request.operator)), context)
        return pb.DrainResponse(status=self._status())

    async def _open(self, context: Context) -> Stream:
        try:
            return self._task.open_stream()
        except LineError as error:
            await self._abort(context, error)

    async def _read(self, stream: Stream, requests: AsyncIterator[pb.TrainRequest]) -> None:
        try:
            messages = aiter(requests)
            await self._task.join(stream, await self._joining(await self._first(messages)))
            async for request in messages:
                await self._task.put(event_from(stream.number, request))
        except (InvalidMessage, TooLarge) as error:
            stream.end(error)
        except DecodeError:
            stream.end(InvalidMessage("the bytes are no TrainRequest"))
        except Exception:  # the boundary of this task: the stream ends, the line goes on
            log.exception("stream_failed stream=%d", stream.number)
            stream.end(InternalError("the coordinator failed; its log says how"))

    async def _joining(self, message: pb.TrainRequest) -> events.JoinRequest:
        """The Join of a stream. A large one is read in a thread, one after the other: a flood of
        them must not hold up who trains."""
        if not require_readable(message):
            return join_from(message)
        async with self._reading:
            return await asyncio.to_thread(join_from, message)

    async def _first(self, messages: AsyncIterator[pb.TrainRequest]) -> pb.TrainRequest:
        """A stream's first message: whoever sends none must not keep a place on the server."""
        try:
            return await asyncio.wait_for(anext(messages), self._join_s)
        except StopAsyncIteration:
            raise InvalidMessage("the stream ended before join") from None
        except TimeoutError:
            raise InvalidMessage(f"no join came within {self._join_s:g} s") from None

    async def _write(self, stream: Stream, context: Context) -> None:
        async for message in stream.messages():
            await context.write(message)

    def _status(self) -> pb.LineStatus:
        return status_to(self._task.status(), self._metrics_url)

    async def _check(
        self, let: Callable[[Context, str], None], run_id: str, context: Context
    ) -> None:
        try:
            let(context, run_id)
        except LineError as error:
            log.info("call_refused reason=%s", error.reason)
            await self._abort(context, error)

    async def _ask(self, event: events.Event, context: Context) -> None:
        try:
            await self._task.ask(event)
        except LineError as error:
            await self._abort(context, error)

    async def _abort(self, context: Context, error: LineError) -> NoReturn:
        """RunEnd a call with an error, and counts it."""
        self._count(error.reason)
        await context.abort_with_status(status_of(error))
        raise AssertionError("abort_with_status returned")


def _broke(writer: asyncio.Task[None]) -> bool:
    return writer.done() and not writer.cancelled() and writer.exception() is not None
