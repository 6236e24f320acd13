"""Lock watch: notices that one call kept the interpreter's lock, and in which line it was.

Theory of operation. A call into C that keeps the lock holds up every other thread, also the one
that answers why this worker is late; by the time that one may run, the script is elsewhere. So a
thread of this module wakes up ten times a second and sets a timer of the kernel that expires half a
second after its next waking. As long as it wakes up, the timer never expires. If it does, the
kernel interrupts the script's thread with a signal whose handler is `faulthandler`'s: that writes
down this thread's stack in C, without the lock, and system calls that can be go on after it.

It must be that very thread. A process that was stopped or starved is late as well, and then the
script runs on: another thread that read its calls meanwhile would read what is changing under it,
and could end the process with SIGSEGV.

`faulthandler.dump_traceback_later` would do the same with less code, but there is one of it in a
process, and it may be the script's. Where there are no such timers (macOS) the stack is taken when
this thread wakes up at last, which is a line or two too late.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass

from andon_trainer.core.stacks import RawFrame
from andon_trainer.exchange.control.thread_calls import thread_calls
from andon_trainer.exchange.control.written_stacks import frames_in, stacks_written_at

__all__ = ["Held", "LockWatch"]

_WAKES_S = 0.1
_HELD_S = 0.5
"""A thread that wakes up so much too late could not run."""
_MOST_BYTES = 2**20
_SIGNALS_BELOW_LAST = 5
"""The signal is so many below the last real-time one: languages and libraries use the ends."""
_TO_THREAD = 4
"""SIGEV_THREAD_ID."""


@dataclass(frozen=True, slots=True)
class Held:
    """A time in which no thread of this process but one could run."""

    seconds: float
    ended_at: float
    """By the monotonic clock."""
    frames: tuple[RawFrame, ...]
    """The calls of the script's thread, the innermost first."""


class LockWatch:
    """Notices that this process stood still."""

    def __init__(self, script: int) -> None:
        """Watches nothing yet; `script` identifies the script's thread."""
        self._script = script
        self.last: Held | None = None
        self.watches = threading.Event()
        """Set once it does."""

    def run(self, stop: threading.Event) -> None:
        """Watches until `stop` is set; a thread of its own runs it."""
        alarm = _Alarm.of(self._script)
        before = time.monotonic()
        while True:
            if alarm is not None:
                alarm.set(_WAKES_S + _HELD_S)
            self.watches.set()
            if stop.wait(_WAKES_S):
                break
            now = time.monotonic()
            late_s, before = now - before - _WAKES_S, now
            if late_s >= _HELD_S:
                # First: each line more gives the script's thread time to go on.
                calls = thread_calls().get(self._script, ())
                written = alarm.taken() if alarm is not None else ""
                self.last = Held(late_s, now, frames_in(written) or calls)
        if alarm is not None:
            alarm.close()


class _Event(ctypes.Structure):
    """Linux's struct sigevent, as far as it is used."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("thread", ctypes.c_int),
        ("rest", ctypes.c_byte * 44),
    )


class _Times(ctypes.Structure):
    """struct itimerspec."""

    _fields_ = (
        ("again_s", ctypes.c_long),
        ("again_ns", ctypes.c_long),
        ("after_s", ctypes.c_long),
        ("after_ns", ctypes.c_long),
    )


class _Alarm:
    """A timer that has a thread write its stack down when it expires."""

    def __init__(self, timer: ctypes.c_void_p, file: int, c: ctypes.CDLL) -> None:
        """Holds what `of_this_thread` made."""
        self._timer = timer
        self._file = file
        self._c = c

    @classmethod
    def of(cls, thread: int) -> _Alarm | None:
        """An alarm that interrupts a thread alone; None: this system has none, or it has ended."""
        native = {each.ident: each.native_id for each in threading.enumerate()}.get(thread)
        if native is None or not sys.platform.startswith("linux"):
            return None
        number = signal.SIGRTMAX - _SIGNALS_BELOW_LAST
        file = _file_of(number)
        if file is None:
            return None
        c, timer = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p()
        event = _Event(signal=number, notify=_TO_THREAD, thread=native)
        try:
            made = c.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer))
        except AttributeError:  # A C library that has its timers elsewhere.
            return None
        return None if made else cls(timer, file, c)

    def set(self, after_s: float) -> None:
        """Expires after so long, unless it is set again before."""
        whole = int(after_s)
        times = _Times(0, 0, whole, int((after_s - whole) * 1e9))
        self._c.timer_settime(self._timer, 0, ctypes.byref(times), None)

    def taken(self) -> str:
        """What was written since the last call."""
        data = os.pread(self._file, _MOST_BYTES, 0)
        os.ftruncate(self._file, 0)
        return data.decode(errors="replace")

    def close(self) -> None:
        """Never expires any more. The handler stays: without one the signal ends a process."""
        self._c.timer_delete(self._timer)


_files: dict[int, int] = {}
"""Where the handler of a signal writes; a process has one handler for each."""


def _file_of(number: int) -> int | None:
    """A file in memory into which the signal has a stack written; None: somebody else has it."""
    if number not in _files:
        file = stacks_written_at(number, "andon-stack")
        if file is None:
            return None
        _files[number] = file
    return _files[number]
