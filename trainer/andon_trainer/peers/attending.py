"""Attending: a rank's control stream, from Attend to the end of its session.

Theory of operation. gRPC's own thread takes messages out of a queue, so nothing here blocks the
threads of collectives. One thread reads what the coordinator sends; another one sends reports, and
notices that nothing is answered. A session ends once, under a lock: by SessionOver, or because the
coordinator is gone. A stream is never resumed.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import grpc

from andon.host.jitter import jittered
from andon.host.logs import LogEvent
from andon.host.tls import TlsError, host_of, is_loopback
from andon.protocol.limits import clipped
from andon.protocol.sessions import (
    RankFault,
    RankReport,
    SessionEnd,
    SessionFormed,
    SessionOver,
)
from andon.v1 import record_pb2, session_pb2
from andon.wire import conversion, sessions
from andon.wire.statuses import details_of
from andon_trainer.errors import JoinRefused, LineLost, SessionEnded
from andon_trainer.exchange.channels import tls_trouble
from andon_trainer.peers.attend_stream import AttendSettings, AttendStream
from andon_trainer.peers.attendance import Attendance
from andon_trainer.process.exits import watch_exit

__all__ = ["AttendSettings", "Attending", "attend"]

log = logging.getLogger(__name__)

_FIRST_WAIT_S = 0.05
_GROWTH = 1.5
_LONGEST_WAIT_S = 2.0
_SLOT_PATIENCE_S = 15.0
"""How long a rank tries again that another process still has: that one may be frozen or dead."""
_LOOK_S = 0.2
"""How often a rank looks whether it has something to report."""
_OPEN_S = 0.5
"""A call that is open for so long is reported at once."""
_CLOSE_S = 5.0
"""How long the coordinator has to end the stream of a rank that left."""
_FAULT_S = 2.0
"""How long a script that failed waits for the end of its session, before its process ends."""
_MOST_NUMBERS = 4096
"""Numbers for the curves that are kept until a report takes them."""


def attend(settings: AttendSettings) -> Attending:
    """Waits until all ranks are there.

    Raises:
        JoinRefused: this process can't be that rank; trying again would not help.
        LineLost: no coordinator answered in time.
        CallTimedOut: ranks are missing.
    """
    heard_by_others = settings.tls is None and not settings.insecure
    if heard_by_others and not is_loopback(host_of(settings.address)):
        # Before anything is opened: an Attend has the run's token in it.
        raise JoinRefused.in_the_clear(f"the run at {settings.address} is on another host")
    incarnation, tries = secrets.randbits(64) or 1, _Tries(settings)
    while True:
        stream = None
        try:
            stream = AttendStream(settings, incarnation)
            return Attending(settings, stream, stream.formed(tries.deadline))
        except BaseException as error:
            if stream is not None:
                stream.close()
            tries.wait_after(error)


class _Tries:
    """How long to try again, and after what."""

    def __init__(self, settings: AttendSettings) -> None:
        """Begins with the first try."""
        self._settings = settings
        self._began = time.monotonic()
        self._wait_s = _FIRST_WAIT_S
        self.deadline = self._began + settings.form_within_s

    def wait_after(self, error: BaseException) -> None:
        """Waits before the next try; raises if that can't help, or it is too late."""
        address, least_s = self._settings.address, 0.0
        late = time.monotonic() + self._wait_s > self.deadline
        if isinstance(error, JoinRefused):
            passes = error.reason == "slot" and time.monotonic() < self._began + _SLOT_PATIENCE_S
            if late or not passes:
                raise error
            awaited, why = f"rank {self._settings.rank}", str(error)
        elif isinstance(error, grpc.RpcError | TlsError):
            why, awaited = tls_trouble(error, address, self._settings.tls), "a coordinator"
            if why:
                raise JoinRefused("tls", why) from None
            if isinstance(error, grpc.RpcError):
                why, least_s = error.code().name, details_of(error).wait_s
            if late:
                raise LineLost(
                    f"no coordinator answered at {address} for {self._settings.form_within_s:.0f} "
                    f"s ({why}): start one with `andon serve`",
                    address,
                    0,
                ) from None
        else:
            raise error
        if self._wait_s == _FIRST_WAIT_S:  # Once, and not for each try.
            text = f"waiting for {awaited} at {address} ({why})"
            log.warning(LogEvent("coordinator_awaited", text, why=why))
        # Jittered: all ranks lose their coordinator at the same moment.
        time.sleep(max(least_s, jittered(self._wait_s)))
        self._wait_s = min(_GROWTH * self._wait_s, _LONGEST_WAIT_S)


class Attending(Attendance):
    """One rank's part in a session, until it is over. Any thread may call it; see `Attendance`."""

    def __init__(
        self, settings: AttendSettings, stream: AttendStream, formed: SessionFormed
    ) -> None:
        """Begins to read and to report; see `attend`."""
        self._settings = settings
        self._stream = stream
        self._formed = formed
        self._key = record_pb2.Key(term=formed.key.term, round=formed.key.round)
        self._lock = threading.Lock()
        self._over: SessionOver | None = None
        self._watchers: list[Callable[[SessionOver], None]] = []
        self._source: Callable[[], RankReport] = RankReport
        self._closing: Callable[[], None] = _nothing
        self._numbers: list[tuple[str, int, float]] = []
        self._left = False
        self._owner = os.getpid()
        self._ended = threading.Event()
        """Set once the stream is over, or the session is."""
        self._closed = threading.Event()
        """Set once the stream is over."""
        self._answered_at = time.monotonic()
        self._report_numbers = count(1)
        self._reporting = threading.Lock()
        """Held from the taking of a report until it is queued: reports are counted in order."""
        self._exit = watch_exit() if settings.watch_exit else None
        if self._exit is not None:
            atexit.register(self._at_exit)
        self._threads = [
            threading.Thread(target=self._read, name="andon-session", daemon=True),
            threading.Thread(target=self._report, name="andon-reports", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def rank(self) -> int:
        """This rank."""
        return self._settings.rank

    @property
    def formed(self) -> SessionFormed:
        """The session's terms."""
        return self._formed

    @property
    def over(self) -> SessionOver | None:
        """Why the session is over; None while it goes on."""
        return self._over

    def fault(self, fault: RankFault) -> None:
        """Tells the coordinator why the session can't go on. Only the first one counts."""
        message = sessions.fault_to_proto(fault)
        message.key.CopyFrom(self._key)
        self._stream.send(session_pb2.AttendRequest(fault=message))

    def watch(self, on_over: Callable[[SessionOver], None]) -> None:
        """Has `on_over` called once the session is over; at once if it is."""
        with self._lock:
            if self._over is None:
                self._watchers.append(on_over)
                return
        on_over(self._over)

    def report_from(self, source: Callable[[], RankReport]) -> None:
        """Where reports come from, from now on. `source` is called on the session's thread."""
        self._source = source

    def before_leaving(self, closing: Callable[[], None]) -> None:
        """Has `closing` called once, before this process leaves: it ends the lanes."""
        self._closing = closing

    def leave(self, *, done: bool) -> None:
        """Leaves the session; `done` if the script came to its end.

        It waits for the coordinator, some seconds at most. A second call does nothing.
        """
        with self._lock:
            if self._left:
                return
            self._left = True
        if os.getpid() != self._owner:
            return  # In a forked child: the session is its parent's.
        self._closing()
        if self._over is None:
            with self._reporting:
                self._send_report(self._take_report())
            end = session_pb2.EndAttendance(key=self._key, done=done)
            self._stream.send(session_pb2.AttendRequest(end=end))
            self._closed.wait(_CLOSE_S)
        self._ended.set()
        self._stream.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(1.0)
        if self._exit is not None:
            self._exit.end(undo=self._over is None)
            atexit.unregister(self._at_exit)

    # ------------------------------------------------------------------------ the threads

    def _read(self) -> None:
        """Runs on the reading thread."""
        why = "it ended the stream"
        try:
            for response in self._stream.responses:
                self._answered_at = time.monotonic()
                if response.WhichOneof("message") == "over":
                    self._end(sessions.over_from_proto(response.over))
        except grpc.RpcError as error:
            why = f"{error.code().name}: {error.details()}"
        except conversion.WireError as error:
            why = f"it sent an invalid message: {error}"
        finally:
            # A rank that has left is told nothing more.
            if not self._left:
                self._lose(why)
            self._closed.set()
            self._ended.set()

    def _report(self) -> None:
        """Runs on the reporting thread."""
        try:
            self._report_until_over()
        except Exception as error:  # the boundary of this thread: without reports a rank is lost
            log.exception(LogEvent("reports_failed"))
            text = clipped(f"its reports failed: {error!r}")
            end = SessionEnd.SCRIPT_FAILED
            self.fault(RankFault(end=end, culprit=self.rank, message=text))

    def _report_until_over(self) -> None:
        formed = self._formed
        sent_at, shown, looked_at = -float("inf"), None, time.monotonic()
        while not self._ended.is_set():
            now = time.monotonic()
            if now - looked_at > 1.0:
                # This process was stopped, and may be behind with reading: silence proves nothing.
                self._answered_at = now
            looked_at = now
            if now - self._answered_at > formed.lease_s + formed.report_s:
                self._lose(f"it did not answer for {now - self._answered_at:.1f} s")
                return
            with self._reporting:
                report = self._take_report()
                pending = report.pending
                place = None if pending is None else (pending.group, pending.sequence)
                soon = pending is not None and pending.open_s >= _OPEN_S and place != shown
                if soon or now - sent_at >= formed.report_s:
                    self._send_report(report)
                    sent_at, shown = now, place if soon else shown
            self._ended.wait(min(_LOOK_S, formed.report_s))

    def _take_report(self) -> RankReport:
        """What there is to report now; numbers are kept until they are sent."""
        report = self._source()
        self._numbers += report.numbers
        del self._numbers[:-_MOST_NUMBERS]
        return report

    def _send_report(self, report: RankReport) -> None:
        """Sends a report, and more of them if a script logged more than one can carry."""
        self._send_one(report)
        while self._numbers:
            self._send_one(report)

    def _send_one(self, report: RankReport) -> None:
        taken = self._numbers[: sessions.MAX_REPORTED_NUMBERS]
        del self._numbers[: len(taken)]
        message = sessions.report_to_proto(replace(report, numbers=tuple(taken)))
        message.key.CopyFrom(self._key)
        message.number = next(self._report_numbers)
        self._stream.send(session_pb2.AttendRequest(report=message))

    def _lose(self, why: str) -> None:
        """The coordinator is gone, and with it the session."""
        address = self._settings.address
        text = f"the coordinator at {address} is gone ({why}): start all ranks again"
        self._end(
            SessionOver(
                key=self._formed.key,
                end=SessionEnd.SERVICE_LEAVING,
                culprit=None,
                culprit_node="",
                message=clipped(text),
            )
        )

    def _end(self, over: SessionOver) -> None:
        """The session is over; the first reason counts."""
        with self._lock:
            if self._over is not None:
                return
            self._over = over
            watchers, self._watchers = self._watchers, []
        if self._exit is not None:
            self._exit.explain(SessionEnded(over))
        log.error(LogEvent("session_over", over.message, end=over.end.label, culprit=over.culprit))
        for on_over in watchers:
            try:
                on_over(over)
            except Exception:  # the boundary to the groups: the others are told all the same
                log.exception(LogEvent("end_not_told"))

    def _at_exit(self) -> None:
        """Tells the session how the script ended, unless it has left."""
        if self._left or os.getpid() != self._owner:
            return
        assert self._exit is not None
        failure = self._exit.failure(done=False)
        if failure is not None and self._over is None:
            self.fault(
                RankFault(
                    end=SessionEnd.SCRIPT_FAILED,
                    culprit=self.rank,
                    message=clipped(f"{type(failure).__name__}: {failure}"),
                )
            )
            self._ended.wait(_FAULT_S)
        self.leave(done=failure is None)


def _nothing() -> None:
    """What there is to close without lanes."""
