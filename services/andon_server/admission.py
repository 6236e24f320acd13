"""Admission: which calls a server accepts, how many at once, and how long they may stay silent.

Theory of operation. A call costs memory before the client has said who it is: a task, and as much
of its first message as has arrived. So a call counts as *silent* until its first message is
complete. The number of silent calls is bounded: one more ends the oldest of them. An honest client
sends its first message at once, so it is never the oldest for long, however many others stay
silent. Calls that have spoken are bounded in total and for each host. Those that only watch have a
bound of their own.

Every call is served as a stream of requests, unary calls too. There is no difference on the wire,
and this way the first message of any call can be waited for.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from andon.host.logs import LogEvent
from andon.protocol.reasons import Reason
from andon.wire.statuses import status_of
from andon_server.limits import Limits

__all__ = ["Admission"]

_log = logging.getLogger(__name__)

_WATCHING = ("/WatchStatus", "/Watch", "/ServerReflectionInfo")
"""Endings of the names of calls that last as long as the client likes, waiting for changes."""

_OWN_WORD_S = 1.0
"""Services time the first message, too, and end the call with a better text. They go first."""

Context = Any  # grpc.aio's context, or `_Context` around it


class _Call:
    """One call, from its first byte to its end."""

    def __init__(self, task: asyncio.Task[Any], host: str, *, watches: bool) -> None:
        """A call of a client on `host`, served by `task`."""
        self.task = task
        self.host = host
        self.watches = watches
        self.refusal = ""
        """Why we ended the call; empty if we did not."""
        self.reason = Reason.TOO_MANY_STREAMS

    def end(self, why: str, reason: Reason = Reason.TOO_MANY_STREAMS) -> None:
        """Ends the call by cancelling its task."""
        self.refusal, self.reason = why, reason
        self.task.cancel()


class Admission(grpc.aio.ServerInterceptor):
    """Bounds the calls of one server on one event loop."""

    def __init__(
        self, limits: Limits, refused: Callable[[Reason], None] = lambda reason: None
    ) -> None:
        """Keeps `limits`, and calls `refused` with the reason of each call that it ends."""
        self._limits = limits
        self._refused = refused
        self._open: set[_Call] = set()
        self._hosts: Counter[str] = Counter()
        self._watchers = 0
        self._silent: dict[_Call, asyncio.TimerHandle] = {}
        """Silent calls and their timers, oldest first."""

    @property
    def open_calls(self) -> int:
        """Calls that are being served."""
        return len(self._open)

    @property
    def silent_calls(self) -> int:
        """Calls among them without a first message."""
        return len(self._silent)

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wraps the handler of a call."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        watches = str(handler_call_details.method).endswith(_WATCHING)

        async def serve(requests: AsyncIterator[Any], context: Context) -> None:
            try:
                await self._serve(handler, requests, context, watches=watches)
            except grpc.aio.AbortError as aborted:
                # gRPC keeps it, and raises it once this returns. With its frames it would be a ring
                # that holds the call's message, of megabytes, until Python looks for rings.
                aborted.__traceback__ = aborted.__context__ = None

        return grpc.stream_stream_rpc_method_handler(
            serve, handler.request_deserializer, handler.response_serializer
        )

    async def _serve(
        self, handler: Any, requests: AsyncIterator[Any], context: Context, *, watches: bool
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        if handler.response_streaming:
            # By itself, before anything can cancel the call or a part of it. Else it leaves with
            # the first message; if that is given up while it waits for the client's window, gRPC
            # can't end the call with a status any more.
            await context.send_initial_metadata(())
        call = _Call(task, _host_of(context.peer()), watches=watches)
        # Check and enter without an await between them: no other call can slip in.
        full = self._why_full(call)
        if full:
            await self._abort(context, full)
        self._enter(call)
        try:
            await _answer(handler, _Requests(self, call, requests), _Context(self, call, context))
        except asyncio.CancelledError:
            # Cancelled by us, or by the client or the server? Only the first is a refusal.
            if not call.refusal or context.cancelled():
                raise
            # The task goes on, to send the refusal: an await would raise again without this.
            task.uncancel()
            await self._abort(context, call.refusal, call.reason)
        finally:
            # Even a call that is cancelled before its first message gives its place back.
            self._leave(call)

    def leave(self) -> None:
        """Ends the calls that only watch, before the server stops: their clients may never."""
        # A list: ended calls leave the set while we iterate.
        for call in [each for each in self._open if each.watches]:
            call.end("the process is going away: ask again later", Reason.SERVICE_LEAVING)

    def spoke(self, call: _Call) -> None:
        """A call's first message has arrived, or the client has ended it without one."""
        timer = self._silent.pop(call, None)
        if timer is not None:
            timer.cancel()

    def _why_full(self, call: _Call) -> str:
        limits = self._limits
        for count, most, what, setting in (
            (len(self._open), limits.max_calls, "calls are open", "max_calls"),
            (
                self._hosts[call.host],
                limits.max_calls_per_host,
                f"calls of {call.host} are open",
                "max_calls_per_host",
            ),
            (
                self._watchers if call.watches else -1,
                limits.max_watchers,
                "calls watch already",
                "max_watchers",
            ),
        ):
            if count >= most:
                return f"{count} {what}, which is the limit: {limits.remedy(setting)}"
        return ""

    def _enter(self, call: _Call) -> None:
        limits = self._limits
        self._open.add(call)
        self._hosts[call.host] += 1
        self._watchers += call.watches
        if len(self._silent) >= limits.max_silent_calls:
            # Dictionaries keep insertion order, so the first is the oldest. It stops counting now,
            # not when its task ends: many calls may arrive before that.
            oldest = next(iter(self._silent))
            self.spoke(oldest)
            oldest.end(
                f"{limits.max_silent_calls} younger calls have not sent their first message "
                f"either, which is the limit: {limits.remedy('max_silent_calls')}"
            )
        patience_s = limits.first_message_timeout_s
        self._silent[call] = asyncio.get_running_loop().call_later(
            patience_s + _OWN_WORD_S, self._time_out, call
        )

    def _time_out(self, call: _Call) -> None:
        self.spoke(call)
        call.end(
            f"no message came within {self._limits.first_message_timeout_s:g} s: "
            f"{self._limits.remedy('first_message_timeout_s')}"
        )

    def _leave(self, call: _Call) -> None:
        self.spoke(call)
        self._open.discard(call)
        self._hosts[call.host] -= 1
        # Or the counter would keep an entry for every host that ever called.
        if not self._hosts[call.host]:
            del self._hosts[call.host]
        self._watchers -= call.watches

    async def _abort(
        self, context: Context, why: str, reason: Reason = Reason.TOO_MANY_STREAMS
    ) -> None:
        if reason is Reason.TOO_MANY_STREAMS:
            self._refused(reason)
        _log.debug(LogEvent("call_refused", why=why))
        await context.abort_with_status(status_of(reason, why))


class _Requests:
    """A client's messages. Reports when the first has arrived."""

    def __init__(self, admission: Admission, call: _Call, requests: AsyncIterator[Any]) -> None:
        self._admission = admission
        self._call = call
        self._requests = requests
        self._spoke = False

    def __aiter__(self) -> AsyncIterator[Any]:
        """Itself; once the first message has arrived, gRPC's own iterator."""
        return self._requests if self._spoke else self

    async def __anext__(self) -> Any:
        """The next message."""
        try:
            return await anext(self._requests)
        finally:
            self._spoke = True
            self._admission.spoke(self._call)


class _Context:
    """gRPC's context. Reports when the first `read` is done."""

    def __init__(self, admission: Admission, call: _Call, context: Context) -> None:
        self._admission = admission
        self._call = call
        self._context = context

    def __getattr__(self, name: str) -> Any:
        """Everything else is the context's."""
        return getattr(self._context, name)

    async def read(self) -> Any:
        """The next message. Later reads go to gRPC directly."""
        try:
            return await self._context.read()
        finally:
            self._admission.spoke(self._call)
            self.read = self._context.read  # type: ignore[method-assign]  # not through here again


async def _answer(handler: Any, requests: _Requests, context: _Context) -> None:
    """Serves a call by its handler, which is of one of four kinds."""
    one_up, one_down = not handler.request_streaming, not handler.response_streaming
    behaviour = next(
        each
        for each in (
            handler.unary_unary,
            handler.unary_stream,
            handler.stream_unary,
            handler.stream_stream,
        )
        if each is not None
    )
    request: Any = requests
    if one_up:
        try:
            request = await anext(requests)
        except StopAsyncIteration:
            await context.abort(grpc.StatusCode.INTERNAL, "the call has no message")
    if inspect.isasyncgenfunction(behaviour):
        async for response in behaviour(request, context):
            await context.write(response)
        return
    answered = await behaviour(request, context)
    if one_down:
        await context.write(answered)


def _host_of(peer: str) -> str:
    """The host of a peer such as `ipv4:127.0.0.1:5000`, `ipv6:[::1]:5000` or `unix:`."""
    kind, _, rest = peer.partition(":")
    return rest.rpartition(":")[0] if kind.startswith("ip") else peer
