"""Reduce: the core on the event loop, its arithmetic in threads.

The event loop owns the core: `receive` is called between awaits, never across one, and its effects
are carried out before anything else runs. Threads get jobs and give back framed averages; they
touch nothing else.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from andon import tokens
from andon.frames import FrameError, frame_response, parse_request
from andon.messages import (
    Abstain,
    BlockFault,
    BlockGradient,
    FaultyBlockKind,
    OpenRound,
    RoundOpened,
)
from andon_reducer.core.effects import (
    Effect,
    FreeRound,
    PauseStream,
    Reduce,
    Refusal,
    RefusalReason,
    RefuseStream,
    ResumeStream,
    SendAverage,
    SendNotice,
)
from andon_reducer.core.events import (
    Abstained,
    AverageSent,
    ChunkReduced,
    Event,
    GradientArrived,
    StreamEnded,
    StreamOpened,
)
from andon_reducer.core.jobs import Job, reduce_chunk
from andon_reducer.core.observer import Direction, Observer
from andon_reducer.core.rounds import Rounds
from andon_reducer.transport.status import Refused
from andon_reducer.transport.stream import Context, Stream

__all__ = ["CAPABILITIES", "Exchanger"]

CAPABILITIES = ("float16.v1", "bfloat16.v1")
"""What this reducer offers beside float32."""

_log = logging.getLogger(__name__)


class Exchanger:
    """Serves Reduce: translates messages to events and effects to messages."""

    def __init__(
        self,
        rounds: Rounds,
        observer: Observer,
        *,
        secret: bytes,
        threads: int,
        max_payload_bytes: int,
        opening_s: float,
    ) -> None:
        """Serves `rounds`, which nobody else may touch; a stream has `opening_s` to open."""
        self._rounds = rounds
        self._observer = observer
        self._secret = secret
        self._max_payload_bytes = max_payload_bytes
        self._opening_s = opening_s
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="andon-reducer")
        self._numbers = itertools.count(1)
        self._streams: dict[int, Stream] = {}
        self._frames: dict[int, bytes] = {}
        """The average of the job that is being announced."""
        self._closing = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def inflight_bytes(self) -> int:
        """What the rounds hold now."""
        return self._rounds.inflight_bytes

    async def serve(self, context: Context) -> None:
        """One call of Reduce, to its end.

        Raises:
            Refused: it ends with an error.
        """
        stream = Stream(next(self._numbers), context)
        messages = stream.messages()
        opening = await self._opening(messages)
        # Now, and not with the first message: a refusal may cut that one short, and a call whose
        # metadata is half sent can't be ended with a status.
        await context.send_initial_metadata(())
        self._enter(stream, opening)
        reader = asyncio.create_task(self._read(stream, messages))
        writer = asyncio.create_task(stream.write_all(partial(self._sent, stream)))
        try:
            ends: set[asyncio.Future[Any]] = {reader, writer, stream.refusal}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            self._leave(stream)
            if reader.done() and not stream.refusal.done():
                reader.result()
                # The worker sends no more; what was made for it still goes out.
                stream.close()
                await writer
        finally:
            self._leave(stream)
            reader.cancel()
            writer.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)
        if stream.refusal.done():
            refusal = stream.refusal.result()
            raise Refused(refusal.reason, refusal.message)
        writer.result()

    async def close(self) -> None:
        """Ends all streams as UNAVAILABLE, and the threads."""
        self._closing = True
        for stream in self._streams.values():
            stream.refuse(Refusal(RefusalReason.CLOSING, "the reducer is going away"))
        await self._idle.wait()
        self._pool.shutdown(wait=True, cancel_futures=True)

    async def _opening(self, messages: AsyncIterator[bytes]) -> OpenRound:
        try:
            data = await asyncio.wait_for(anext(messages, b""), self._opening_s)
            opening = parse_request(data)
        except TimeoutError:
            text = f"the stream was not opened within {self._opening_s:g} s"
            raise Refused(RefusalReason.MALFORMED, text) from None
        except FrameError as error:
            raise Refused(RefusalReason.MALFORMED, str(error)) from None
        if not isinstance(opening, OpenRound):
            raise Refused(RefusalReason.MALFORMED, "the first message is not OpenRound")
        if not tokens.verify(self._secret, opening.run_id, opening.worker, opening.session_token):
            text = f"the session token is not worker {opening.worker}'s: join again"
            raise Refused(RefusalReason.TOKEN, text)
        if self._closing:
            raise Refused(RefusalReason.CLOSING, "the reducer is going away")
        return opening

    def _enter(self, stream: Stream, opening: OpenRound) -> None:
        self._streams[stream.number] = stream
        self._idle.clear()
        self._observer.opened()
        self._receive(StreamOpened(stream.number, opening.run_id, opening.worker))
        shared = tuple(each for each in CAPABILITIES if each in opening.capabilities)
        stream.send(frame_response(RoundOpened(shared, self._max_payload_bytes)))

    def _leave(self, stream: Stream) -> None:
        if self._streams.pop(stream.number, None) is None:
            return
        self._observer.closed()
        self._receive(StreamEnded(stream.number))
        if not self._streams:
            self._idle.set()

    async def _read(self, stream: Stream, messages: AsyncIterator[bytes]) -> None:
        async for data in messages:
            if stream.refusal.done():
                return
            try:
                request = parse_request(data)
            except FrameError as error:
                stream.refuse(Refusal(RefusalReason.MALFORMED, str(error)))
                return
            match request:
                case BlockGradient():
                    self._observer.moved(Direction.UP, len(data))
                    self._receive(GradientArrived(stream.number, request))
                case Abstain():
                    self._receive(Abstained(stream.number, request))
                case OpenRound():
                    text = "OpenRound is the first message of a stream, and no other"
                    stream.refuse(Refusal(RefusalReason.MALFORMED, text))
                    return

    def _sent(self, stream: Stream, size_bytes: int, job: int) -> None:
        self._observer.moved(Direction.DOWN, size_bytes)
        if stream.number in self._streams:
            self._receive(AverageSent(stream.number, job))

    def _receive(self, event: Event) -> None:
        for effect in self._rounds.receive(event, time.monotonic()):
            self._perform(effect)
        self._observer.holds(self._rounds.inflight_bytes)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Reduce(job):
                loop = asyncio.get_running_loop()
                future = loop.run_in_executor(self._pool, _work, job)
                future.add_done_callback(partial(self._reduced, job))
            case SendAverage(job_id, streams):
                for number in streams:
                    self._streams[number].send(self._frames[job_id], job_id)
            case SendNotice(streams, notice):
                frame = frame_response(notice)
                for number in streams:
                    self._streams[number].send(frame)
            case RefuseStream(number, refusal):
                self._streams[number].refuse(refusal)
            case PauseStream(number):
                self._streams[number].pause()
            case ResumeStream(number):
                self._streams[number].resume()
            case FreeRound():
                self._observer.freed(effect)

    def _reduced(self, job: Job, future: asyncio.Future[bytes | BlockFault]) -> None:
        if future.cancelled():
            return
        failure = future.exception()
        if failure is not None:
            _log.error("a chunk could not be averaged", exc_info=failure)
        answer = _failed(job) if failure is not None else future.result()
        if isinstance(answer, BlockFault):
            self._receive(ChunkReduced(job.id, answer))
            return
        self._frames[job.id] = answer
        self._receive(ChunkReduced(job.id))
        del self._frames[job.id]


def _work(job: Job) -> bytes | BlockFault:
    """What a thread does: the average of a job, framed."""
    answer = reduce_chunk(job)
    return answer if isinstance(answer, BlockFault) else frame_response(answer)


def _failed(job: Job) -> BlockFault:
    """What everybody is told of a job that raised: a step that can't be averaged stops the line."""
    return BlockFault(
        key=job.key,
        group=job.group,
        sequence=job.sequence,
        kind=FaultyBlockKind.INCONSISTENT,
        block=job.block,
        element=job.offset,
        message="the reducer could not average this chunk; its log says why",
    )
