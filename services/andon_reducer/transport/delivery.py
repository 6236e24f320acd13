"""Deliveries: how a job's average reaches those who get it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from andon.protocol.messages import AveragedBlock, BlockFault, RoundAborted, Slice
from andon.wire.frames import frame_response
from andon_reducer.core.jobs import Job, pieces_of, reduce_chunk
from andon_reducer.transport.arenas import AveragesMemory, Session

__all__ = ["Delivery", "Piece"]

_NO_BYTES = memoryview(b"")


class Piece:
    """What one thread does of a delivery; made by the loop, worked on by a thread."""

    def __init__(self, delivery: Delivery, job: Job, places: Sequence[memoryview]) -> None:
        """The average is written to all places; without one, it is held."""
        self.delivery = delivery
        self._job = job
        self._places = places

    def work(self) -> bool:
        """Does the arithmetic, and frames what leaves as bytes; whether it was the last piece."""
        places = self._places
        answer = reduce_chunk(self._job, places[0] if places else None)
        if isinstance(answer, AveragedBlock):
            for place in places[1:]:
                np.copyto(np.frombuffer(place, np.uint8), np.frombuffer(answer.payload, np.uint8))
            self.delivery.frame(answer)
        return self.delivery.done(answer)

    def fail(self, error: Exception) -> bool:
        """Takes note that there is no average; whether it was the last piece."""
        self.delivery.failure = error
        return self.delivery.done(None)


class Delivery:
    """One job's average on its way: made by the loop, worked on in pieces, sent by the loop."""

    def __init__(
        self, job: Job, sessions: Mapping[int, Session | None], *, checksums: bool = False
    ) -> None:
        """For the streams that are the keys; a stream without a session gets bytes.

        With `checksums` bytes leave with theirs, on every stream: who does not know them skips
        them.
        """
        self.job = job
        self._checksums = checksums
        self.fault: BlockFault | RoundAborted | None = None
        """Why there is no average: of all pieces, the one at the lowest element."""
        self.failure: Exception | None = None
        """What a piece raised, if one did."""
        self._places: dict[AveragesMemory, tuple[memoryview, Slice]] = {}
        self._memories: dict[int, AveragesMemory] = {}
        self._frames: dict[AveragesMemory, bytes] = {}
        self._bytes = b""
        for stream, session in sessions.items():
            if not job.to_memory or session is None or not session.mapped:
                continue
            memory = session.averages
            if memory not in self._places:
                place = memory.place(job)
                if place is None:
                    continue
                self._places[memory] = place
            self._memories[stream] = memory
        self._framed = len(self._memories) < len(sessions)
        self._jobs = [job] if self._framed else pieces_of(job)
        self._left = len(self._jobs)
        self._lock = threading.Lock()

    def pieces(self) -> list[Piece]:
        """What is to be worked on, in any order.

        They know the delivery, and it does not know them: it is freed with the last of them.
        """
        return [Piece(self, part, self._views(part)) for part in self._jobs]

    def frame(self, answer: AveragedBlock) -> None:
        """Makes the message for those who get bytes, if anybody does."""
        if self._framed:
            self._bytes = frame_response(answer, checksums=self._checksums)

    def done(self, answer: AveragedBlock | BlockFault | RoundAborted | None) -> bool:
        """Takes a piece's answer; whether it was the last one. Any thread may call it."""
        with self._lock:
            if isinstance(answer, RoundAborted):
                self.fault = answer  # The only piece: what lies in shared memory has no checksum.
            elif isinstance(answer, BlockFault) and (
                not isinstance(self.fault, BlockFault) or answer.element < self.fault.element
            ):
                self.fault = answer
            self._left -= 1
            if self._left:
                return False
        if isinstance(answer, AveragedBlock):
            whole = replace(answer, offset=self.job.offset, count=self.job.count, payload=_NO_BYTES)
            for memory, (_, slice_) in self._places.items():
                self._frames[memory] = frame_response(replace(whole, slice=slice_))
        return True

    def frame_for(self, stream: int) -> tuple[bytes, int]:
        """The message for a stream, and how many bytes of shared memory it stands for."""
        memory = self._memories.get(stream)
        if memory is None:
            return self._bytes, 0
        return self._frames[memory], self._places[memory][1].length

    def _views(self, part: Job) -> list[memoryview]:
        """Where a part of the job goes."""
        start = (part.offset - self.job.offset) * part.encoding.itemsize
        stop = start + part.count * part.encoding.itemsize
        return [view[start:stop] for view, _ in self._places.values()]
