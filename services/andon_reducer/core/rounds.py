"""Rounds: the reducer's core. It knows which stream and which job belong to which run."""

from __future__ import annotations

import itertools

from andon.protocol.messages import Abstain, BlockGradient
from andon.protocol.reasons import Reason
from andon_reducer.core.effects import Effect, Reduce, Refusal, RefuseStream
from andon_reducer.core.events import (
    Abstained,
    AverageSent,
    ChunkReduced,
    Event,
    GradientArrived,
    MemoryMapped,
    StreamEnded,
    StreamOpened,
)
from andon_reducer.core.exchange import held_bytes_of
from andon_reducer.core.run import Run
from andon_reducer.core.stream import Limits, Stream

__all__ = ["Rounds"]


class Rounds:
    """The rounds of all runs: `receive` is told what happened and says what to do."""

    def __init__(
        self,
        *,
        window_bytes: int,
        max_payload_bytes: int,
        chunk_elements: int | None = None,
        max_held_bytes: int = 2**62,
    ) -> None:
        """A reducer without streams.

        `core.run` says what `window_bytes` bounds, `core.stream` what the others do.
        """
        if window_bytes < 1:
            raise ValueError("a reducer's window has at least one byte")
        self._window_bytes = window_bytes
        self._limits = Limits(
            max_payload_bytes=max_payload_bytes,
            max_held_bytes=max_held_bytes,
            chunk_elements=chunk_elements,
        )
        self._ids = itertools.count(1)
        self._runs: dict[str, Run] = {}
        self._by_stream: dict[int, Run] = {}
        self._by_job: dict[int, Run] = {}

    @property
    def inflight_bytes(self) -> int:
        """What contributions, jobs and averages hold now, parked messages too."""
        return sum(run.inflight_bytes for run in list(self._runs.values()))

    def receive(self, event: Event, now: float) -> list[Effect]:
        """What to do about an event that happened at `now`, in seconds of a steady clock."""
        run = self._run_of(event)
        effects: list[Effect] = []
        match event:
            case StreamOpened(number, _, worker, latest_term):
                run.streams[number] = Stream(number, worker, latest_term)
            case MemoryMapped(number):
                run.streams[number].shared = True
            case GradientArrived(number, message) | Abstained(number, message):
                effects = self._arrived(run, run.streams[number], message, now)
            case ChunkReduced():
                effects = run.reduced(event, now)
            case AverageSent(number, job):
                effects = run.sent(run.streams[number], job, now)
            case StreamEnded(number):
                effects = run.end(run.streams[number], now)
        for effect in effects:
            if isinstance(effect, Reduce):
                self._by_job[effect.job.id] = run
        if run.over:
            del self._runs[run.id]
        return effects

    def _beyond_memory(self, message: BlockGradient | Abstain) -> Refusal | None:
        if isinstance(message, Abstain):
            return None
        runs = self._runs.values()
        held_bytes = self.inflight_bytes + sum(run.remembered_bytes for run in runs)
        if held_bytes + held_bytes_of(message) <= self._limits.max_held_bytes:
            return None
        text = (
            f"the reducer holds {held_bytes} bytes and may hold {self._limits.max_held_bytes}: "
            "the operator may raise --max-held-bytes"
        )
        return Refusal(Reason.MEMORY_LIMIT, text)

    def _run_of(self, event: Event) -> Run:
        match event:
            case StreamOpened(number, run_id):
                assert number not in self._by_stream, "a stream's number is never used twice"
                run = self._runs.get(run_id)
                if run is None:
                    run = self._runs[run_id] = Run(
                        run_id, self._window_bytes, self._limits.chunk_elements, self._ids
                    )
                self._by_stream[number] = run
                return run
            case ChunkReduced(job):
                return self._by_job.pop(job)
            case StreamEnded(number):
                return self._by_stream.pop(number)
            case _:
                return self._by_stream[event.stream]

    def _arrived(
        self, run: Run, stream: Stream, message: BlockGradient | Abstain, now: float
    ) -> list[Effect]:
        assert stream.parked is None, "a paused stream is not read"
        refusal = stream.refusal(message, self._limits) or self._beyond_memory(message)
        if refusal is not None:
            return [RefuseStream(stream.number, refusal)]
        if isinstance(message, BlockGradient):
            return run.contribute(stream, message, now)
        return run.abstain(stream, message, now)
