"""Rounds: the reducer's core. It knows to which run each stream and each job belongs."""

from __future__ import annotations

import itertools

from andon.protocol.messages import Abstain, BlockGradient
from andon.protocol.reasons import Reason
from andon_reducer.core.effects import CallRefusal, Effect, Reduce, RefuseStream
from andon_reducer.core.events import (
    Abstained,
    AverageSent,
    ChunkReduced,
    Event,
    GradientArrived,
    MemoryMapped,
    ReduceStreamEnded,
    ReduceStreamOpened,
)
from andon_reducer.core.exchange import held_bytes_of
from andon_reducer.core.listeners import Listeners
from andon_reducer.core.run import Run
from andon_reducer.core.stream import BRINGS_NOTHING, ChunkLimits, StreamState

__all__ = ["Rounds"]


class Rounds:
    """The rounds of all runs. `receive` takes what happened and returns what to do."""

    def __init__(
        self,
        *,
        window_bytes: int,
        max_payload_bytes: int,
        chunk_elements: int | None = None,
        max_held_bytes: int = 2**62,
        listener_bytes: int = 2**62,
    ) -> None:
        """A reducer without streams.

        `core.run` says what `window_bytes` bounds, `Listeners` what `listener_bytes` does, and
        `ChunkLimits` what the others do.
        """
        if window_bytes < 1:
            raise ValueError("a reducer's window has at least one byte")
        self._window_bytes = window_bytes
        self._listener_bytes = listener_bytes
        self._limits = ChunkLimits(
            max_payload_bytes=max_payload_bytes,
            max_held_bytes=max_held_bytes,
            chunk_elements=chunk_elements,
        )
        self._ids = itertools.count(1)
        self._runs: dict[str, Run] = {}
        self._by_stream: dict[int, Run] = {}
        self._by_job: dict[int, Run] = {}
        """Jobs that a Reduce was returned for, until their ChunkReduced."""

    @property
    def inflight_bytes(self) -> int:
        """What contributions, jobs and averages hold now, parked messages and listeners' too."""
        # A copy: this may be read on another thread while a run ends.
        return sum(run.inflight_bytes for run in list(self._runs.values()))

    def receive(self, event: Event, now: float) -> list[Effect]:
        """What to do about an event that happened at `now`, in seconds of a steady clock."""
        effects: list[Effect] = []
        match event:
            case ReduceStreamOpened():
                run = self._open(event)
            case MemoryMapped(number):
                run = self._by_stream[number]
                effects = self._mapped(run.streams[number])
            case GradientArrived(number, message) | Abstained(number, message):
                run = self._by_stream[number]
                effects = self._arrived(run, run.streams[number], message, now)
            case ChunkReduced(job):
                run = self._by_job.pop(job)
                effects = run.reduced(event, now)
            case AverageSent(number, job):
                run = self._by_stream[number]
                effects = run.sent(run.streams[number], job, now)
            case ReduceStreamEnded(number):
                run = self._by_stream.pop(number)
                effects = run.end(run.streams[number], now)
        for effect in effects:
            # Here, because any event may start a job: also one that waited for another job.
            if isinstance(effect, Reduce):
                self._by_job[effect.job.id] = run
        # Nothing is remembered of a run without streams, not even its greatest key. Workers that
        # come back have new keys, and memory for runs that never come back would only grow.
        if run.over:
            del self._runs[run.id]
        return effects

    def _open(self, event: ReduceStreamOpened) -> Run:
        number = event.stream
        assert number not in self._by_stream, "a stream's number is never used twice"
        run = self._runs.get(event.run_id)
        if run is None:
            run = self._runs[event.run_id] = Run(
                *(event.run_id, self._window_bytes, self._limits.chunk_elements, self._ids),
                Listeners(self._listener_bytes),
            )
        self._by_stream[number] = run
        run.open(StreamState(number, event.worker, event.latest_term, listens=event.listens))
        return run

    def _mapped(self, stream: StreamState) -> list[Effect]:
        if stream.listens:
            return [RefuseStream(stream.number, BRINGS_NOTHING)]
        stream.shared = True
        return []

    def _arrived(
        self, run: Run, stream: StreamState, message: BlockGradient | Abstain, now: float
    ) -> list[Effect]:
        assert stream.parked is None, "a paused stream is not read"
        refusal = stream.refusal(message, self._limits) or self._beyond_memory(message)
        if refusal is not None:
            return [RefuseStream(stream.number, refusal)]
        if isinstance(message, BlockGradient):
            return run.contribute(stream, message, now)
        return run.abstain(stream, message, now)

    def _beyond_memory(self, message: BlockGradient | Abstain) -> CallRefusal | None:
        """Refuses a contribution for which the reducer has no memory, all runs together.

        The window makes senders wait long before, so this is for many runs, or for gaps in the
        chunks of one: waiting would not end there.
        """
        if isinstance(message, Abstain):
            return None
        # A slow listener must not have the messages of others refused.
        held_bytes = sum(run.charged_bytes for run in self._runs.values())
        if held_bytes + held_bytes_of(message) <= self._limits.max_held_bytes:
            return None
        text = (
            f"the reducer holds {held_bytes} bytes and may hold {self._limits.max_held_bytes}: "
            "the operator may raise --max-held-bytes"
        )
        return CallRefusal(Reason.MEMORY_LIMIT, text)
