"""Settling: complete chunks on their way out, as jobs and then as averages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from andon.protocol.records import Key
from andon_reducer.core.jobs import Job
from andon_reducer.core.round import Round

__all__ = ["Entry", "Settling"]


@dataclass(slots=True)
class Entry:
    """A job, or its average once it is `averaged`: then the job has no contributions any more."""

    job: Job
    round: Round
    held_bytes: int
    streams: list[int]
    """Where the average goes; then, who has not taken it yet."""
    averaged: bool = False

    @property
    def exchange(self) -> tuple[Key, int]:
        """The exchange that the job is of, in the order of exchanges."""
        return self.job.key, self.job.sequence


@dataclass(slots=True)
class Settling:
    """Everything of a run that is on its way out.

    A job may write to shared memory, where a job of an older exchange, void or not, writes to the
    same places. So such a job waits until none of an older exchange is being done.
    """

    held_bytes: int = 0
    _entries: dict[int, Entry] = field(default_factory=dict)
    _open: dict[tuple[Key, int], int] = field(default_factory=dict)
    """Jobs to memory that are not done yet, by exchange."""
    _waiting: list[Entry] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether anything is."""
        return bool(self._entries)

    def add(self, entry: Entry) -> bool:
        """A job is to be done: its contributions are held, and its average will be.

        Returns:
            Whether it may be begun now; if not, `next` will say so.
        """
        self._entries[entry.job.id] = entry
        self.held_bytes += entry.held_bytes
        if not entry.job.to_memory:
            return True
        self._open[entry.exchange] = self._open.get(entry.exchange, 0) + 1
        free = min(self._open) == entry.exchange
        if not free:
            self._waiting.append(entry)
        return free

    def next(self) -> list[Entry]:
        """The jobs that waited and may be begun now."""
        if not self._waiting:
            return []
        oldest = min(self._open)
        free = [entry for entry in self._waiting if entry.exchange == oldest]
        self._waiting = [entry for entry in self._waiting if entry.exchange != oldest]
        return free

    def __getitem__(self, job: int) -> Entry:
        """The entry of a job."""
        return self._entries[job]

    def average(self, entry: Entry, streams: Iterable[int]) -> None:
        """The job is done: from now on only its average is held, until `streams` took it."""
        self._close(entry)
        entry.job = replace(entry.job, contributions=())
        entry.streams, entry.averaged = list(streams), True
        self.held_bytes -= entry.held_bytes
        entry.held_bytes = entry.job.answer_bytes
        self.held_bytes += entry.held_bytes

    def drop(self, entry: Entry) -> None:
        """Nothing is held for it any more."""
        del self._entries[entry.job.id]
        self.held_bytes -= entry.held_bytes
        if not entry.averaged:
            self._close(entry)

    def take(self, job: int, stream: int) -> None:
        """A stream took an average."""
        entry = self._entries[job]
        entry.streams.remove(stream)
        if not entry.streams:
            self.drop(entry)

    def forget(self, stream: int) -> None:
        """A stream is over: it takes nothing more."""
        for job, entry in list(self._entries.items()):
            if entry.averaged and stream in entry.streams:
                self.take(job, stream)

    def _close(self, entry: Entry) -> None:
        """A job is done."""
        if not entry.job.to_memory:
            return
        left = self._open[entry.exchange] - 1
        if left:
            self._open[entry.exchange] = left
        else:
            del self._open[entry.exchange]
