"""The task that owns the line's core: events in, one after the other; effects done, in order.

Theory of operation: streams, operators, the ticker and the journal's thread put events into one
mailbox. One asyncio task takes them out, asks the core what follows, and does it: what is to be
saved goes to the journal's thread, what is to be sent to the outgoing queue of its stream. Neither
ever blocks, so no worker can hold the others up. A commit is announced only after RecordSaved came
back through the same mailbox, because the core waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, get_args

from andon.protocol.reducers import MAX_REDUCERS
from andon_coordinator.core import effects, events
from andon_coordinator.core.line import LineCore
from andon_coordinator.core.status import LineSnapshot
from andon_coordinator.transport.clock import LineClock
from andon_coordinator.transport.errors import (
    InternalError,
    JoinRefused,
    LineError,
    OperatorRefused,
    Overloaded,
    RejoinNeeded,
    ServiceLeaving,
)
from andon_coordinator.transport.journal import Journal, JournalFenced, SaveEffect
from andon_coordinator.transport.log import WaitLog, log_effect
from andon_coordinator.transport.mailbox import Mailbox
from andon_coordinator.transport.registration import Registration
from andon_coordinator.transport.stream import Stream
from andon_coordinator.transport.translation import Outgoing, message_to
from andon_coordinator.transport.welcome import Welcome

__all__ = ["LineObserver", "LineTask", "TaskSettings"]

log = logging.getLogger(__name__)

_SAVES = get_args(SaveEffect)
_SENDS = get_args(Outgoing)


class LineObserver(Protocol):
    """Whoever counts what happens; it is told in the owner's task and must not block."""

    def observe(self, event: events.Event, done: Sequence[effects.Effect], now: float) -> None:
        """An event was taken, and these effects followed."""

    def tick(self, status: LineSnapshot) -> None:
        """What the line is doing now; told a few times a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """Bounds of the task."""

    max_streams: int
    """Streams open at once; one more is refused."""
    flush_s: float = 30.0
    """How long a stream that is over waits for its worker to read what was sent before."""
    mailbox: int = 1024
    """Events from outside that wait."""
    tick_s: float = 0.05
    """How often the core looks at leases and graces."""
    tell_s: float = 0.5
    """How often the observer is shown a status."""


@dataclass(frozen=True, slots=True)
class _Letter:
    event: events.Event
    answer: asyncio.Future[None] | None = None
    """Whoever waits until the event's effects are done."""


class LineTask:
    """Owns the core. Everything here runs on the event loop."""

    def __init__(
        self,
        line: LineCore,
        journal: Journal,
        welcome: Welcome,
        *,
        settings: TaskSettings,
        clocks: tuple[LineClock, Callable[[], float]],
        observer: LineObserver,
    ) -> None:
        """`clocks` are the line's and that of the time since the Unix epoch."""
        self._line = line
        self._journal = journal
        self._welcome = welcome
        self._settings = settings
        self._clock, self._wall = clocks
        self._observer = observer
        self._mailbox: Mailbox[_Letter] = Mailbox(settings.mailbox)
        self._streams: dict[int, Stream] = {}
        self._asked: set[asyncio.Future[None]] = set()
        self._registrations: dict[int, Registration] = {}
        self.scraped_reducers: Mapping[str, str] = {}
        """Where the metrics of each registered reducer are, by its address; any thread may look."""
        self._last_stream = 0
        self._tick_waits = False
        self._told_at = -math.inf
        self._waits = WaitLog()
        self._stirred = asyncio.Event()
        self._closed = False
        self._tell_newcomers: Callable[[bool], None] = lambda wanted: None
        self._newcomers = line.takes_newcomers
        self._tasks: list[asyncio.Task[None]] = []
        self.complete = asyncio.Event()
        """Set once the line is COMPLETE."""
        self.failed: BaseException | None = None
        """What ended the task, if it was not closed."""
        self.over = asyncio.Event()
        """Set once the line is COMPLETE, or the task was closed or failed."""

    def start(self) -> None:
        """Starts to own the core, and the journal's writer."""
        loop = asyncio.get_running_loop()

        def report(event: events.Event) -> None:
            loop.call_soon_threadsafe(self.put_now, event)

        def deposed(why: str) -> None:
            loop.call_soon_threadsafe(self._depose, why)

        self._journal.start(report, deposed)
        self._tasks = [
            asyncio.create_task(self._own(), name="andon-line"),
            asyncio.create_task(self._tick(), name="andon-ticker"),
        ]

    async def close(self) -> None:
        """RunEnd every stream with UNAVAILABLE and lets the journal finish."""
        self._end_all(ServiceLeaving("the coordinator is going away: join again"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._journal.close)

    def tell_newcomers(self, tell: Callable[[bool], None]) -> None:
        """Calls `tell` now, and at each change: whether the line takes newcomers."""
        self._tell_newcomers = tell
        tell(self._newcomers)

    def status(self) -> LineSnapshot:
        """What the line is doing now."""
        return self._line.status(self._clock.now())

    async def changed(self, timeout_s: float) -> tuple[bool, bool]:
        """Waits until something happened, at most so long.

        Returns:
            Whether it did, and whether the task goes on.
        """
        stirred = self._stirred
        try:
            await asyncio.wait_for(stirred.wait(), timeout_s)
        except TimeoutError:
            return False, not self._closed
        return True, not self._closed

    def open_stream(self) -> Stream:
        """A new stream. If too many are open, the oldest that did not join yet is ended for it:
        who has something to say says it at once, and is never the oldest for long.

        Raises:
            Overloaded: too many are open, and all of them joined.
            ServiceLeaving: the coordinator is going away.
        """
        if self._closed:
            raise ServiceLeaving("the coordinator is going away: join again")
        if len(self._streams) >= self._settings.max_streams:
            self._make_room()
        self._last_stream += 1
        stream = Stream(self._last_stream, flush_s=self._settings.flush_s)
        self._streams[stream.number] = stream
        return stream

    def _make_room(self) -> None:
        text = f"{len(self._streams)} streams are open already, which is the limit"
        oldest = next((each for each in self._streams.values() if not each.joined), None)
        if oldest is None:
            raise Overloaded(text)
        oldest.end(Overloaded(f"{text}; this one did not join"))
        self._forget(oldest.number)

    def stream_ended(self, stream: Stream, *, gone: bool) -> None:
        """Tells the core, once, that a call is over; `gone` if its peer is."""
        if stream.joined:
            # What the core still has to say to it is sent first: see `_take`.
            self.put_now(events.WorkerStreamEnded(stream.number, gone))
        else:
            self._forget(stream.number)

    async def join(self, stream: Stream, request: events.JoinRequest) -> None:
        """Tells the core of a stream's Join."""
        stream.joined = True
        await self.put(events.WorkerJoined(stream.number, request))

    def open_registration(self) -> Registration:
        """A new stream of a reducer.

        Raises:
            Overloaded, ServiceLeaving: as in `open_stream`.
        """
        if self._closed:
            raise ServiceLeaving("the coordinator is going away: register again")
        if len(self._registrations) >= MAX_REDUCERS:
            text = f"{MAX_REDUCERS} reducers are here already, which is the limit"
            oldest = next((each for each in self._registrations.values() if not each.told), None)
            if oldest is None:
                raise Overloaded(text)
            # Whoever has the secret proves it at once, and is never the oldest for long.
            del self._registrations[oldest.number]
            oldest.end(Overloaded(f"{text}; this one proved nothing"))
        self._last_stream += 1
        registration = Registration(self._last_stream)
        self._registrations[registration.number] = registration
        if self.complete.is_set():
            registration.end()
        return registration

    async def register(self, registration: Registration, address: str) -> None:
        """Tells the core of a reducer that proved itself.

        Raises:
            LineError: its stream was ended meanwhile.
        """
        if registration.error is not None:
            raise registration.error
        registration.told, registration.address = True, address
        self._note_reducers()
        await self.put(events.ReducerRegistered(registration.number, address))

    def registration_ended(self, registration: Registration) -> None:
        """Tells the core, once, that a reducer is gone."""
        if self._registrations.pop(registration.number, None) is not None and registration.told:
            self._note_reducers()
            self.put_now(events.ReducerLost(registration.number))

    def _note_reducers(self) -> None:
        """Replaces the map that other threads read; it is never changed in place."""
        self.scraped_reducers = {
            each.address: each.metrics_address
            for each in self._registrations.values()
            if each.told and each.metrics_address
        }

    async def put(self, event: events.Event) -> None:
        """Tells the core something from outside, once there is room."""
        await self._mailbox.put(_Letter(event))

    def put_now(self, event: events.Event) -> None:
        """Tells the core something that this process itself knows."""
        self._mailbox.put_now(_Letter(event))

    async def ask(self, event: events.Event) -> None:
        """Tells the core what a person wants, and waits until it is done.

        Raises:
            OperatorRefused: it can't be done now.
            ServiceLeaving: the coordinator is going away.
        """
        if self._closed:
            raise ServiceLeaving("the coordinator is going away")
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self._mailbox.put(_Letter(event, answer))
        self._asked.add(answer)
        try:
            await answer
        finally:
            self._asked.discard(answer)

    async def _tick(self) -> None:
        while True:
            self._clock.tick()
            if not self._tick_waits:
                self._tick_waits = True
                self.put_now(events.TimePassed())
            await asyncio.sleep(self._settings.tick_s)

    async def _own(self) -> None:
        try:
            while True:
                self._take(await self._mailbox.take())
        except asyncio.CancelledError:
            raise
        except Exception as error:  # the boundary of this task: nothing goes on without a core
            log.exception("line_failed")
            self.failed = error
            self._end_all(InternalError("the coordinator failed; its log says how"))
            raise

    def _take(self, letter: _Letter) -> None:
        if isinstance(letter.event, events.TimePassed):
            self._tick_waits = False
        now = self._clock.now()
        done = self._line.receive(letter.event, now, wall=self._wall())
        objection = ""
        for effect in done:
            if isinstance(effect, effects.RefuseOperator):
                objection = effect.message
            else:
                self._do(effect)
        self._observer.observe(letter.event, done, now)
        if now - self._told_at >= self._settings.tell_s:
            self._told_at = now
            status = self.status()
            self._waits.note(status, now)
            self._observer.tick(status)
        if letter.answer is not None and not letter.answer.done():
            if objection:
                letter.answer.set_exception(OperatorRefused(objection))
            else:
                letter.answer.set_result(None)
        if isinstance(letter.event, events.WorkerStreamEnded | events.WorkerLeft):
            self._forget(letter.event.stream)
        self._follow_state()
        if done or not isinstance(letter.event, events.TimePassed):
            self._stir()

    def _follow_state(self) -> None:
        if self._line.takes_newcomers is not self._newcomers:
            self._newcomers = self._line.takes_newcomers
            self._tell_newcomers(self._newcomers)
        if self._line.state is effects.LineState.COMPLETE:
            self.complete.set()
            self.over.set()
            self._dismiss_reducers()

    def _dismiss_reducers(self, error: LineError | None = None) -> None:
        for registration in self._registrations.values():
            registration.end(error)

    def _depose(self, why: str) -> None:
        """Gives the line up: an older term closes every stream (rule 2)."""
        if self.failed is None:
            log.error("coordinator_deposed why=%r", why)
            self.failed = JournalFenced(why)
            for task in self._tasks:
                task.cancel()
            self._end_all(ServiceLeaving("another coordinator took the run over: join there"))

    def _do(self, effect: effects.Effect) -> None:
        log_effect(effect)
        if isinstance(effect, _SAVES):
            self._journal.save(effect)
        elif isinstance(effect, effects.RefuseJoin):
            self._end(effect.stream, JoinRefused(effect.refusal))
        elif isinstance(effect, effects.CloseStream):
            self._end(effect.stream, RejoinNeeded(effect.message))
        elif isinstance(effect, effects.CloseReducer):
            if (registration := self._registrations.get(effect.stream)) is not None:
                registration.end(RejoinNeeded(effect.message))
        elif (stream := self._streams.get(getattr(effect, "stream", 0))) is None:
            return  # It ended, and the core will hear of it.
        elif isinstance(effect, effects.AcceptJoin):
            stream.send(self._welcome.message_to(effect, self.status().term))
        elif isinstance(effect, effects.Assign):
            stream.send(self._welcome.assignment_to(effect))
        else:
            assert isinstance(effect, _SENDS), f"no adapter does {effect}"
            stream.send(message_to(effect))

    def _end(self, number: int, error: LineError | None) -> None:
        stream = self._streams.get(number)
        if stream is not None:
            stream.end(error)

    def _forget(self, number: int) -> None:
        stream = self._streams.pop(number, None)
        if stream is not None:
            stream.end()

    def _end_all(self, error: LineError) -> None:
        self._closed = True
        self.over.set()
        for stream in self._streams.values():
            stream.end(error)
        self._dismiss_reducers(error)
        for answer in self._asked:
            if not answer.done():
                answer.set_exception(error)
        self._stir()

    def _stir(self) -> None:
        self._stirred.set()
        self._stirred = asyncio.Event()
