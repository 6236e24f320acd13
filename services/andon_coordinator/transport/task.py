"""What owns the line's core: events in, one after the other; effects carried out in order.

Theory of operation
===================

Streams, operators, the ticker and the journal's thread all bring their events to `put`, on the
event loop. It asks the core what follows, and carries it out: what is to be saved goes to the
journal's thread, what is to be sent goes to the outgoing queue of its stream. Neither ever blocks,
and nothing is awaited meanwhile. So events never interleave, and the core needs no lock.

Nothing waits between a stream and the core, so a flood of messages is as slow as the core: a stream
is read again only once its last message is processed, and the loop gives each stream its turn.

A commit is announced only after RecordSaved came back the same way. The core itself waits for that
event, so no code here has to.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, get_args

from andon.host.logs import LogEvent
from andon.host.process import ProcessState
from andon.protocol.announcements import Announcement
from andon.protocol.reasons import Reason
from andon_coordinator.core import effects, events
from andon_coordinator.core.chronicle import Chronicle
from andon_coordinator.core.line import LineCore
from andon_coordinator.core.line_state import LineState
from andon_coordinator.core.session_events import (
    AttendRequest,
    SessionEvent,
)
from andon_coordinator.core.session_line import with_session
from andon_coordinator.core.sessions import SessionsCore
from andon_coordinator.core.status import LineSnapshot
from andon_coordinator.transport.announcer import Announcer
from andon_coordinator.transport.encoding import Encoder
from andon_coordinator.transport.errors import LineError
from andon_coordinator.transport.journal import Journal, JournalEffect, JournalFenced
from andon_coordinator.transport.log import DeviceLog, WaitLog, log_effect
from andon_coordinator.transport.outgoing import (
    CommitAndAssign,
    JoinAnswers,
    MessageEffect,
    heartbeat_answer_to,
    together,
)
from andon_coordinator.transport.process_watch import ProcessWatch
from andon_coordinator.transport.session_messages import SessionTokens
from andon_coordinator.transport.session_task import Happened, RankStream, SessionTask
from andon_coordinator.transport.streams import ReducerStream, Streams, WorkerStream

__all__ = ["LineClock", "LineObserver", "LineTask", "TaskSettings"]

log = logging.getLogger(__name__)

_SAVES = get_args(JournalEffect)
_SENDS = get_args(MessageEffect)
_SHARED = (effects.SaveHalt, effects.SaveScalars)
"""Effects of sessions that observers of a line know."""


class LineObserver(Protocol):
    """Watches what happens. It is called on the event loop, must not block and must not raise."""

    def observe(self, event: events.Event, done: Sequence[effects.Effect], now: float) -> None:
        """An event was processed, and these effects followed.

        What scripts logged is in `done` as SaveScalars, and what is to be told to people as
        SaveRunEvent.
        """

    def tick(self, status: LineSnapshot) -> None:
        """What the line is doing now; called a few times a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """Limits of the task, and who else it tells."""

    max_streams: int
    """How many workers' streams may be open at once."""
    flush_s: float = 30.0
    """How long a stream that is over waits for its worker to read what was sent before."""
    tick_s: float = 0.05
    """How often the core looks at leases and graces."""
    observe_s: float = 0.5
    """How often the observers get a status, at most."""
    look_s: float = 0.002
    """A status is taken this long after the one before, for each worker: a look at all of them must
    not keep the line from its steps, however many they are."""
    session_happened: Happened = lambda event, done: None
    """Watches what happens to sessions."""
    announce: Callable[[Announcement], None] | None = None
    """Tells the reducer of this process what it may serve; None: there is none."""


class LineClock:
    """Monotonic time, without the gaps in which this process did not run.

    A coordinator that was stopped (SIGSTOP, a suspended host) sees its own ticker before the
    heartbeats that wait in its sockets. Time in which it could not listen proves nothing about the
    workers, so it does not count.
    """

    def __init__(self, monotonic: Callable[[], float], longest_gap_s: float) -> None:
        """Counts at most `longest_gap_s` between two ticks."""
        self._monotonic = monotonic
        self._longest_gap_s = longest_gap_s
        self._ticked_at = monotonic()
        self._lost_s = 0.0

    def tick(self, every_s: float = math.inf) -> float:
        """Notes that the process runs; the rest of a long gap is left out from here on.

        Returns:
            How much later than `every_s` after the tick before this one comes, in the line's time.
        """
        at = self._monotonic()
        gap_s, self._ticked_at = at - self._ticked_at, at
        self._lost_s += max(0.0, gap_s - self._longest_gap_s)
        return max(0.0, min(gap_s, self._longest_gap_s) - every_s)

    def now(self) -> float:
        """The line's time, in seconds."""
        now, latest = self._monotonic(), self._ticked_at + self._longest_gap_s
        return (now if now < latest else latest) - self._lost_s


class LineTask:
    """Owns the core. Everything here runs on the event loop."""

    def __init__(
        self,
        cores: tuple[LineCore, SessionsCore],
        journal: Journal,
        answers: JoinAnswers,
        *,
        settings: TaskSettings,
        clocks: tuple[LineClock, Callable[[], float]],
        observers: Sequence[LineObserver],
    ) -> None:
        """`clocks` are the line's clock, and one of the time since the Unix epoch."""
        line, sessions = cores
        self._chronicle = Chronicle(
            next_id=journal.next_event_id,
            step=line.step,
            resumed=journal.history.head is not None,
        )
        self._line = line
        self._journal = journal
        self._meter = journal.meter
        self._answers = answers
        self._encoder = Encoder(answers)
        self._announcer = Announcer(
            settings.announce, term=line.term, revoked=journal.history.revoked
        )
        self._settings = settings
        self._clock, self._wall = clocks
        self._observers = tuple(observers)
        self._streams = Streams(settings.max_streams, settings.flush_s)
        self.scraped_reducers: Mapping[str, str] = {}
        """Where the metrics of each registered reducer are, by its address.

        Another thread reads it, so it is replaced as a whole and never changed in place.
        """
        self._sessions = SessionTask(sessions, save=journal.save, flush_s=settings.flush_s)
        self._watch = ProcessWatch()
        self._observed_at = -math.inf
        self._wait_log = WaitLog()
        self._device_log = DeviceLog()
        self._changed: asyncio.Event | None = None
        """What is set at the next change; None: nobody has asked for it since the last one."""
        self._closed = False
        self._report_newcomers: Callable[[bool], None] = lambda wanted: None
        self._newcomers = line.takes_newcomers
        self._ticker: asyncio.Task[None] | None = None
        self.complete = asyncio.Event()
        """Set once the line is COMPLETE."""
        self.failed: BaseException | None = None
        """What ended the task, if it was not closed."""
        self.over = asyncio.Event()
        """Set once the line is COMPLETE, or the task was closed or failed."""

    # ------------------------------------------------------------------------- lifetime

    def start(self) -> None:
        """Starts to own the core, and the journal's thread."""
        loop = asyncio.get_running_loop()

        # Both are called on the journal's thread, and `report` also by `save`.
        def report(event: events.Event) -> None:
            if isinstance(event, events.SessionSaved | events.SessionNotSaved):
                loop.call_soon_threadsafe(self.put_session, event)
            else:
                loop.call_soon_threadsafe(self.put, event)

        def deposed(why: str) -> None:
            loop.call_soon_threadsafe(self._depose, why)

        self._journal.start(report, deposed)
        self._ticker = asyncio.create_task(self._tick(), name="andon-ticker")

    async def close(self) -> None:
        """Ends every stream with UNAVAILABLE and lets the journal finish."""
        self._end_all(
            LineError(Reason.SERVICE_LEAVING, "the coordinator is going away: join again")
        )
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        # In a thread: it blocks until everything that is queued is on disk.
        await asyncio.to_thread(self._journal.close)

    def report_newcomers(self, report: Callable[[bool], None]) -> None:
        """Calls `report` now, and at each change: whether the line takes newcomers."""
        self._report_newcomers = report
        report(self._newcomers)

    def status(self) -> LineSnapshot:
        """What the line is doing now."""
        now = self._clock.now()
        line = with_session(self._line.status(now), self._sessions.status(now))
        return replace(line, cost=self._meter.at(self._wall()))

    @property
    def session_tokens(self) -> SessionTokens:
        """Makes the messages to ranks."""
        return SessionTokens(self._answers.run_id, self._answers.secret)

    @property
    def look_s(self) -> float:
        """How long to wait from one look at all workers to the next."""
        return self._settings.look_s * max(self._line.live, self._sessions.streams)

    @property
    def next_change(self) -> asyncio.Event:
        """Set once something happens from now on."""
        if self._changed is None:
            self._changed = asyncio.Event()
        return self._changed

    async def changed(self, change: asyncio.Event, timeout_s: float) -> tuple[bool, bool]:
        """Waits for a change, at most for `timeout_s`.

        Args:
            change: what `next_change` was before the last look: nothing since then is missed.
            timeout_s: how long to wait.

        Returns:
            Whether it happened, and whether the task goes on.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await change.wait()
        except TimeoutError:
            return False, not self._closed
        return True, not self._closed

    async def tell_the_rest(self, most_s: float) -> None:
        """Goes on with a complete line until everybody who is expected was told that it is.

        That is whoever has a stream and is about to join, and every lost worker whose process may
        come back. Usually there is none, and this returns at once.

        Args:
            most_s: how long to wait for them at most.
        """
        deadline = self._clock.now() + most_s
        workers, joining = self._expected()
        if not workers and not joining:
            return
        names = ", ".join(map(str, workers)) or "none"
        log.info(LogEvent("end_awaits_workers", lost=names, joining=joining, most_s=most_s))
        while (workers or joining) and self._clock.now() < deadline and not self._closed:
            # Not every stream's end is a change of the line, so this looks again and again.
            await self.changed(self.next_change, self._settings.tick_s)
            workers, joining = self._expected()
        if workers or joining:
            names = ", ".join(map(str, workers)) or "none"
            log.warning(LogEvent("workers_not_told", lost=names, joining=joining))

    def _expected(self) -> tuple[tuple[int, ...], int]:
        return self._line.expected(self._clock.now()), self._streams.undecided

    # -------------------------------------------------------------------------- streams

    def open_stream(self) -> WorkerStream:
        """A new stream of a worker.

        Raises:
            LineError: too many are open, or the coordinator is going away.
        """
        return self._streams.open_worker()

    def join(self, stream: WorkerStream, request: events.JoinRequest) -> None:
        """Passes a stream's Join to the core, unless the stream is over."""
        if stream.over:
            # Its call ended as the Join came, and nobody would tell the core of the end: it would
            # keep the slot until the silence is noticed. The cancellation of the stream's reader
            # does not prevent this: `asyncio.wait_for` of Python 3.11 drops it if it has a result.
            return
        stream.joined = True
        self.put(events.WorkerJoined(stream.number, request, self._sessions.in_use))

    def stream_ended(self, stream: WorkerStream, *, gone: bool) -> None:
        """Tells the core, once, that a call is over; `gone` if its peer is."""
        if stream.joined:
            self.put(events.WorkerStreamEnded(stream.number, gone))
        else:
            self._streams.forget_worker(stream.number)

    def open_attendance(self) -> RankStream:
        """A new stream of a rank.

        Raises:
            LineError: the coordinator is going away.
        """
        return self._sessions.open_stream()

    def attend(self, stream: RankStream, request: AttendRequest) -> None:
        """Passes a stream's Attend to the core of sessions, unless the stream is over."""
        event = self._sessions.attended(stream, request, trains=self._line.in_use)
        if event is not None:
            self.put_session(event)

    def attendance_ended(self, stream: RankStream) -> None:
        """Tells the core of sessions, once, that a call is over."""
        event = self._sessions.forget(stream)
        if event is not None:
            self.put_session(event)

    def open_registration(self) -> ReducerStream:
        """A new stream of a reducer.

        Raises:
            LineError: too many are open, or the coordinator is going away.
        """
        stream = self._streams.open_reducer()
        if self.complete.is_set():
            stream.end()
        return stream

    def register(self, stream: ReducerStream, address: str) -> None:
        """Tells the core of a reducer that proved itself.

        Raises:
            LineError: its stream was ended meanwhile.
        """
        if stream.error is not None:
            raise stream.error
        # Before the core knows of it: what is announced from now on comes after this.
        self._announcer.greet(stream)
        stream.registered, stream.address = True, address
        self.scraped_reducers = self._streams.scraped_reducers()
        self.put(events.ReducerRegistered(stream.number, address))

    def registration_ended(self, stream: ReducerStream) -> None:
        """Tells the core, once, that a reducer is gone."""
        if self._streams.forget_reducer(stream.number) is not None and stream.registered:
            self.scraped_reducers = self._streams.scraped_reducers()
            self.put(events.ReducerLost(stream.number))

    # --------------------------------------------------------------------------- events

    def put(self, event: events.Event) -> str:
        """Tells the core what happened, and carries out what follows.

        Returns:
            Why an operator's event was refused; empty if it was not.
        """
        if self._closed:
            return ""
        try:
            return self._process(event)
        except Exception as error:  # the boundary of the core
            self._fail(error)
            return ""

    def put_session(self, event: SessionEvent) -> str:
        """As `put`, for the core of sessions."""
        if self._closed:
            return ""
        try:
            return self._process_session(event)
        except Exception as error:  # the boundary of the core
            self._fail(error)
            return ""

    def ask(self, event: events.Event) -> None:
        """Tells the core what an operator wants; it is carried out once this returns.

        Raises:
            LineError: it can't be done now, or the coordinator is going away, or failed.
        """
        if self._closed:
            raise LineError(Reason.SERVICE_LEAVING, "the coordinator is going away")
        if not self._sessions.in_use:
            objection = self.put(event)
        elif isinstance(event, events.CordPulled):
            objection = self.put_session(event)
        else:
            objection = "its ranks attend sessions: nothing waits for an answer, and nothing drains"
        if self.failed is not None:
            raise LineError(Reason.INTERNAL, "the coordinator failed; its log says how")
        if objection:
            raise LineError(Reason.OPERATOR_REFUSED, objection)

    async def _tick(self) -> None:
        now = asyncio.get_running_loop().time
        while not self._closed:
            late_s = self._clock.tick(self._settings.tick_s)
            for seen in self._watch.look(self._streams.processes(), now()):
                if seen.state is ProcessState.ENDS:
                    # As its call's end would say, once the kernel has freed its memory.
                    self.put(events.WorkerStreamEnded(seen.stream, gone=True))
                else:
                    self.put(events.WorkerStopped(seen.stream, seen.seconds))
            if self._sessions.in_use:
                self.put_session(events.TimePassed(late_s))
            else:
                self.put(events.TimePassed(late_s))
            await asyncio.sleep(self._settings.tick_s)

    def _process(self, event: events.Event) -> str:
        """Processes one event. Nothing is awaited here, so events never interleave."""
        now, wall = self._clock.now(), self._wall()
        done = self._line.receive(event, now, wall=wall)
        objection = ""
        for effect in together(done):
            if isinstance(effect, effects.RefuseOperator):
                objection = effect.message
            else:
                self._do(effect)
        state = self._line.state
        told = self._chronicle.receive(event, done, wall=wall, state=state, step=self._line.step)
        for effect in told:
            self._do(effect)
        all_done = [*done, *told]
        self._meter.receive(event, all_done)
        self._show(event, all_done, now)
        if isinstance(event, events.WorkerStreamEnded | events.WorkerLeft):
            # After the effects: the last ones may be for this very stream.
            self._streams.forget_worker(event.stream)
        self._follow(state)
        # A tick without effects changes nothing that a watcher of the status could see.
        if done or told or not isinstance(event, events.TimePassed):
            self._note_change()
        return objection

    def _process_session(self, event: SessionEvent) -> str:
        """As `_process`, for the core of sessions."""
        now, wall = self._clock.now(), self._wall()
        done = self._sessions.receive(event, now, wall)
        told = self._chronicle.session(event, done, wall=wall)
        for effect in told:
            self._do(effect)
        self._meter.receive(events.SessionHappened(), told)
        objections = [each.message for each in done if isinstance(each, effects.RefuseOperator)]
        known = [each for each in done if isinstance(each, _SHARED)]
        self._settings.session_happened(event, done)
        self._show(events.SessionHappened(), [*known, *told], now)
        if done or not isinstance(event, events.TimePassed):
            self._note_change()
        return next(iter(objections), "")

    def _show(self, event: events.Event, done: Sequence[effects.Effect], now: float) -> None:
        """Shows the observers what happened, and a few times a second where the line is."""
        for observer in self._observers:
            observer.observe(event, done, now)
        since_s = now - self._observed_at
        if since_s >= self._settings.observe_s and since_s >= self.look_s:
            self._observed_at = now
            # Once what was sent is on its way: workers wait for it, and nobody for this.
            asyncio.get_running_loop().call_soon(self._show_status, now)

    def _show_status(self, now: float) -> None:
        try:
            status = self.status()
            self._wait_log.note(status, now)
            self._device_log.note(status)
            for observer in self._observers:
                observer.tick(status)
        except Exception as error:  # the boundary of the observers
            self._fail(error)

    def _follow(self, state: LineState) -> None:
        newcomers = self._line.takes_newcomers
        if newcomers is not self._newcomers:
            self._newcomers = newcomers
            self._report_newcomers(newcomers)
        if state is LineState.COMPLETE:
            self.complete.set()
            self.over.set()
            self._streams.dismiss_reducers()

    # -------------------------------------------------------------------------- effects

    def _do(self, effect: effects.Effect | CommitAndAssign) -> None:
        # First: a reducer must know of a round before a worker can send anything of it.
        self._announcer.before(effect, self._streams, term=self._line.term)
        if isinstance(effect, _SENDS):
            if (stream := self._streams.worker(effect.stream)) is not None:
                stream.send(self._encoder.encoded(effect))
            return
        log_effect(effect)
        if isinstance(effect, _SAVES):
            self._journal.save(effect)
        elif isinstance(effect, effects.CloseReducer):
            if (registration := self._streams.reducer(effect.stream)) is not None:
                registration.end(LineError(Reason.REJOIN_NEEDED, effect.message))
        elif (stream := self._streams.worker(getattr(effect, "stream", 0))) is not None:
            self._tell(stream, effect)

    def _tell(self, stream: WorkerStream, effect: effects.Effect | CommitAndAssign) -> None:
        """Does what concerns one stream, and is no message or not the encoder's."""
        match effect:
            case effects.RefuseJoin():
                stream.end(LineError.of(effect.refusal))
            case effects.CloseStream():
                stream.end(LineError(Reason.REJOIN_NEEDED, effect.message))
            case effects.AcceptJoin():
                stream.accept(self._answers.accepted(effect, self._line.term))
            case effects.SendHeartbeatAnswer():
                stream.send(heartbeat_answer_to(effect, self._wall()))
            case _:
                raise AssertionError(f"no adapter does {effect}")

    def _depose(self, why: str) -> None:
        """Stops serving: the journal has a greater term, so every stream is closed (rule 2)."""
        if self.failed is None:
            log.error(LogEvent("coordinator_deposed", why=why))
            # Before `_end_all`, which wakes those who wait for `over` and then look at this.
            self.failed = JournalFenced(why)
            text = "another coordinator took the run over: join there"
            self._end_all(LineError(Reason.SERVICE_LEAVING, text))

    def _fail(self, error: Exception) -> None:
        """Ends everything because of a bug: nothing goes on without a core."""
        log.error(LogEvent("line_failed"), exc_info=error)
        self.failed = error
        self._end_all(LineError(Reason.INTERNAL, "the coordinator failed; its log says how"))

    def _end_all(self, error: LineError) -> None:
        if not self._closed:
            # Before the rest: ranks are told why their session is over, and it goes to the journal.
            self._sessions.close(error, self._clock.now(), self._wall())
        # Then the core hears of nothing more, and so nothing is queued at the journal.
        self._closed = True
        self.over.set()
        self._streams.close(error)
        self._note_change()

    def _note_change(self) -> None:
        # An event for each change. Tasks that wait on the old one wake up; tasks that begin to wait
        # now wait for the next change.
        if self._changed is not None:
            self._changed.set()
            self._changed = None
