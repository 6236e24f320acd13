"""Streams: the coordinator's end of each worker's Train call and each reducer's registration.

A peer that has not proved anything yet must not keep others out. So when the limit is reached, the
oldest stream that has neither joined nor registered is ended. Honest peers join or register at
once, so they are rarely the oldest.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from google.protobuf.message import DecodeError

from andon.host.logs import LogEvent
from andon.host.process import Process
from andon.protocol.announcements import Announcement, RoundOpening
from andon.protocol.reasons import Reason
from andon.protocol.reducers import MAX_REDUCERS
from andon.v1 import coordinator_pb2 as pb
from andon.wire.fields import FrameError
from andon.wire.socket_frames import socket_frame
from andon_coordinator.transport.control_socket import ControlSocket
from andon_coordinator.transport.encoding import serialized
from andon_coordinator.transport.errors import LineError

__all__ = [
    "CAPACITY",
    "CallStream",
    "ReducerStream",
    "Streams",
    "WorkerStream",
    "ending",
    "next_of",
    "see_end",
]

log = logging.getLogger(__name__)

CAPACITY = 256
"""How many messages may wait for a worker to read; with more its stream is ended."""

_MAX_ANNOUNCEMENTS = 4096
"""How many may wait for a reducer to read, above all the rounds; with more its stream is ended."""
_DOES_NOT_READ = "the peer does not read its stream: open another one"
_LEAVING = "the coordinator is going away: {} again"


Sent = TypeVar("Sent")
Received = TypeVar("Received")


class CallStream(Generic[Sent]):
    """What waits to be sent on one call, and how the call is to end.

    What owns the core calls `send` and `end`, which never block. The call's own task
    writes what `messages` yields, and then ends the call with `error`.
    """

    def __init__(self, number: int, *, flush_s: float, capacity: int = CAPACITY) -> None:
        """Opens stream `number`, which no other stream of its kind ever was.

        Once it is over, its peer has `flush_s` to read what was sent before.
        """
        self.number = number
        self._flush_s = flush_s
        self.error: LineError | None = None
        """What the call ends with; None: OK."""
        self.joined = False
        """Whether the core knows of it."""
        self.cut: Callable[[], object] = lambda: None
        """Gives up the write that is under way.

        A peer that never reads keeps its flow-control window shut. The write would wait for it, and
        keep the call open for as long as the peer lives.
        """
        self._capacity = capacity
        self._waiting: deque[Sent] = deque()
        self._ended = False
        self._changed = asyncio.Event()
        self._flush_timer: asyncio.TimerHandle | None = None

    def send(self, message: Sent) -> None:
        """Sends a message, unless the stream has ended; ends it if its peer does not read."""
        if self._ended:
            return
        if len(self._waiting) >= self._capacity:
            self._waiting.clear()
            # Emptied first: the call ends once nothing waits.
            self.end(LineError(Reason.REJOIN_NEEDED, _DOES_NOT_READ))
            self.cut()
            return
        self._waiting.append(message)
        self._changed.set()

    def end(self, error: LineError | None = None) -> None:
        """Ends the call once everything is written or `flush_s` is over; the first error counts."""
        if error is not None:
            error.forget_frames()  # Also if it is the first one, which was raised since.
        if not self._ended:
            self._ended = True
            self.error = error
            self._changed.set()
            self._flush_timer = asyncio.get_running_loop().call_later(self._flush_s, self._give_up)

    @property
    def over(self) -> bool:
        """Whether the call ends once everything is written."""
        return self._ended

    def _give_up(self) -> None:
        self._waiting.clear()
        self.error = self.error or LineError(Reason.REJOIN_NEEDED, _DOES_NOT_READ)
        self.cut()

    async def messages(self) -> AsyncIterator[Sent]:
        """Every message to write, until the stream ends."""
        while True:
            while self._waiting:
                yield self._waiting.popleft()
            if self._ended:
                if self._flush_timer is not None:
                    self._flush_timer.cancel()
                return
            # Nothing is awaited between the checks above and `clear`, so no change gets lost.
            self._changed.clear()
            await self._changed.wait()


@contextmanager
def ending(stream: CallStream[Any], message: str) -> Iterator[None]:
    """Around what reads a stream, each item `message`: an error ends the stream, nothing else."""
    try:
        yield
    except LineError as error:
        stream.end(error)
    except (DecodeError, FrameError):
        text = f"the bytes can't be decoded as {message}"
        stream.end(LineError(Reason.INVALID_MESSAGE, text))
    except Exception:  # the boundary of a task: the stream ends, the others go on
        log.exception(LogEvent("stream_failed", stream=stream.number))
        stream.end(LineError(Reason.INTERNAL, "the coordinator failed; its log says how"))


async def next_of(messages: AsyncIterator[Received], name: str, within_s: float) -> Received:
    """The message that a peer owes on its stream, called `name`.

    Without it, the peer must not keep its place on the server.

    Raises:
        LineError: none came in time, or the stream ended.
    """
    try:
        async with asyncio.timeout(within_s):
            return await anext(messages)
    except StopAsyncIteration:
        text = f"the stream ended before {name}"
        raise LineError(Reason.INVALID_MESSAGE, text) from None
    except TimeoutError:
        text = f"no {name} came within {within_s:g} s"
        raise LineError(Reason.INVALID_MESSAGE, text) from None


def see_end(writer: asyncio.Task[None]) -> None:
    """Sees how the task that writes a call ended, or asyncio logs its error as one that nobody saw.

    It broke with the connection, so nobody is left to be told. What serves the call can't be relied
    on to look: gRPC cancels it then.
    """
    if not writer.cancelled():
        writer.exception()


class WorkerStream(CallStream[pb.TrainResponse | bytes]):
    """One worker's Train call, and the socket that carries its messages if the worker chose it."""

    process: Process | None = None
    """The worker's process, if its Join says which one it is."""
    socket: ControlSocket | None = None
    """What JoinAccepted offers, until the worker has chosen the call; None: nothing."""
    uses_socket = False
    """Whether messages travel over it, both ways."""

    def __init__(self, number: int, *, flush_s: float) -> None:
        """See `CallStream`."""
        super().__init__(number, flush_s=flush_s)
        self._chosen = asyncio.Event()
        """Set once the worker has chosen between socket and call, or the stream is over."""

    def accept(self, answer: pb.TrainResponse) -> None:
        """Sends JoinAccepted, with the offer if there is one."""
        if self.socket is not None:
            answer.join_accepted.control_socket = self.socket.name
        else:
            self._chosen.set()
        self.send(answer)

    def choose(self, *, socket: bool) -> None:
        """Takes the worker's first message after JoinAccepted: it came this way."""
        self.uses_socket = socket
        if socket:
            self._waiting = deque(socket_frame(serialized(each)) for each in self._waiting)
        else:
            self.close_socket()
        self._chosen.set()

    @property
    def chose(self) -> bool:
        """Whether the worker has nothing to choose, or has chosen."""
        return self._chosen.is_set()

    def send(self, message: pb.TrainResponse | bytes) -> None:
        """See `CallStream`. Over the socket it leaves at once, if it can."""
        if not self.uses_socket or self._ended:
            super().send(message)
            return
        assert self.socket is not None
        data = socket_frame(serialized(message))
        rest = data if self._waiting else self.socket.write_now(data)
        if rest:
            super().send(rest)

    def end(self, error: LineError | None = None) -> None:
        """See `CallStream`."""
        super().end(error)
        self._chosen.set()

    async def messages(self) -> AsyncIterator[pb.TrainResponse | bytes]:
        """See `CallStream`; what follows JoinAccepted waits for the worker's choice."""
        async for message in super().messages():
            yield message
            await self._chosen.wait()

    async def write_all(self, over_call: Callable[[Any], Awaitable[object]]) -> None:
        """Writes what is sent until the stream ends; `over_call` writes a message over gRPC."""
        async for message in self.messages():
            if self.uses_socket and self.socket is not None:
                assert isinstance(message, bytes)  # A frame: see `choose`.
                await self.socket.write(message)
            else:
                await over_call(message)

    def close_socket(self) -> None:
        """Ends the socket, if there is one."""
        if self.socket is not None:
            self.socket.close()


class ReducerStream:
    """One reducer's RegisterReducer call."""

    def __init__(self, number: int) -> None:
        """Opens stream `number`, which no other stream ever was."""
        self.number = number
        self.error: LineError | None = None
        """What the call ends with; None: the run is over."""
        self.registered = False
        """Whether the core knows of it."""
        self.address = ""
        """Where workers reach the reducer; empty until it has proved itself."""
        self.metrics_address = ""
        """Where its metrics are; empty: nowhere."""
        self.ended = asyncio.Event()
        self._hushed = False
        self._waiting: deque[Announcement] = deque()
        self._changed = asyncio.Event()

    def announce(self, announcement: Announcement) -> None:
        """Queues an announcement; a reducer that does not read them loses its stream."""
        waiting = self._waiting
        # A round that was opened since says all that the one before did.
        if waiting and isinstance(waiting[-1], RoundOpening):
            if isinstance(announcement, RoundOpening):
                waiting.pop()
        elif len(waiting) >= _MAX_ANNOUNCEMENTS:
            text = "the reducer does not read what is announced to it"
            self.end(LineError(Reason.MEMORY_LIMIT, text))
            return
        waiting.append(announcement)
        self._changed.set()

    async def announcements(self) -> AsyncIterator[Announcement]:
        """Every announcement to write, until the stream ends, or is hushed."""
        # Asked again after each: the stream may end while one is written.
        while not (self.ended.is_set() or self._hushed):
            if self._waiting:
                yield self._waiting.popleft()
                continue
            # Nothing is awaited between the checks above and `clear`, so no change gets lost.
            self._changed.clear()
            await self._changed.wait()

    def hush(self) -> None:
        """Announces nothing more: the reducer has ended the call, or broke a rule."""
        self._hushed = True
        self._changed.set()

    def end(self, error: LineError | None = None) -> None:
        """Ends the call; the first error counts."""
        if error is not None:
            error.forget_frames()
        if not self.ended.is_set():
            self.error = error
            self.ended.set()
            self._changed.set()


class Streams:
    """The open streams, of workers and of reducers. Their numbers are never reused."""

    def __init__(self, max_streams: int, flush_s: float) -> None:
        """Starts with none; at most `max_streams` workers' streams are open at once."""
        self._max_streams = max_streams
        self._flush_s = flush_s
        self._workers: dict[int, WorkerStream] = {}
        self._reducers: dict[int, ReducerStream] = {}
        self._last_number = 0
        self._leaving = False

    def processes(self) -> list[tuple[int, Process | None]]:
        """The process of each worker's stream, as far as its Join said."""
        return [(number, stream.process) for number, stream in self._workers.items()]

    def worker(self, number: int) -> WorkerStream | None:
        """The open stream of this number."""
        return self._workers.get(number)

    def reducer(self, number: int) -> ReducerStream | None:
        """The open registration of this number."""
        return self._reducers.get(number)

    def open_worker(self) -> WorkerStream:
        """A new stream of a worker.

        Raises:
            LineError: too many are open, and all of them joined; or the coordinator is going away.
        """
        if self._leaving:
            raise LineError(Reason.SERVICE_LEAVING, _LEAVING.format("join"))
        if len(self._workers) >= self._max_streams:
            text = f"{len(self._workers)} streams are open already, which is the limit"
            oldest = next((each for each in self._workers.values() if not each.joined), None)
            if oldest is None:
                raise LineError(Reason.TOO_MANY_STREAMS, text)
            # Before it is forgotten, which ends it without an error: the first end counts.
            oldest.end(LineError(Reason.TOO_MANY_STREAMS, f"{text}; this one did not join"))
            self.forget_worker(oldest.number)
        self._last_number += 1
        stream = WorkerStream(self._last_number, flush_s=self._flush_s)
        self._workers[stream.number] = stream
        return stream

    @property
    def undecided(self) -> int:
        """How many workers' streams are open, and not about to end."""
        return sum(not stream.over for stream in self._workers.values())

    def open_reducer(self) -> ReducerStream:
        """A new stream of a reducer.

        Raises:
            LineError: as in `open_worker`.
        """
        if self._leaving:
            raise LineError(Reason.SERVICE_LEAVING, _LEAVING.format("register"))
        if len(self._reducers) >= MAX_REDUCERS:
            text = f"{MAX_REDUCERS} reducers are here already, which is the limit"
            oldest = next((each for each in self._reducers.values() if not each.registered), None)
            if oldest is None:
                raise LineError(Reason.TOO_MANY_STREAMS, text)
            # As for a worker.
            oldest.end(LineError(Reason.TOO_MANY_STREAMS, f"{text}; this one proved nothing"))
            self.forget_reducer(oldest.number)
        self._last_number += 1
        stream = ReducerStream(self._last_number)
        self._reducers[stream.number] = stream
        return stream

    def forget_worker(self, number: int) -> None:
        """Ends a stream and forgets it; nothing if that was done before."""
        stream = self._workers.pop(number, None)
        if stream is not None:
            stream.end()

    def forget_reducer(self, number: int) -> ReducerStream | None:
        """Forgets a registration; returns it unless that was done before."""
        return self._reducers.pop(number, None)

    def announce(self, announcement: Announcement) -> None:
        """Announces something to every reducer that registered."""
        for stream in self._reducers.values():
            if stream.registered:
                stream.announce(announcement)

    def scraped_reducers(self) -> Mapping[str, str]:
        """Where the metrics of each registered reducer are, by its address."""
        return {
            each.address: each.metrics_address
            for each in self._reducers.values()
            if each.registered and each.metrics_address
        }

    def dismiss_reducers(self, error: LineError | None = None) -> None:
        """Ends all registrations; without an error because the run is over."""
        for stream in self._reducers.values():
            stream.end(error)

    def close(self, error: LineError) -> None:
        """Ends all streams, and opens no more."""
        # First: a stream that was opened after the loop would never be ended.
        self._leaving = True
        for stream in self._workers.values():
            stream.end(error)
        self.dismiss_reducers(error)
