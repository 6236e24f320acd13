"""Averaging: jobs in threads, and the messages that their averages leave in.

The event loop makes a delivery of each job and hands its parts to threads. The thread that does the
last part frames the messages, and the loop sends them. Two queues lie between: parts to the
threads, deliveries back to the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from andon.protocol.messages import AveragedBlock, BlockFault, RoundAborted, Slice
from andon.wire.frames import frame_response
from andon_reducer.core.jobs import Job, pieces_of, reduce_chunk
from andon_reducer.transport.arenas import AveragesMemory, StreamMemory

__all__ = ["AveragingThreads", "Delivery"]

_NO_BYTES = memoryview(b"")


class Delivery:
    """One job on its way: made by the loop, reduced in parts by threads, sent by the loop."""

    def __init__(
        self, job: Job, memories: Mapping[int, StreamMemory | None], *, checksums: bool = False
    ) -> None:
        """Delivers to the streams that are the keys; a stream without a memory gets bytes.

        With `checksums` the bytes leave with checksums on every stream: a worker that does not know
        those fields skips them.
        """
        self.job = job
        self.fault: BlockFault | RoundAborted | None = None
        """Why there is no average: of all parts, the fault at the lowest element."""
        self.failure: Exception | None = None
        """What a part raised, if one did."""
        self._checksums = checksums
        self._places: dict[AveragesMemory, tuple[memoryview, Slice]] = {}
        """Where the average is written, and the slice for workers. Fixed once this is built."""
        self._memories: dict[int, AveragesMemory] = {}
        self._slice_frames: dict[AveragesMemory, bytes] = {}
        self._bytes_frame = b""
        for stream, memory in memories.items():
            if not job.to_memory or memory is None or not memory.mapped:
                continue
            averages = memory.averages
            if averages not in self._places:
                place = averages.place(job)
                if place is None:
                    continue
                self._places[averages] = place
            self._memories[stream] = averages
        self._sends_bytes = len(self._memories) < len(memories)
        # A message of bytes holds the whole average, so one thread makes all of it.
        self.parts = [job] if self._sends_bytes else pieces_of(job)
        """What threads do, in any order."""
        self._left = len(self.parts)
        self._lock = threading.Lock()
        """Guards `_left` and `fault`: several threads may end a part at once."""

    def reduce(self, part: Job) -> bool:
        """Does one part; runs on any thread. Returns whether it was the last one to be done."""
        start = (part.offset - self.job.offset) * part.encoding.itemsize
        stop = start + part.count * part.encoding.itemsize
        places = [view[start:stop] for view, _ in self._places.values()]
        answer = reduce_chunk(part, places[0] if places else None)
        if isinstance(answer, AveragedBlock):
            # There are several memories if a stream was opened after the first average.
            for place in places[1:]:
                np.copyto(np.frombuffer(place, np.uint8), np.frombuffer(answer.payload, np.uint8))
            if self._sends_bytes:
                self._bytes_frame = frame_response(answer, checksums=self._checksums)
        return self._done(answer)

    def fail(self, error: Exception) -> bool:
        """Notes that a part raised. Returns whether it was the last one to be done."""
        self.failure = error
        # The other parts still run. They use the contributions and the shared memory, so the
        # delivery is returned only after the last of them.
        return self._done(None)

    def frame_for(self, stream: int) -> tuple[bytes, int]:
        """The message for a stream, and how many bytes of shared memory it stands for."""
        averages = self._memories.get(stream)
        if averages is None:
            return self._bytes_frame, 0
        return self._slice_frames[averages], self._places[averages][1].length

    def _done(self, answer: AveragedBlock | BlockFault | RoundAborted | None) -> bool:
        with self._lock:
            if isinstance(answer, RoundAborted):
                # From the only part: what lies in shared memory has no checksum.
                self.fault = answer
            elif isinstance(answer, BlockFault) and (
                not isinstance(self.fault, BlockFault) or answer.element < self.fault.element
            ):
                self.fault = answer
            self._left -= 1
            if self._left:
                return False
        # Only the thread that did the last part gets here, and the loop gets the delivery after
        # this returns. So nothing below needs the lock.
        if isinstance(answer, AveragedBlock):
            whole = replace(answer, offset=self.job.offset, count=self.job.count, payload=_NO_BYTES)
            for averages, (_, slice_) in self._places.items():
                self._slice_frames[averages] = frame_response(replace(whole, slice=slice_))
        return True


class AveragingThreads:
    """Threads that reduce parts of deliveries. They belong to one event loop."""

    def __init__(self, count: int, done: Callable[[Delivery], None]) -> None:
        """Starts `count` threads; the loop calls `done` with each delivery that is reduced."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._done = done
        self._parts: queue.SimpleQueue[tuple[Delivery, Job] | None] = queue.SimpleQueue()
        self._results: deque[Delivery] = deque()
        self._wake_sent = False
        self._lock = threading.Lock()
        """Guards `_results` and `_wake_sent`."""
        self._busy_s = [0.0] * count
        """How long each thread has computed. Each one writes its own, so there is no lock."""
        self._threads = [
            threading.Thread(
                target=self._run, args=(number,), name=f"andon-reducer_{number}", daemon=True
            )
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def busy_s(self) -> float:
        """How long all threads together have computed; any thread may ask."""
        return sum(self._busy_s)

    def do(self, delivery: Delivery) -> None:
        """Has all parts of a delivery done by whichever threads are free."""
        if self._loop is None:
            # Not in the constructor: that may run before the loop does.
            self._loop = asyncio.get_running_loop()
        for part in delivery.parts:
            self._parts.put((delivery, part))

    def close(self) -> None:
        """Ends the threads, each after what it is doing; parts that still wait are not done."""
        # All streams have ended, so nobody waits for an average.
        with contextlib.suppress(queue.Empty):
            while True:
                self._parts.get_nowait()
        for _ in self._threads:
            self._parts.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        while (work := self._parts.get()) is not None:
            delivery, part = work
            began = time.perf_counter()
            try:
                last = delivery.reduce(part)
            except Exception as error:  # the loop logs it, and voids the round
                last = delivery.fail(error)
            self._busy_s[number] += time.perf_counter() - began
            if last:
                self._return(delivery)
            # These names would keep the job's memory alive while the thread waits for more work.
            del work, delivery, part

    def _return(self, delivery: Delivery) -> None:
        assert self._loop is not None
        with self._lock:
            self._results.append(delivery)
            sent_before, self._wake_sent = self._wake_sent, True
        # Waking the loop writes to a pipe, and small chunks end by the thousand: one wake-up is for
        # all that is done until the loop runs.
        if not sent_before:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for this
                self._loop.call_soon_threadsafe(self._collect)

    def _collect(self) -> None:
        with self._lock:
            # Both at once: a result appended after this wakes the loop again.
            results, self._results = self._results, deque()
            self._wake_sent = False
        for delivery in results:
            self._done(delivery)
