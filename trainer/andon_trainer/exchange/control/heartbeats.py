"""Heartbeats: what a stream says regularly, and sooner if the script logged something."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from itertools import count

from andon.host.memory import resident_bytes
from andon.protocol.limits import clipped
from andon.protocol.scalars import Scalar
from andon.v1 import coordinator_pb2 as pb
from andon_trainer.core.scalar_log import ScalarLog
from andon_trainer.timeline import Timeline

__all__ = ["Heartbeats", "ProcessMeter", "ScalarOutbox"]

_QUICK_BEATS = 5
_QUICK_BEAT_S = 0.05
_SOON_S = 0.2
"""Scalars wait so long at most for the next heartbeat, if the one before was answered."""
_METER_EVERY_S = 0.5


class ScalarOutbox:
    """The scalar log of a worker, shared by its script's thread and the threads of its streams."""

    def __init__(self) -> None:
        """Is empty."""
        self._log = ScalarLog()
        self._lock = threading.Lock()
        self._wake = threading.Event()

    def put(self, scalars: Iterable[Scalar]) -> int:
        """Keeps scalars until they are acknowledged. Returns how many were given up so far."""
        with self._lock:
            self._log.add(scalars)
            self._wake.set()
            return self._log.lost

    @property
    def ready(self) -> bool:
        """Whether there is something to send, and nothing unanswered."""
        with self._lock:
            return self._log.ready

    def joined(self, stream: int, wake: threading.Event) -> None:
        """A new stream sends them; `wake` is set whenever there may be something to send."""
        with self._lock:
            # Under the lock, as `put` is: no scalar wakes the stream before, and nobody else.
            self._wake = wake
            self._log.joined(stream)

    def take(self, stream: int, sequence: int) -> tuple[Scalar, ...]:
        """What goes with a heartbeat."""
        with self._lock:
            return self._log.take(stream, sequence)

    def answered(self, stream: int, sequence: int) -> None:
        """A heartbeat was answered."""
        with self._lock:
            self._log.answered(stream, sequence)
            if self._log.ready:
                self._wake.set()

    def rest(self, stream: int) -> list[tuple[Scalar, ...]]:
        """Everything that was not sent yet."""
        with self._lock:
            return list(self._log.rest(stream))


class ProcessMeter:
    """What this process uses of its host, measured twice a second at most."""

    def __init__(self, at: float, used_s: float) -> None:
        """Begins at a monotonic time, when the process has used so much of its processors."""
        self._at, self._used_s = at, used_s
        self._last: tuple[float | None, int | None] = (None, None)

    def read(self, at: float, used_s: float) -> tuple[float | None, int | None]:
        """Busy cores, and memory in bytes; None: not measured yet, or this machine can't tell."""
        if at - self._at >= _METER_EVERY_S:
            self._last = (used_s - self._used_s) / (at - self._at), resident_bytes()
            self._at, self._used_s = at, used_s
        return self._last


class Heartbeats:
    """The heartbeats of one stream."""

    def __init__(
        self,
        send: Callable[[pb.TrainRequest], None],
        number: int,
        outbox: ScalarOutbox,
        timeline: Timeline | None,
    ) -> None:
        """Sends nothing yet; `number` is the stream's."""
        self._send = send
        self._number = number
        self._outbox = outbox
        self._timeline = timeline
        self._activity = "ACTIVITY_IDLE"
        self._detail = ""
        self._meter = ProcessMeter(time.monotonic(), time.process_time())
        self._sequences = count(1)
        self._order = threading.Lock()
        """Held from a number to its message: `flush` is called by another thread than `run`."""
        self._stop = threading.Event()
        self._wake = threading.Event()

    def show(self, activity: str, detail: str) -> None:
        """Sets what the next ones say."""
        self._activity, self._detail = f"ACTIVITY_{activity}", clipped(detail)

    @property
    def detail(self) -> str:
        """The script's own words for what it does."""
        return self._detail

    def stop(self) -> None:
        """Ends `run`."""
        self._stop.set()
        self._wake.set()

    def answered(self, answer: pb.HeartbeatAnswer) -> None:
        """Takes an answer; the reading thread calls it."""
        if self._timeline is not None:
            self._timeline.heartbeat_answered(answer.sequence, answer.unix_time_s)
        self._outbox.answered(self._number, answer.sequence)

    def begin(self) -> None:
        """The stream has joined: what was logged goes out on it from here on."""
        self._outbox.joined(self._number, self._wake)

    def run(self, every_s: float, *, at_once: bool = False) -> None:
        """Sends them until `stop`, the first one now if `at_once`; a thread of its own runs it."""
        sent, sent_at = 0, -math.inf if at_once else time.monotonic()
        # A trace wants to know the coordinator's time soon: a short run ends before a heartbeat.
        quick = 0 if self._timeline is None else _QUICK_BEATS
        while not self._stop.is_set():
            pause_s = every_s if sent >= quick else min(every_s, _QUICK_BEAT_S)
            if self._outbox.ready:
                pause_s = min(pause_s, _SOON_S)
            wait_s = sent_at + pause_s - time.monotonic()
            if wait_s > 0:
                # Cleared before it is looked again whether there is something to send: what comes
                # in between sets it again.
                self._wake.wait(wait_s)
                self._wake.clear()
                continue
            sent, sent_at = sent + 1, time.monotonic()
            with self._order:
                sequence = next(self._sequences)
                self._beat(sequence, self._outbox.take(self._number, sequence))

    def flush(self) -> None:
        """Sends all scalars that were not sent; call it before Leave."""
        with self._order:
            for scalars in self._outbox.rest(self._number):
                self._beat(next(self._sequences), scalars)

    def _beat(self, sequence: int, scalars: tuple[Scalar, ...]) -> None:
        if self._timeline is not None:
            self._timeline.heartbeat_sent(sequence)
        busy_cores, memory_bytes = self._meter.read(time.monotonic(), time.process_time())
        self._send(
            pb.TrainRequest(
                heartbeat=pb.Heartbeat(
                    sequence=sequence,
                    activity=self._activity,
                    detail=self._detail,
                    scalars=[
                        pb.LoggedScalar(name=each.name, step=each.step, value=each.value)
                        for each in scalars
                    ],
                    busy_cores=busy_cores,
                    memory_bytes=memory_bytes,
                )
            )
        )
