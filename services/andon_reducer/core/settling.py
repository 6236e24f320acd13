"""Settling: complete chunks on their way out, as jobs and then as averages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from andon_reducer.core.jobs import Job
from andon_reducer.core.round import Round

__all__ = ["Entry", "Settling"]


@dataclass(slots=True)
class Entry:
    """A job, or its average once it is `averaged`."""

    job: Job
    round: Round
    held_bytes: int
    streams: list[int]
    """Where the average goes; then, who has not taken it yet."""
    averaged: bool = False


@dataclass(slots=True)
class Settling:
    """Everything of a run that is on its way out."""

    held_bytes: int = 0
    _entries: dict[int, Entry] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether anything is."""
        return bool(self._entries)

    def add(self, entry: Entry) -> None:
        """A job is to be done: its contributions are held, and its average will be."""
        self._entries[entry.job.id] = entry
        self.held_bytes += entry.held_bytes

    def __getitem__(self, job: int) -> Entry:
        """The entry of a job."""
        return self._entries[job]

    def average(self, entry: Entry, streams: Iterable[int]) -> None:
        """The job is done: from now on only its average is held, until `streams` took it."""
        entry.streams, entry.averaged = list(streams), True
        self.held_bytes -= entry.held_bytes
        entry.held_bytes = entry.job.answer_bytes
        self.held_bytes += entry.held_bytes

    def drop(self, entry: Entry) -> None:
        """Nothing is held for it any more."""
        del self._entries[entry.job.id]
        self.held_bytes -= entry.held_bytes

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
