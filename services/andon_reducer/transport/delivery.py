"""Deliveries: how a job's average reaches those who get it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from andon.frames import frame_response
from andon.messages import AveragedBlock, BlockFault, Slice
from andon_reducer.core.jobs import Job, reduce_chunk
from andon_reducer.transport.arenas import AveragesMemory, Session

__all__ = ["Delivery"]

_NO_BYTES = memoryview(b"")


class Delivery:
    """One job's average on its way: made by the loop, worked on by a thread, sent by the loop."""

    def __init__(self, job: Job, sessions: Mapping[int, Session | None]) -> None:
        """For the streams that are the keys; a stream without a session gets bytes."""
        self.job = job
        self.fault: BlockFault | None = None
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

    def work(self) -> None:
        """Does the arithmetic and writes the messages; what a thread does."""
        places = list(self._places.values())
        answer = reduce_chunk(self.job, places[0][0] if places else None)
        if isinstance(answer, BlockFault):
            self.fault = answer
            return
        for view, _ in places[1:]:
            np.copyto(np.frombuffer(view, np.uint8), np.frombuffer(answer.payload, np.uint8))
        for memory, (_, slice_) in self._places.items():
            self._frames[memory] = frame_response(_in_place(answer, slice_))
        if self._framed:
            self._bytes = frame_response(answer)

    def frame_for(self, stream: int) -> tuple[bytes, int]:
        """The message for a stream, and how many bytes of shared memory it stands for."""
        memory = self._memories.get(stream)
        if memory is None:
            return self._bytes, 0
        return self._frames[memory], self._places[memory][1].length


def _in_place(answer: AveragedBlock, slice_: Slice) -> AveragedBlock:
    return replace(answer, payload=_NO_BYTES, slice=slice_)
