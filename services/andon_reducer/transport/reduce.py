"""Reduce: the core on the event loop, its arithmetic in threads.

The event loop owns the core. `Rounds.receive` is called between awaits, never across one, and its
effects are carried out before anything else runs. So nothing here needs a lock. Threads get parts
of deliveries and return framed averages; they touch nothing else.

A gradient in this file: `stream_requests` makes an event of its message, the core answers with
Reduce once a chunk is complete, `_begin` hands it to the threads, `_reduced` reports it to the
core, which answers with SendAverage, and the stream's writer calls `_sent`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from andon.host.arena import CAPABILITY, SOCKET_CAPABILITY
from andon.host.logs import LogEvent
from andon.protocol.capabilities import LISTENING, REDUCER_CAPABILITIES
from andon.protocol.messages import (
    OpenRound,
    RoundOpened,
)
from andon.protocol.reasons import Reason
from andon.protocol.records import latest_plausible_term
from andon.tcp.listening import TcpListener
from andon.tcp.proof import CAPABILITY as TCP
from andon.tcp.proof import WIDE_CAPABILITY
from andon.wire import checksums
from andon.wire.frames import (
    FrameError,
    frame_response,
    parse_request,
    split_response,
)
from andon.wire.lane_reports import frame_report, read_asked
from andon_reducer.config import ReducerConfig
from andon_reducer.core.effects import (
    CallRefusal,
    DataPath,
    Direction,
    Effect,
    FreeRound,
    Notice,
    PauseStream,
    Reduce,
    ReducerObserver,
    RefuseStream,
    ResumeStream,
    SendAverage,
    SendNotice,
)
from andon_reducer.core.events import (
    AverageSent,
    ChunkReduced,
    Event,
    ReduceStreamEnded,
    ReduceStreamOpened,
)
from andon_reducer.core.jobs import Job
from andon_reducer.core.mean import fresh
from andon_reducer.core.rounds import Rounds
from andon_reducer.transport.admission import CallLimit, CallRefused
from andon_reducer.transport.announced import Announced
from andon_reducer.transport.arenas import Arenas, StreamMemory
from andon_reducer.transport.averaging import AveragingThreads, Delivery, fault_of_failed
from andon_reducer.transport.loop_calls import LoopCalls
from andon_reducer.transport.reduce_stream import Context, OutgoingMessage, ReduceStream
from andon_reducer.transport.stream_requests import StreamRequests
from andon_reducer.transport.tcp_lanes import LaneOffers

__all__ = ["CAPABILITIES", "ReduceServicer"]

CAPABILITIES = (checksums.CAPABILITY, *REDUCER_CAPABILITIES)
"""What this reducer offers beside float32."""

_SLACK_S = 24 * 3600
"""How much further ahead of the clock a term may be here than at the coordinator."""

_log = logging.getLogger(__name__)


class ReduceServicer:
    """Serves Reduce: translates messages to events and effects to messages."""

    def __init__(
        self,
        rounds: Rounds,
        observer: ReducerObserver,
        *,
        announced: Announced,
        arenas: Arenas,
        config: ReducerConfig,
        listener: TcpListener | None = None,
    ) -> None:
        """Serves `rounds`, which nobody else may touch; `listener` takes TCP lanes."""
        self._arenas = arenas
        self._rounds = rounds
        self._observer = observer
        self._announced = announced
        calls = LoopCalls()
        self._offers = LaneOffers(listener, config, calls)
        self._max_payload_bytes = config.max_payload_bytes
        self._opening_s = config.opening_s
        self._limit = CallLimit(config.limits.max_streams_per_worker, "streams")
        self._threads = AveragingThreads(config.threads, self._reduced, calls)
        self._numbers = itertools.count(1)
        self._requests = StreamRequests(
            announced, observer, receive=self._receive, take_back=self._take_back
        )
        self._streams: dict[int, ReduceStream] = {}
        self._deliveries: dict[int, Delivery] = {}
        """By job, from its Reduce until its ChunkReduced was received: what threads have, or wait
        for."""
        self.report_fault: Callable[[FreeRound], None] = lambda effect: None
        """Called with each round that is over because of a fault."""
        self._done_now: list[Delivery] = []
        """Deliveries that are reduced, and that the core is to hear of at the end of its event."""
        self._closing = False
        self._idle = asyncio.Event()
        """Set while there are no streams."""
        self._idle.set()

    async def report(self, data: bytes) -> bytes:
        """One call of ReportLanes.

        Raises:
            CallRefused: it ends with an error.
        """
        try:
            nonce = read_asked(data)
        except FrameError as error:
            raise CallRefused(Reason.INVALID_MESSAGE, str(error)) from None
        report = self._offers.report(nonce)
        if report is None:
            raise CallRefused(Reason.TOKEN, "no open stream has an offer of lanes with this nonce")
        return frame_report(report)

    def lane_connections(self, direction: Direction) -> int:
        """On how many connections chunks travel on all lanes of a direction; any thread may ask."""
        return self._offers.connections(direction)

    @property
    def inflight_bytes(self) -> int:
        """What the rounds hold now; any thread may ask."""
        return self._rounds.inflight_bytes

    @property
    def averaging_s(self) -> float:
        """How long the threads have computed, together; any thread may ask."""
        return self._threads.busy_s

    async def serve(self, context: Context) -> None:
        """One call of Reduce, to its end.

        Raises:
            CallRefused: it ends with an error.
        """
        stream = ReduceStream(next(self._numbers), context)
        messages = stream.messages()
        opening = await self._opening(messages)
        run_id, worker, token = opening.run_id, opening.worker, opening.session_token
        with (
            self._announced.session(run_id, worker, token, stream.refuse) as session,
            self._limit.count(run_id, worker),
        ):
            stream.run_id = run_id
            # A coordinator takes a term above one that it believes, and its clock may be another.
            latest = latest_plausible_term(session.serial[0], time.time())
            stream.latest_term = latest + (_SLACK_S << 32)
            await self._exchange(stream, opening, messages)

    async def _exchange(
        self, stream: ReduceStream, opening: OpenRound, messages: AsyncIterator[bytes]
    ) -> None:
        """A stream that was opened, to its end."""
        memory: StreamMemory | str = ""
        # What a listener gets must stay until it reads, and what lies in shared memory is written
        # over by the next exchange.
        if CAPABILITY in opening.capabilities and not opening.listens:
            memory = await self._arenas.open(opening)
        if isinstance(memory, StreamMemory):
            stream.memory = memory
        # After the await above, since `close` may have run meanwhile: it ends the streams that are
        # entered, and this one is not.
        if self._closing:
            self._unshare(stream)
            raise CallRefused(Reason.SERVICE_LEAVING, "the reducer is going away")
        try:
            self._enter(stream, opening, memory)
        except BaseException:
            self._unshare(stream)
            self._take_back(stream)
            raise
        await self._carry(stream, messages)

    async def _carry(self, stream: ReduceStream, messages: AsyncIterator[bytes]) -> None:
        """Carries a stream's messages both ways, to its end."""
        requests = self._requests
        readers = [asyncio.create_task(requests.read(stream, messages))]
        if stream.socket is not None:
            over_it = stream.socket.messages()
            readers.append(asyncio.create_task(requests.read(stream, over_it, over_socket=True)))
        if stream.lanes is not None:
            readers.append(asyncio.create_task(requests.read_lanes(stream, stream.lanes)))
        writer = asyncio.create_task(stream.write_all(partial(self._sent, stream)))
        try:
            ends: set[asyncio.Future[Any]] = {*readers, writer, stream.refusal}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            # The core learns of the end before anything is awaited: other streams wait for that.
            self._leave(stream)
            if not writer.done() and not stream.refusal.done():
                for reader in readers:
                    if reader.done():
                        reader.result()
                # The worker sends no more; what was made for it still goes out, if it reads.
                stream.close()
                await asyncio.wait({writer}, timeout=self._opening_s)
                if not writer.done():
                    text = (
                        f"the worker ended its stream {self._opening_s:g} s ago, and does not read"
                    )
                    raise CallRefused(Reason.PEER_GONE, text)
        finally:
            # Called again, in case the call was cancelled during the waits above.
            self._leave(stream)
            for task in (*readers, writer):
                task.cancel()
            try:
                # A task must not outlive its call: gRPC frees the context when this returns.
                await asyncio.gather(*readers, writer, return_exceptions=True)
            finally:
                self._take_back(stream)
        if stream.refusal.done():
            refusal = stream.refusal.result()
            raise CallRefused(refusal.reason, refusal.message)
        writer.result()

    async def close(self) -> None:
        """Ends all streams as UNAVAILABLE, and the threads."""
        # First: a call that is about to enter looks at it once its own awaits are over.
        self._closing = True
        for stream in self._streams.values():
            stream.refuse(CallRefusal(Reason.SERVICE_LEAVING, "the reducer is going away"))
        # Each stream leaves in its own call.
        await self._idle.wait()
        self._threads.close()

    async def _opening(self, messages: AsyncIterator[bytes]) -> OpenRound:
        """The first message."""
        try:
            async with asyncio.timeout(self._opening_s):
                data = await anext(messages, b"")
            opening = parse_request(data)
        except TimeoutError:
            text = f"the stream was not opened within {self._opening_s:g} s"
            raise CallRefused(Reason.INVALID_MESSAGE, text) from None
        except FrameError as error:
            raise CallRefused(Reason.INVALID_MESSAGE, str(error)) from None
        if not isinstance(opening, OpenRound):
            raise CallRefused(Reason.INVALID_MESSAGE, "the first message is not OpenRound")
        if opening.listens and LISTENING not in opening.capabilities:
            text = f"OpenRound listens without the capability {LISTENING}: name it there"
            raise CallRefused(Reason.INVALID_MESSAGE, text)
        return opening

    def _enter(self, stream: ReduceStream, opening: OpenRound, memory: StreamMemory | str) -> None:
        # Registered before the core learns of the stream: from then on, the effects of any event
        # may name it.
        self._streams[stream.number] = stream
        self._idle.clear()
        stream.listens = opening.listens
        self._observer.opened()
        self._receive(
            ReduceStreamOpened(
                *(stream.number, opening.run_id, opening.worker, stream.latest_term),
                listens=opening.listens,
            )
        )
        shared = tuple(each for each in CAPABILITIES if each in opening.capabilities)
        if stream.memory is None and TCP in opening.capabilities:
            stream.lanes = self._offers.offer(opening, stream.refuse)
        if stream.lanes is not None:
            shared = *shared, TCP
            if stream.lanes.is_wide:
                shared = *shared, WIDE_CAPABILITY
        stream.checked = checksums.CAPABILITY in shared
        opened = RoundOpened(shared, self._max_payload_bytes)
        if isinstance(memory, StreamMemory):
            if SOCKET_CAPABILITY in opening.capabilities:
                stream.socket = memory.listen()
            if stream.socket is not None:
                stream.socket.lost = partial(_lost, stream)
                stream.socket.take = partial(self._requests.take_now, stream)
                opened = replace(opened, capabilities=(*shared, SOCKET_CAPABILITY))
            opened = memory.offered(opened)
        else:
            opened = replace(opened, shared_memory_refused=memory)
        if stream.lanes is not None:
            opened = replace(opened, tcp=stream.lanes.offer)
        # The reader does not run yet, so nothing is queued before this: RoundOpened comes first.
        stream.send(OutgoingMessage(frame_response(opened)))

    def _take_back(self, stream: ReduceStream) -> None:
        """Ends a stream's lanes and its socket, or takes their offers back.

        A second call does nothing.
        """
        if stream.socket is not None:
            stream.socket.close()
            stream.socket = None
        if stream.lanes is not None:
            self._offers.take_back(stream.lanes)
            stream.lanes = None

    def _unshare(self, stream: ReduceStream) -> None:
        if stream.memory is not None:
            stream.memory.close()
            stream.memory = None

    def _leave(self, stream: ReduceStream) -> None:
        """Takes a stream out; a second call does nothing."""
        # Out of `_streams` first: the core must get nothing of a stream after its end, and a
        # writer that still runs reports what it sent (`_sent`).
        if self._streams.pop(stream.number, None) is None:
            return
        self._observer.closed()
        self._unshare(stream)
        self._receive(ReduceStreamEnded(stream.number))
        if not self._streams:
            self._idle.set()

    def _receive(self, event: Event) -> None:
        for effect in self._rounds.receive(event, time.monotonic()):
            self._perform(effect)
        # Not before: the core must not hear of a chunk while effects of an earlier event are left.
        while self._done_now:
            self._reduced(self._done_now.pop())

    def _perform(self, effect: Effect) -> None:
        # Effects name streams that the core knows, and those are in `_streams`: a stream leaves
        # both in one step (`_leave`).
        match effect:
            case Reduce(job, streams):
                self._begin(job, streams)
            case SendAverage(job_id, streams):
                # The core answers ChunkReduced with this, so the delivery is still there.
                delivery = self._deliveries[job_id]
                for number in streams:
                    self._streams[number].send(delivery.message_for(number))
            case SendNotice(streams, notice, job_id):
                self._notify(streams, notice, job_id)
            case RefuseStream(number, refusal):
                self._streams[number].refuse(refusal)
            case PauseStream(number):
                self._streams[number].pause()
            case ResumeStream(number):
                self._streams[number].resume()
            case FreeRound():
                self._observer.freed(effect)
                if effect.fault is not None:
                    self.report_fault(effect)

    def _notify(self, streams: tuple[int, ...], notice: Notice, job: int | None) -> None:
        checked = self._checked(streams)
        for stream in map(self._streams.__getitem__, streams):
            on_lane = stream.uses_lanes
            if on_lane:
                frame, _ = split_response(notice, checksums=checked)
            else:
                frame = frame_response(notice, checksums=checked)
            stream.send(OutgoingMessage(frame, job, on_lane=on_lane, notice=True))

    def _begin(self, job: Job, streams: tuple[int, ...]) -> None:
        memories = {number: self._streams[number].memory for number in streams}
        lanes = [number for number in streams if self._streams[number].uses_lanes]
        delivery = Delivery(
            job,
            memories,
            lanes,
            checksums=self._checked(streams),
            lend=self._offers.buffers.lend if lanes else fresh,
            lasting=any(self._streams[number].listens for number in lanes),
        )
        alone = not self._deliveries
        self._deliveries[job.id] = delivery
        # Not while threads have work: then the loop has, too, and chunks are to keep their order.
        if alone and self._threads.do_now(delivery):
            self._done_now.append(delivery)
        else:
            self._threads.do(delivery)

    def _reduced(self, delivery: Delivery) -> None:
        """The threads are done with a job."""
        job = delivery.job
        if delivery.failure is not None:
            failure = LogEvent("averaging_failed", "a chunk could not be averaged")
            _log.error(failure, exc_info=delivery.failure)
            # Nothing was averaged, and no rank is at fault: the round is void all the same.
            delivery.fault = fault_of_failed(job)
        # Before the delivery goes: the core answers with SendAverage, which sends it.
        self._receive(ChunkReduced(job.id, delivery.fault))
        del self._deliveries[job.id]
        if not self._deliveries:
            # No job is under way, so no further slice would fill the batches that wait.
            for stream in self._streams.values():
                stream.flush()

    def _sent(self, stream: ReduceStream, message: OutgoingMessage) -> None:
        """A stream's writer has written an average."""
        assert message.job is not None, "only averages are reported"
        if message.shared_bytes:
            self._observer.moved(Direction.DOWN, message.shared_bytes, DataPath.SHARED_MEMORY)
        elif not message.notice:
            if stream.uses_socket:
                path = DataPath.SHARED_MEMORY
            else:
                path = DataPath.TCP if message.on_lane else DataPath.WIRE
            self._observer.moved(Direction.DOWN, message.size, path)
        # A stream that the worker half-closed has left the core, and still gets its averages.
        if stream.number in self._streams:
            self._receive(AverageSent(stream.number, message.job))

    def _checked(self, streams: tuple[int, ...]) -> bool:
        """Whether any of them was opened with checksums: the others skip those fields."""
        return any(self._streams[number].checked for number in streams)


def _lost(stream: ReduceStream, why: str) -> None:
    """A message could not be written to a stream's socket."""
    text = f"the socket beside the shared memory broke: {why}"
    stream.refuse(CallRefusal(Reason.PEER_GONE, text))
