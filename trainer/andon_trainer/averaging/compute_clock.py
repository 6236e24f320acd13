"""The compute clock: how long a worker was busy with the micro-batches of one attempt.

Theory of operation. A micro-batch counts from the moment that the loop body gets it to the end of
its backward. The clock stands while the worker does something else in between, such as opening a
round. A GPU works behind the script, so its time is taken by events that its stream passes; they
are only read once the step's last backward is over, and nothing waits for the device before that.

What is not counted: waiting for data, the exchange, the optimizer, and borrowed samples, which say
nothing about how fast this worker computes its share. Throughput is therefore `samples / seconds`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from andon_trainer.timeline import Timeline

__all__ = [
    "Busy",
    "ComputeClock",
    "CudaStopwatch",
    "DeviceEvent",
    "HostStopwatch",
    "Stopwatch",
    "make_clock",
]


@dataclass(frozen=True, slots=True)
class Busy:
    """Forward and backward of an attempt, and what they were for."""

    seconds: float = 0.0
    micro_batches: int = 0
    samples: int = 0


class Stopwatch(Protocol):
    """Adds up stretches of a device's time."""

    def reset(self) -> None:
        """Forgets all stretches."""

    def start(self) -> None:
        """A stretch begins."""

    def stop(self) -> None:
        """The stretch ends."""

    def seconds(self) -> float:
        """The sum of all stretches that ended; waits until the device has passed the last."""


class HostStopwatch:
    """For devices that are done when a call returns."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        """Reads the time, in seconds, from `now`."""
        self._now = now
        self._sum = self._since = 0.0

    def reset(self) -> None:
        """Forgets all stretches."""
        self._sum = 0.0

    def start(self) -> None:
        """A stretch begins."""
        self._since = self._now()

    def stop(self) -> None:
        """The stretch ends."""
        self._sum += self._now() - self._since

    def seconds(self) -> float:
        """The sum of all stretches that ended."""
        return self._sum


class DeviceEvent(Protocol):
    """What is used of `torch.cuda.Event`."""

    def record(self, stream: Any, /) -> None:
        """Notes the time when the stream has done all work that it has now."""

    def synchronize(self) -> None:
        """Waits until that time has come."""

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from this event to `end`; both have happened."""


class CudaStopwatch:
    """For CUDA: a pair of events around each stretch, on the calling thread's current stream."""

    def __init__(
        self, make_event: Callable[[], DeviceEvent], current_stream: Callable[[], Any]
    ) -> None:
        """Makes events at their first use, and uses them again in later attempts."""
        self._make_event = make_event
        self._current_stream = current_stream
        self._events: list[tuple[DeviceEvent, DeviceEvent]] = []
        self._ended = 0
        """Pairs below this index are stretches of this attempt that ended."""

    def reset(self) -> None:
        """Forgets all stretches; the device may still be inside one."""
        self._ended = 0

    def start(self) -> None:
        """A stretch begins when the stream has done what was queued before."""
        if self._ended == len(self._events):
            self._events.append((self._make_event(), self._make_event()))
        # A pair that an earlier attempt has used is recorded anew: nobody reads that time any more.
        self._events[self._ended][0].record(self._current_stream())

    def stop(self) -> None:
        """The stretch ends when the stream has done what was queued in it."""
        self._events[self._ended][1].record(self._current_stream())
        self._ended += 1

    def seconds(self) -> float:
        """The sum of all stretches that ended; waits for their own ends, not for later work."""
        total = 0.0
        for start, end in self._events[: self._ended]:
            # A script may run its loop body on a stream of its own, so the order of the stretches
            # says nothing about the order of their ends.
            start.synchronize()
            end.synchronize()
            total += start.elapsed_time(end)
        return total / 1000.0


class ComputeClock:
    """Times the micro-batches of one attempt of a step. Used by one thread."""

    def __init__(self, stopwatch: Stopwatch, timeline: Timeline | None = None) -> None:
        """Stands, with nothing counted. Micro-batches go to `timeline`, too, by the host's time."""
        self._stopwatch = stopwatch
        self._timeline = timeline
        self._taken_at: float | None = None
        """When the loop body got its batch, by the host's time; None: it has none."""
        self._held: int | None = None
        """Samples of the micro-batch that is being computed; None if none is."""
        self._running = False
        self._micro_batches = self._samples = 0
        self.others = 0
        """Samples that other processes of this worker's host computed meanwhile."""

    def begin(self) -> None:
        """An attempt begins: forgets the one before, however it ended."""
        self._stopwatch.reset()
        self._held, self._running, self._taken_at = None, False, None
        self._micro_batches = self._samples = self.others = 0

    def take(self, samples: int) -> None:
        """The loop body gets a micro-batch."""
        self._taken_at, self._held = time.perf_counter(), samples
        self.resume()

    def borrow(self) -> None:
        """The loop body gets borrowed samples, which do not count."""
        self._taken_at = time.perf_counter()

    def pause(self) -> None:
        """What follows is no computation."""
        if self._running:
            self._stopwatch.stop()
            self._running = False

    def resume(self) -> None:
        """The computation of the micro-batch goes on."""
        # Only within a micro-batch that counts: borrowed samples must not start the clock.
        if self._held is not None and not self._running:
            self._stopwatch.start()
            self._running = True

    def done(self) -> None:
        """Backward of the micro-batch is over; does nothing if none is being computed."""
        began, self._taken_at = self._taken_at, None
        if self._timeline is not None and began is not None:
            self._timeline.span("compute", began, samples=self._held or 0)
        if self._held is not None:
            self.pause()
            self._micro_batches += 1
            self._samples += self._held
            self._held = None

    @property
    def counted(self) -> int:
        """Samples of this attempt that are computed, or being computed."""
        return self._samples + (self._held or 0)

    def read(self) -> Busy:
        """All micro-batches of this attempt that went backward.

        Call it after the step's last backward: on a GPU it waits until that is over.
        """
        samples = self._samples + self.others
        return Busy(self._stopwatch.seconds(), self._micro_batches, samples)


def make_clock(device: torch.device, timeline: Timeline | None = None) -> ComputeClock:
    """The clock that suits a device."""
    if device.type != "cuda":
        return ComputeClock(HostStopwatch(), timeline)
    stopwatch = CudaStopwatch(
        lambda: cast(DeviceEvent, torch.cuda.Event(enable_timing=True)),  # type: ignore[no-untyped-call]  # torch has no types here
        lambda: torch.cuda.current_stream(device),
    )
    return ComputeClock(stopwatch, timeline)
