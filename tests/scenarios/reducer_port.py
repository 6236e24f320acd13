"""The reducer's core behind frames: it opens its streams again, and does its jobs at once.

Everything is the service's own code except gRPC and threads. Whatever raises, raises in the test.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from andon.protocol.messages import Abstain, BlockGradient
from andon.wire.fields import FrameError
from andon.wire.frames import frame_response, parse_requests, parse_response
from andon_reducer.core import effects as do
from andon_reducer.core import events as on
from andon_reducer.core.rounds import Rounds
from andon_reducer.core.stream import StreamState
from andon_reducer.transport.averaging import Delivery

__all__ = ["STREAMS", "WINDOW_BYTES", "ReducerPort"]

STREAMS = 4
WINDOW_BYTES = 2**14


class ReducerPort:
    """Four workers' streams: one that is ended opens again, and a paused one is not read. One more
    stream listens."""

    def __init__(self, **more: Any) -> None:
        self.rounds = Rounds(window_bytes=WINDOW_BYTES, max_payload_bytes=WINDOW_BYTES, **more)
        self.refusals: list[do.CallRefusal] = []
        self._opened = 0
        self._number: dict[int, int] = {}
        self._waiting: dict[int, deque[BlockGradient | Abstain]] = {}
        for worker in range(STREAMS):
            self._open(worker)
        # One more listens, and takes at once whatever comes.
        self._opened += 1
        listener = on.ReduceStreamOpened(self._opened, "run", STREAMS, listens=True)
        self.rounds.receive(listener, 0.0)

    def take(self, worker: int, data: bytes) -> None:
        """One message of a worker's stream, read as the service reads it."""
        try:
            messages = parse_requests(data)
        except FrameError:
            self._end(worker)
            return
        for message in messages:
            # The adapter checks slices and OpenRound, and the core never sees them.
            if isinstance(message, Abstain) or (
                isinstance(message, BlockGradient) and message.slice is None
            ):
                self._waiting[worker].append(message)
        self._read()

    def _read(self) -> None:
        """Reads whatever is not paused."""
        for worker in self._number:
            # A message may end any stream, and another one takes its place.
            while self._waiting[worker] and not self._stream(self._number[worker]).paused:
                number, message = self._number[worker], self._waiting[worker].popleft()
                if isinstance(message, Abstain):
                    self._report(on.Abstained(number, message))
                else:
                    self._report(on.GradientArrived(number, message))

    def _report(self, event: on.Event) -> None:
        pending = deque(self.rounds.receive(event, 0.0))
        while pending:
            match pending.popleft():
                case do.Reduce(job, streams):
                    delivery = Delivery(job, dict.fromkeys(streams))
                    assert all(delivery.reduce(part) for part in delivery.parts)
                    for stream in () if delivery.fault else streams:
                        parse_response(delivery.message_for(stream).frame)
                    pending += self.rounds.receive(on.ChunkReduced(job.id, delivery.fault), 0.0)
                case do.SendAverage(job_id, streams):
                    for stream in streams:
                        pending += self.rounds.receive(on.AverageSent(stream, job_id), 0.0)
                case do.SendNotice(streams, notice, job_id):
                    frame_response(notice)
                    if job_id is not None:
                        for stream in streams:
                            pending += self.rounds.receive(on.AverageSent(stream, job_id), 0.0)
                case do.RefuseStream(stream, refusal):
                    self.refusals.append(refusal)
                    worker = next(w for w, n in self._number.items() if n == stream)
                    self._end(worker)

    def _end(self, worker: int) -> None:
        number = self._number[worker]
        self._open(worker)
        self._report(on.ReduceStreamEnded(number))

    def _open(self, worker: int) -> None:
        self._opened += 1
        self._number[worker] = self._opened
        self._waiting[worker] = deque()
        self.rounds.receive(on.ReduceStreamOpened(self._opened, "run", worker), 0.0)

    def _stream(self, number: int) -> StreamState:
        return self.rounds._by_stream[number].streams[number]
