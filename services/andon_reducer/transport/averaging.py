"""Averaging: jobs in threads, and the messages that their averages leave in.

The event loop makes a delivery of each job and hands its parts to threads. The thread that does the
last part frames the messages, and the loop sends them. Two queues lie between: parts to the
threads, deliveries back to the loop.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import numpy as np

from andon.protocol.messages import AveragedBlock, BlockFault, BlockFaultKind, RoundAborted, Slice
from andon.wire.frames import frame_response, split_response
from andon_reducer.core.jobs import Job, pieces_of, reduce_chunk
from andon_reducer.core.mean import Memory, fresh
from andon_reducer.transport.arenas import AveragesMemory, StreamMemory
from andon_reducer.transport.loop_calls import LoopCalls
from andon_reducer.transport.reduce_stream import OutgoingMessage

__all__ = ["AveragingThreads", "Delivery", "fault_of_failed"]


class Delivery:
    """One job on its way: made by the loop, reduced in parts by threads, sent by the loop."""

    def __init__(
        self,
        job: Job,
        memories: Mapping[int, StreamMemory | None],
        lanes: Collection[int] = (),
        *,
        checksums: bool = False,
        lend: Memory = fresh,
        lasting: bool = False,
    ) -> None:
        """Delivers to the streams that are the keys; a stream without a memory gets bytes.

        Those in `lanes` get them over TCP lanes: the payload as it was made, behind its head.
        `lend` gives memory to make the average in. With `lasting` the payload must stay as it is
        for longer than the exchange: somebody listens on a lane.
        With `checksums` the bytes leave with checksums on every stream: a worker that does not know
        those fields skips them.
        """
        self.job = job
        self.fault: BlockFault | RoundAborted | None = None
        """Why there is no average: of all parts, the fault at the lowest element."""
        self.failure: Exception | None = None
        """What a part raised, if one did."""
        self._checksums = checksums
        self._lend = lend
        self._lasting = lasting
        self._places: dict[AveragesMemory, tuple[memoryview, Slice]] = {}
        """Where the average is written, and the slice for workers. Fixed once this is built."""
        self._memories: dict[int, AveragesMemory] = {}
        self._slice_frames: dict[AveragesMemory, bytes] = {}
        self._bytes_frame = b""
        self._lane_frame: tuple[bytes, memoryview | None] = b"", None
        for stream, memory in memories.items():
            if not job.to_memory or memory is None or not memory.mapped:
                continue
            averages = memory.averages
            if averages not in self._places:
                # Placed here, on the loop: jobs of one exchange get one generation, in the order of
                # exchanges.
                place = averages.place(job)
                if place is None:
                    continue
                self._places[averages] = place
            self._memories[stream] = averages
        self._lanes = frozenset(lanes) - self._memories.keys()
        self._sends_lanes = bool(self._lanes)
        self._sends_frames = len(self._memories) + len(self._lanes) < len(memories)
        # A message of bytes holds the whole average, so one thread makes all of it.
        self.parts = [job] if self._sends_frames or self._sends_lanes else pieces_of(job)
        """What threads do, in any order."""
        self._left = len(self.parts)
        self._lock = threading.Lock()
        """Guards `_left` and `fault`: several threads may end a part at once."""

    def reduce(self, part: Job) -> bool:
        """Does one part; runs on any thread. Returns whether it was the last one to be done."""
        start = part.encoding.payload_bytes(part.offset - self.job.offset)
        stop = start + part.encoding.payload_bytes(part.count)
        places = [view[start:stop] for view, _ in self._places.values()]
        answer = reduce_chunk(part, places[0] if places else None, self._lend)
        if isinstance(answer, AveragedBlock):
            # There are several memories if a stream was opened after the first average.
            for place in places[1:]:
                np.copyto(np.frombuffer(place, np.uint8), np.frombuffer(answer.payload, np.uint8))
            if self._sends_frames:
                self._bytes_frame = frame_response(answer, checksums=self._checksums)
            if self._sends_lanes:
                answer = self._lasting_of(part, answer)
                self._lane_frame = split_response(answer, checksums=self._checksums)
        return self._done(answer)

    def fail(self, error: Exception) -> bool:
        """Notes that a part raised. Returns whether it was the last one to be done."""
        self.failure = error
        # The other parts still run. They use the contributions and the shared memory, so the
        # delivery is returned only after the last of them.
        return self._done(None)

    def message_for(self, stream: int) -> OutgoingMessage:
        """The average as it goes to a stream."""
        if stream in self._lanes:
            head, payload = self._lane_frame
            return OutgoingMessage(head, self.job.id, payload=payload, on_lane=True)
        averages = self._memories.get(stream)
        if averages is None:
            return OutgoingMessage(self._bytes_frame, self.job.id)
        length = self._places[averages][1].length
        return OutgoingMessage(self._slice_frames[averages], self.job.id, length)

    def _lasting_of(self, part: Job, answer: AveragedBlock) -> AveragedBlock:
        # A lane sends the payload from where it lies. In shared memory it is written over by the
        # next exchange, for which no member waits until a listener has read this one.
        in_memory = self._places or any(each.slice for each in part.contributions)
        if not (self._lasting and in_memory):
            return answer
        copy = self._lend(answer.payload.nbytes)
        copy[:] = answer.payload
        return replace(answer, payload=copy)

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
            for averages, (_, slice_) in self._places.items():
                whole = answer.in_memory(self.job.offset, self.job.count, slice_)
                self._slice_frames[averages] = frame_response(whole)
        return True


QUICK_ELEMENTS = 2**16
"""So many elements, of all contributions together, are averaged in less time than it takes to wake
a thread and to be woken by it: a quarter of a mebibyte of float32, in 20 to 50 microseconds."""


class AveragingThreads:
    """Threads that reduce parts of deliveries. They belong to one event loop."""

    def __init__(self, count: int, done: Callable[[Delivery], None], calls: LoopCalls) -> None:
        """Starts `count` threads; `done` gets each delivery that is reduced, on the loop."""
        self._calls = calls
        self._done = done
        self._parts: queue.SimpleQueue[tuple[Delivery, Job] | None] = queue.SimpleQueue()
        self._busy_s = [0.0] * (count + 1)
        """How long each thread has computed, the loop's last. Each one writes its own, so there is
        no lock."""
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
        self._calls.attach()
        for part in delivery.parts:
            self._parts.put((delivery, part))

    def do_now(self, delivery: Delivery) -> bool:
        """Does a delivery that is too small to be worth a thread; False: it is not."""
        job = delivery.job
        if job.count * len(job.contributions) > QUICK_ELEMENTS:
            return False
        for part in delivery.parts:
            self._do(-1, delivery, part)
        return True

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
            if self._do(number, delivery, part):
                self._calls.call(self._done, delivery)
            # These names would keep the job's memory alive while the thread waits for more work.
            del work, delivery, part

    def _do(self, number: int, delivery: Delivery, part: Job) -> bool:
        """Does a part; returns whether it was the last one to be done."""
        began = time.perf_counter()
        try:
            return delivery.reduce(part)
        except Exception as error:  # the loop logs it, and voids the round
            return delivery.fail(error)
        finally:
            self._busy_s[number] += time.perf_counter() - began


def fault_of_failed(job: Job) -> BlockFault:
    """The fault of a job that raised: a step that can't be averaged stops the line.

    It names no rank: no rank is at fault.
    """
    return BlockFault(
        key=job.key,
        group=job.group,
        sequence=job.sequence,
        kind=BlockFaultKind.INCONSISTENT,
        block=job.block,
        element=job.offset,
        message=f"the reducer failed to average element {job.offset} of block {job.block}, through "
        "no worker's fault: its log says why",
    )
