"""The service: andon.v1.Coordinator on grpc.aio. It translates calls and decides nothing.

Theory of operation. A Train call has two tasks: one reads messages and tells the core, the other
writes what waits on the call's stream. A worker of this host may choose a socket for its messages
(`control_socket`): those are taken as they come. The call is over as soon as one of its tasks is:
the reader when the worker ends the stream or breaks the protocol, the writer when the core ends the
stream or the connection breaks.

Leases are the server's HTTP/2 pings. A peer that answers none for `lease_s` (a stopped process, a
dead link) loses its connection, and its streams with it. gRPC's C core answers pings, so a worker
whose Python holds the interpreter's lock for a long time is not taken for dead, as it would be if
the coordinator waited for its heartbeats.
"""

# ruff: noqa: N802 - the protocol names its methods

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import grpc.aio

from andon.host.keepalive import Keepalive, Options
from andon.host.logs import LogEvent
from andon.host.process import own_process
from andon.protocol.capabilities import CONTROL_SOCKET
from andon.protocol.halts import HaltAnswer
from andon.protocol.limits import MAX_MESSAGE_BYTES, clipped
from andon.protocol.reasons import Reason
from andon.protocol.run_settings import Liveness
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import coordinator_pb2_grpc as pb_grpc
from andon.v1 import session_pb2
from andon.wire import conversion
from andon.wire.socket_frames import SocketFrames
from andon_coordinator.core import events
from andon_coordinator.transport.access_control import AccessControl
from andon_coordinator.transport.attending import RankAttendance
from andon_coordinator.transport.control_socket import ControlSocket
from andon_coordinator.transport.encoding import serialized
from andon_coordinator.transport.errors import LineError
from andon_coordinator.transport.incoming import (
    event_from,
    is_slow_to_read,
    join_from,
    process_of,
)
from andon_coordinator.transport.outgoing import ServicePlaces, same_for_people, status_to
from andon_coordinator.transport.registration import ReducerRegistration
from andon_coordinator.transport.streams import WorkerStream, ending, next_of, see_end
from andon_coordinator.transport.task import LineTask

__all__ = ["SERVICE_NAME", "CoordinatorService", "server_options"]

log = logging.getLogger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Coordinator"].full_name
"""The service's full name, for health and reflection."""

_RESET_WITHIN_S = 0.05
"""How long to wait for the cancellation that tells a reset stream from a half-closed one.

To the reader both look alike: the messages end. After a reset, gRPC cancels the handler shortly
after.
"""

_OVER_BOTH = "a message came over gRPC after one that came over the socket"

_WATCH_EVERY_S = 1.0
"""How often watchers get a status if nothing happens; the ages of heartbeats change."""

Context = Any  # grpc.aio's context; the stubs of the generated servicer know the sync one, too.


def server_options(liveness: Liveness | None = None) -> Options:
    """Channel arguments for `grpc.aio.server(options=...)`; `liveness` is the line's.

    Without SO_REUSEPORT, so that a second server on the same port fails to start.
    """
    return (
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        *Keepalive.of(liveness or Liveness()).server_options(),
    )


class CoordinatorService(pb_grpc.CoordinatorServicer):
    """Serves one line."""

    def __init__(
        self,
        task: LineTask,
        registration: ReducerRegistration,
        *,
        access: AccessControl,
        places: ServicePlaces,
        join_s: float,
        count: Callable[[Reason], None],
    ) -> None:
        """Serves the line of `task`.

        Args:
            task: owns the line.
            registration: serves RegisterReducer.
            access: knows who may look and who may operate.
            places: shown in statuses; also where workers of this host are offered sockets.
            join_s: how long a stream has to send Join.
            count: called with the reason of each call that ends with an error.
        """
        self._task = task
        self._registration = registration
        self._attendance = RankAttendance(
            task, access=access, tokens=task.session_tokens, attend_s=join_s
        )
        self._access = access
        self._places = places
        self._join_s = join_s
        self._count = count
        self._reading = asyncio.Lock()
        self._shown: tuple[float, asyncio.Event, pb.LineStatus] | None = None
        """When watchers were shown the line last, the change that came next, and what it was."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds itself to a server that has not started."""
        writes_bytes: Any = _WritesBytes(server)
        pb_grpc.add_CoordinatorServicer_to_server(self, writes_bytes)

    async def Train(  # type: ignore[override]  # grpc.aio takes coroutines, the stubs do not know
        self, request_iterator: AsyncIterator[pb.TrainRequest], context: Context
    ) -> None:
        """One worker's stream, from Join to its end."""
        stream = await self._open(context)
        try:
            await self._carry(stream, request_iterator, context)
        finally:
            stream.close_socket()
        if stream.error is not None:
            why = clipped(str(stream.error))
            log.info(LogEvent("stream_closed", stream=stream.number, why=why))
            await self._abort(context, stream.error)

    async def _carry(
        self,
        stream: WorkerStream,
        request_iterator: AsyncIterator[pb.TrainRequest],
        context: Context,
    ) -> None:
        """Carries a stream's messages both ways until it is over."""
        reader = asyncio.create_task(self._read(stream, request_iterator))
        writer = asyncio.create_task(stream.write_all(context.write))
        writer.add_done_callback(see_end)
        # No await lies between the stream's opening and this, so the core can't cut it in vain.
        stream.cut = writer.cancel
        # True until proven otherwise: gRPC cancels this handler when the peer resets the stream,
        # and then only `finally` below runs.
        gone = True
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            if not writer.done():
                await asyncio.wait({writer}, timeout=_RESET_WITHIN_S)
            # Not cancelled until now: the peer half-closed, or we end the call ourselves.
            gone = context.cancelled() or _broke(writer)
        finally:
            # What the worker said before the end counts. Then at once, and on every way out: until
            # the core hears of the end it waits for this worker.
            if stream.socket is not None:
                stream.socket.read_rest()
            self._task.stream_ended(stream, gone=gone)
            reader.cancel()
            if gone:
                writer.cancel()
        # What the core sent before the end is still written, for `flush_s` at most.
        await asyncio.wait({writer})

    async def RegisterReducer(  # type: ignore[override]  # as Train
        self, request_iterator: AsyncIterator[pb.RegisterReducerRequest], context: Context
    ) -> None:
        """One reducer's stream, from its offer to its end."""
        try:
            await self._registration.serve(request_iterator, context)
        except LineError as error:
            log.info(LogEvent("reducer_ended", why=clipped(str(error))))
            await self._abort(context, error)

    async def Attend(  # type: ignore[override]  # as Train
        self, request_iterator: AsyncIterator[session_pb2.AttendRequest], context: Context
    ) -> None:
        """One rank's stream, from Attend to its end."""
        try:
            await self._attendance.serve(request_iterator, context)
        except LineError as error:
            await self._abort(context, error)

    async def GetStatus(
        self, request: pb.GetStatusRequest, context: Context
    ) -> pb.GetStatusResponse:
        """What the line is doing now."""
        await self._check(self._access.check_viewer, request.run_id, context)
        return pb.GetStatusResponse(status=self._status())

    async def WatchStatus(  # type: ignore[override]  # as Train
        self, request: pb.WatchStatusRequest, context: Context
    ) -> None:
        """What the line is doing, until the coordinator goes away; a slow reader misses some."""
        await self._check(self._access.check_viewer, request.run_id, context)
        # A status is taken when there is room to send it, not when something changes. So a slow
        # reader gets the latest one and never a backlog.
        sent: pb.LineStatus | None = None
        happened = goes_on = True
        while goes_on:
            change, status = self._watched()
            if status is not sent and not (happened and same_for_people(sent, status)):
                await context.write(pb.WatchStatusResponse(status=status))
                sent = status
            # On a large line something always happens, and a look at it takes long.
            await asyncio.sleep(self._task.look_s)
            happened, goes_on = await self._task.changed(change, _WATCH_EVERY_S)
        if not same_for_people(sent, self._status()):
            await context.write(pb.WatchStatusResponse(status=self._status()))

    async def PullCord(self, request: pb.PullCordRequest, context: Context) -> pb.PullCordResponse:
        """Halts the line."""
        await self._check(self._access.check_operator, request.run_id, context)
        await self._ask(
            events.CordPulled(clipped(request.reason), clipped(request.operator)), context
        )
        status = self._task.status()
        halt = status.halt if status.session is None else status.session.halt
        return pb.PullCordResponse(halt=conversion.evidence_to_proto(halt))

    async def ClearHalt(
        self, request: pb.ClearHaltRequest, context: Context
    ) -> pb.ClearHaltResponse:
        """Answers a halt."""
        await self._check(self._access.check_operator, request.run_id, context)
        try:
            answer = conversion.enum_from_proto(HaltAnswer, request.answer)
        except conversion.WireError as error:
            await self._abort(context, LineError(Reason.INVALID_MESSAGE, f"answer: {error}"))
        worker = request.worker if answer is HaltAnswer.DROP else None
        operator = clipped(request.operator)
        await self._ask(events.HaltCleared(request.halt_id, answer, worker, operator), context)
        return pb.ClearHaltResponse(status=self._status())

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """Ends the run after the current step."""
        await self._check(self._access.check_operator, request.run_id, context)
        await self._ask(events.DrainRequested(clipped(request.operator)), context)
        return pb.DrainResponse(status=self._status())

    async def _open(self, context: Context) -> WorkerStream:
        try:
            return self._task.open_stream()
        except LineError as error:
            await self._abort(context, error)

    async def _read(self, stream: WorkerStream, requests: AsyncIterator[pb.TrainRequest]) -> None:
        with ending(stream, "a TrainRequest"):
            messages = aiter(requests)
            first = await next_of(messages, "join", self._join_s)
            stream.process = process_of(first)
            request = await self._joining(first)
            stream.socket = self._socket_for(stream, first)
            self._task.join(stream, request)
            async for message in messages:
                if not stream.chose:
                    stream.choose(socket=False)
                elif stream.uses_socket:
                    raise LineError(Reason.INVALID_MESSAGE, _OVER_BOTH)
                self._task.put(event_from(stream.number, message))

    def _socket_for(self, stream: WorkerStream, join: pb.TrainRequest) -> ControlSocket | None:
        """A socket for a worker of this host that can use one; None: there is none."""
        local = stream.process is not None and stream.process.host == own_process().host
        folder = self._places.shared_dir
        if folder is None or not local or CONTROL_SOCKET not in join.join.capabilities:
            return None
        try:
            return ControlSocket(folder, partial(self._take, stream))
        except OSError as error:
            log.debug("no socket for a control stream: %s", error)
            return None

    def _take(self, stream: WorkerStream, frames: SocketFrames) -> bool:
        """Tells the core what came over a stream's socket; False: the stream is over."""
        with ending(stream, "a TrainRequest"):
            while frames.whole and not stream.over:
                message = pb.TrainRequest.FromString(frames.take())
                if not stream.chose:
                    stream.choose(socket=True)
                self._task.put(event_from(stream.number, message))
        return not stream.over

    async def _joining(self, message: pb.TrainRequest) -> events.JoinRequest:
        """The Join of a stream, of a worker whose own token counts if it has one."""
        if not is_slow_to_read(message):
            return self._access.admitted(join_from(message))
        # Large Joins are converted in a thread, one at a time. A flood of them must not hold up the
        # event loop, and with it the workers that train.
        async with self._reading:
            return self._access.admitted(await asyncio.to_thread(join_from, message))

    def _status(self) -> pb.LineStatus:
        return status_to(self._task.status(), self._places)

    def _watched(self) -> tuple[asyncio.Event, pb.LineStatus]:
        """The line's status, and the change after it.

        It is a moment old on a large line: its watchers share one.
        """
        now = asyncio.get_running_loop().time()
        if self._shown is None or now - self._shown[0] >= self._task.look_s:
            self._shown = now, self._task.next_change, self._status()
        return self._shown[1:]

    async def _check(
        self, admit: Callable[[Context, str], None], run_id: str, context: Context
    ) -> None:
        try:
            admit(context, run_id)
        except LineError as error:
            log.info(LogEvent("call_refused", reason=str(error.reason)))
            await self._abort(context, error)

    async def _ask(self, event: events.Event, context: Context) -> None:
        try:
            self._task.ask(event)
        except LineError as error:
            await self._abort(context, error)

    async def _abort(self, context: Context, error: LineError) -> NoReturn:
        """Ends a call with an error, and counts it."""
        self._count(error.reason)
        await context.abort_with_status(error.status)
        raise AssertionError("abort_with_status returned")


class _WritesBytes:
    """Adds handlers to a server, and lets Train write messages that are encoded already."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Nothing: the same handlers follow by name."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """Adds a service's handlers by name."""
        train = handlers["Train"]._replace(response_serializer=serialized)
        handlers = {**handlers, "Train": train}
        generic = grpc.method_handlers_generic_handler(service, handlers)
        self._server.add_generic_rpc_handlers((generic,))
        self._server.add_registered_method_handlers(service, handlers)


def _broke(writer: asyncio.Task[None]) -> bool:
    return writer.done() and not writer.cancelled() and writer.exception() is not None
