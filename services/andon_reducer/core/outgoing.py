"""Outgoing chunks: complete chunks, until every recipient took the average.

Theory of operation. A complete chunk is no longer part of its round. Its job is *open* until a
thread has done it. Then its average is sent, and held until every stream has taken it. Both are
charged to the run's window, so that averages which nobody reads stop the uploads.

A listener must stop nobody. So an average that only listeners have not taken yet is charged to them
alone (`core.listeners`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from andon.protocol.records import Key
from andon_reducer.core.exchange import OVERHEAD_BYTES
from andon_reducer.core.jobs import Job
from andon_reducer.core.round import ReducerRound

__all__ = ["OutgoingChunk", "OutgoingChunks"]


@dataclass(slots=True, eq=False)
class OutgoingChunk:
    """A complete chunk, until every recipient took its average or the average is given up."""

    id: int
    """Of its job."""
    round: ReducerRound
    held_bytes: int
    """Of its contributions and its average; once it is averaged, of its average alone."""
    streams: list[int]
    """Its recipients; once it is averaged, those that have not taken the average yet."""
    job: Job | None
    """None once it is averaged: that frees the contributions while the average is still sent."""
    listeners: set[int] = field(default_factory=set)
    """Once it is averaged, the streams that listen and have not taken the average yet."""

    @property
    def awaited(self) -> bool:
        """Whether the window is charged for it."""
        return self.job is not None or bool(self.streams)

    @property
    def exchange(self) -> tuple[Key, int]:
        """Its exchange, in the order of exchanges."""
        assert self.job is not None, "asked for open jobs only"
        return self.job.key, self.job.sequence


class OutgoingChunks:
    """All complete chunks of a run that are on their way out.

    A job may write to shared memory. The jobs of an older exchange, void or not, write to the same
    places. So a job waits until no job of an older exchange is open.
    """

    def __init__(self) -> None:
        """None are."""
        self.held_bytes = 0
        """Charged to the window."""
        self.listened_bytes = 0
        """Of averages that only listeners have not taken yet."""
        self._chunks: dict[int, OutgoingChunk] = {}
        """By job."""
        self._open: dict[tuple[Key, int], int] = {}
        """By exchange, how many jobs that write to shared memory are not done yet."""
        self._waiting: list[OutgoingChunk] = []

    def __len__(self) -> int:
        """Number of chunks."""
        return len(self._chunks)

    def __getitem__(self, job: int) -> OutgoingChunk:
        """The chunk of a job."""
        return self._chunks[job]

    def add(self, chunk: OutgoingChunk) -> bool:
        """Adds a chunk.

        Returns:
            Whether its job may begin now; if not, `startable` will return it.
        """
        assert chunk.job is not None, "it is not averaged yet"
        self._chunks[chunk.id] = chunk
        self.held_bytes += chunk.held_bytes
        if not chunk.job.to_memory:
            return True
        exchange = chunk.exchange
        self._open[exchange] = self._open.get(exchange, 0) + 1
        if min(self._open) == exchange:
            return True
        self._waiting.append(chunk)
        return False

    def startable(self) -> list[OutgoingChunk]:
        """The chunks that waited, and whose jobs may begin now. Each is returned once."""
        if not self._waiting:
            return []
        oldest = min(self._open)
        free = [chunk for chunk in self._waiting if chunk.exchange == oldest]
        self._waiting = [chunk for chunk in self._waiting if chunk.exchange != oldest]
        return free

    def add_empty(self, job: int, round_: ReducerRound, listeners: Iterable[int]) -> None:
        """Adds an average of nothing, as it goes to listeners."""
        # Members are not counted: each of these answers an Abstain of theirs.
        self._chunks[job] = OutgoingChunk(job, round_, OVERHEAD_BYTES, [], None, set(listeners))
        self.listened_bytes += OVERHEAD_BYTES

    def averaged(
        self, chunk: OutgoingChunk, streams: Iterable[int], listeners: Iterable[int] = ()
    ) -> None:
        """A chunk's job is done. From now on only its average is held, until all took it."""
        assert chunk.job is not None, "a job is done once"
        answer_bytes = chunk.job.answer_bytes
        # Before the job goes, which says what it wrote to and what its answer costs.
        self._close(chunk)
        self.held_bytes += answer_bytes - chunk.held_bytes
        chunk.held_bytes = answer_bytes
        chunk.streams, chunk.listeners = list(streams), set(listeners)
        chunk.job = None

    def drop(self, chunk: OutgoingChunk) -> None:
        """Gives a chunk up: nothing is held for it any more."""
        del self._chunks[chunk.id]
        if chunk.awaited:
            self.held_bytes -= chunk.held_bytes
        else:
            self.listened_bytes -= chunk.held_bytes
        if chunk.job is not None:
            self._close(chunk)

    def taken(self, chunk: OutgoingChunk, stream: int) -> None:
        """A stream took an average."""
        if stream in chunk.listeners:
            chunk.listeners.remove(stream)
        else:
            chunk.streams.remove(stream)
            if not chunk.awaited:
                self.held_bytes -= chunk.held_bytes
                self.listened_bytes += chunk.held_bytes
        if not (chunk.awaited or chunk.listeners):
            self.drop(chunk)

    def forget(self, stream: int) -> None:
        """A stream is over: it takes nothing more."""
        for chunk in list(self._chunks.values()):
            # An open job stays, also if all its recipients are gone: a thread may be writing.
            if chunk.job is None and (stream in chunk.streams or stream in chunk.listeners):
                self.taken(chunk, stream)

    def _close(self, chunk: OutgoingChunk) -> None:
        """A job is no longer open."""
        assert chunk.job is not None, "a job is closed once"
        if not chunk.job.to_memory:
            return
        left = self._open[chunk.exchange] - 1
        if left:
            self._open[chunk.exchange] = left
        else:
            del self._open[chunk.exchange]
