"""The timeline: what this worker does and when, written to its part of a trace.

Theory of operation. The threads of the worker put events into a queue, which costs a microsecond.
A thread of the timeline takes them out a few times a second, encodes them and appends them to the
part (`andon.host.trace`), so a worker that is killed loses less than a second of its trace. If
events come faster than they can be written, the queue stops growing and the rest is dropped and
counted: a trace must not become a memory leak. The same thread samples CPU and memory.

Without a trace there is no timeline, and who would use it finds None.
"""

from __future__ import annotations

import logging
import os
import queue
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from andon.host.memory import resident_bytes
from andon.host.trace import (
    ClockSample,
    EventKind,
    PartHeader,
    PartWriter,
    TraceEvent,
    Track,
    WorkerKnown,
    parts_folder,
    this_clock,
)
from andon_trainer.core.effects import (
    AwaitAnswer,
    Effect,
    EndExchange,
    GoOn,
    JoinAgain,
    Listen,
    RaiseHalted,
    StopListening,
)

__all__ = ["Counters", "Timeline", "record_effect"]

log = logging.getLogger(__name__)

Counters = Callable[[], Mapping[str, Mapping[str, float]]]
"""Samples counters: the values of each, by the counter's name."""

_WRITE_EVERY_S = 0.25
_SAMPLE_EVERY_S = 0.5
_MOST_WAITING = 65536
"""Events in the queue beyond which more are dropped: some 20 MiB."""


class Timeline:
    """Records what one worker does. Any thread may record."""

    def __init__(
        self,
        trace: Path,
        *,
        run_id: str,
        counters: Counters = dict,
        notes: tuple[str, ...] = (),
        called: str = "worker",
    ) -> None:
        """Opens this worker's part of `trace`.

        Args:
            trace: where the merged trace will be.
            run_id: the run; empty if it is not known, or there is none.
            counters: sampled twice a second, on the timeline's own thread, beside those of the
                process.
            notes: what is not in the part, for people.
            called: as `PartHeader.called`.

        Raises:
            ValueError: the part can't be written there.
        """
        self._began = time.perf_counter()
        header = PartHeader(
            run_id=run_id,
            host=socket.gethostname(),
            process=os.getpid(),
            clock=this_clock(),
            at_us=_us(self._began),
            unix_us=time.time_ns() // 1000,
            notes=notes,
            called=called,
        )
        try:
            self._part = PartWriter(parts_folder(trace), header)
        except OSError as error:
            raise ValueError(
                f"the trace can't be written to {parts_folder(trace)} ({error.strerror}): set "
                "ANDON_TRACE to a file in a folder that this worker can write to, or unset it"
            ) from error
        self._counters = counters
        self._cpu = self._began, time.process_time()
        self._lines: queue.SimpleQueue[TraceEvent | ClockSample | WorkerKnown] = queue.SimpleQueue()
        self._dropped = 0
        self._asked: dict[int, float] = {}
        """When each heartbeat that was not answered yet was sent."""
        self._step: tuple[int, int, float] | None = None
        """The step that is under way, its attempt, and when it was assigned."""
        self._over = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._write, name="andon-trace", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ what is recorded

    def span(self, name: str, began: float, ended: float | None = None, **args: Any) -> None:
        """Something that the script did, from `began` to `ended` (None: now), both perf_counter."""
        self.span_on(Track.SCRIPT, name, began, ended, **args)

    def span_on(
        self, track: Track, name: str, began: float, ended: float | None = None, **args: Any
    ) -> None:
        """Something that took place on another track."""
        at_us = _us(began)
        # Both ends are rounded alike, so spans that nest still nest after it.
        us = _us(time.perf_counter() if ended is None else ended) - at_us
        if self._step is not None:
            args["step"] = self._step[0]
        self._put(
            TraceEvent(
                kind=EventKind.SPAN, name=name, track=track, at_us=at_us, us=max(0, us), args=args
            )
        )

    def instant(self, name: str, **args: Any) -> None:
        """Something that happened now."""
        at_us = _us(time.perf_counter())
        self._put(
            TraceEvent(
                kind=EventKind.INSTANT, name=name, track=Track.SCRIPT, at_us=at_us, args=args
            )
        )

    def step_began(self, step: int, attempt: int) -> None:
        """A step was assigned."""
        self._step = step, attempt, time.perf_counter()

    def step_over(self, outcome: str) -> None:
        """The step that is under way, if any, is committed or void."""
        if self._step is not None:
            step, attempt, began = self._step
            self.span(f"step {step}", began, attempt=attempt, outcome=outcome)
            self._step = None

    def joined(self, worker: int) -> None:
        """The line takes this process as `worker`."""
        self._put(WorkerKnown(worker))
        self.instant("joined", worker=worker)

    # ------------------------------------------------------------------ the coordinator's clock

    def heartbeat_sent(self, sequence: int) -> None:
        """A heartbeat leaves; called before it does."""
        self._asked[sequence] = time.perf_counter()

    def heartbeat_answered(self, sequence: int, unix_time_s: float) -> None:
        """Its answer is here, with the coordinator's time; 0: it does not say."""
        now, asked = time.perf_counter(), self._asked.pop(sequence, None)
        self._asked = {each: at for each, at in self._asked.items() if each > sequence}
        if asked is not None and unix_time_s > 0:
            # The coordinator looked at its clock between the two moments. So its time belongs to
            # the middle, give or take half of what lies between them.
            middle, error_us = (asked + now) / 2, _us((now - asked) / 2) + 1
            self._put(ClockSample(_us(middle), round(unix_time_s * 1e6), error_us))

    # ------------------------------------------------------------------ the part

    def close(self) -> None:
        """Writes what is left and closes the part; a second call does nothing."""
        self._over.set()
        self._thread.join()

    def _put(self, line: TraceEvent | ClockSample | WorkerKnown) -> None:
        if self._failed:
            return  # Nobody writes any more.
        if self._lines.qsize() < _MOST_WAITING:
            self._lines.put(line)
        else:
            self._dropped += 1  # Two threads may count one at once: it is a number for people.

    def _write(self) -> None:
        """Runs on the timeline's thread."""
        sampled_at = 0.0
        try:
            while not self._over.wait(_WRITE_EVERY_S):
                if time.perf_counter() - sampled_at >= _SAMPLE_EVERY_S:
                    sampled_at = time.perf_counter()
                    self._sample()
                self._write_lines()
            self._sample()
            self._write_lines()
        except OSError as error:
            log.warning("the trace ends here: %s can't be written: %s", self._part.path, error)
            self._failed = True
        finally:
            self._part.close()

    def _write_lines(self) -> None:
        waiting = []
        with suppress(queue.Empty):
            while True:
                waiting.append(self._lines.get_nowait())
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            at_us = _us(time.perf_counter())
            waiting.append(
                TraceEvent(
                    kind=EventKind.INSTANT,
                    name="events dropped",
                    track=Track.SCRIPT,
                    at_us=at_us,
                    args={"events": dropped},
                )
            )
        if waiting:
            self._part.write(waiting)

    def _sample(self) -> None:
        now, spent = time.perf_counter(), time.process_time()
        before, spent_before = self._cpu
        self._cpu = now, spent
        found: dict[str, Mapping[str, float]] = {"memory": {"rss_mib": _resident_bytes() / 2**20}}
        if now > before:
            found["cpu"] = {"percent": round(100 * (spent - spent_before) / (now - before), 1)}
        try:
            found.update(self._counters())
        except Exception as error:  # Counters are others' code, and a sample is worth no run.
            log.warning("the trace has no more counters of the device: %s", error)
            self._counters = dict
        for name, values in found.items():
            self._put(
                TraceEvent(
                    kind=EventKind.COUNTER,
                    name=name,
                    track=Track.SCRIPT,
                    at_us=_us(now),
                    args=dict(values),
                )
            )


def _us(seconds: float) -> int:
    return int(seconds * 1e6)


def _resident_bytes() -> int:
    """This process's resident memory; its peak where the present one can't be read."""
    now = resident_bytes()
    if now is not None:
        return now
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def record_effect(timeline: Timeline, effect: Effect) -> None:
    """Puts what happened to the line on the timeline."""
    match effect:
        case EndExchange():
            timeline.instant("round void", why=effect.message)
        case JoinAgain():
            timeline.instant("stream lost", why=effect.why)
        case AwaitAnswer(evidence) | RaiseHalted(evidence):
            timeline.instant("halted", why=str(evidence))
        case GoOn():
            timeline.instant("resumed")
        case Listen():
            timeline.instant("learns")
        case StopListening():
            timeline.instant("caught up")
        case _:
            pass
