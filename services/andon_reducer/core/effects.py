"""Effects: what the reducer's core wants done, in this order; and the observer of what was done.

The core returns effects, and the adapter in `transport` carries them out. What is worth counting
goes to an observer, which `telemetry` implements.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from andon.protocol.messages import AveragedBlock, BlockFault, RoundAborted, StaleRound
from andon.protocol.reasons import Reason
from andon.protocol.records import Key
from andon_reducer.core.jobs import Job

__all__ = [
    "CallRefusal",
    "DataPath",
    "Direction",
    "Effect",
    "FreeRound",
    "Notice",
    "PauseStream",
    "Reduce",
    "ReducerObserver",
    "RefuseStream",
    "ResumeStream",
    "RoundOutcome",
    "SendAverage",
    "SendNotice",
]


@dataclass(frozen=True, slots=True)
class CallRefusal:
    """Why a call is ended, for a program and for people."""

    reason: Reason
    message: str


class RoundOutcome(enum.Enum):
    """How a round ended here."""

    __hash__ = object.__hash__  # See `Encoding`.

    FINISHED = "finished"
    """Every chunk that came was averaged."""
    FAULTED = "faulted"
    """A contribution must not be averaged."""
    ABORTED = "aborted"
    """One of its streams ended."""
    CORRUPT = "corrupt"
    """A contribution does not match its checksum."""
    SUPERSEDED = "superseded"
    """A greater key came while chunks were incomplete."""


Notice = AveragedBlock | BlockFault | StaleRound | RoundAborted
"""A message without a payload."""


@dataclass(frozen=True, slots=True)
class Reduce:
    """Do a job's arithmetic, for an average that goes to `streams`; then report ChunkReduced."""

    job: Job
    streams: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SendAverage:
    """Send a job's average to streams, and report AverageSent as each one takes it."""

    job: int
    streams: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendNotice:
    """Send a small message to streams."""

    streams: tuple[int, ...]
    notice: Notice
    job: int | None = None
    """Report AverageSent with this number as each one takes it; None: report nothing."""


@dataclass(frozen=True, slots=True)
class RefuseStream:
    """End a stream with an error, then report ReduceStreamEnded."""

    stream: int
    refusal: CallRefusal


@dataclass(frozen=True, slots=True)
class PauseStream:
    """Stop reading a stream."""

    stream: int


@dataclass(frozen=True, slots=True)
class ResumeStream:
    """Read a paused stream again."""

    stream: int


@dataclass(frozen=True, slots=True)
class FreeRound:
    """A round is over here; nothing of it is held any more.

    `exchange_seconds` has one entry for each exchange of a finished round: from its first message
    to its last average.
    """

    run_id: str
    key: Key
    outcome: RoundOutcome
    exchange_seconds: tuple[float, ...] = ()
    fault: BlockFault | None = None
    """What was wrong, of a faulted round."""
    senders: tuple[tuple[int, int], ...] = ()
    """Of a faulted round: ranks, and the workers that sent as them, by their session tokens."""


Effect = Reduce | SendAverage | SendNotice | RefuseStream | PauseStream | ResumeStream | FreeRound


class Direction(enum.Enum):
    """Which way bytes went: `up` from a worker, `down` to one."""

    __hash__ = object.__hash__  # See `Encoding`.

    UP = "up"
    DOWN = "down"


class DataPath(enum.Enum):
    """How bytes went."""

    __hash__ = object.__hash__  # See `Encoding`.

    WIRE = "wire"
    SHARED_MEMORY = "shared-memory"
    TCP = "tcp"


class ReducerObserver(Protocol):
    """Counts what happens. No method may fail or wait: they are called between two effects."""

    def moved(self, direction: Direction, size_bytes: int, path: DataPath = DataPath.WIRE) -> None:
        """A chunk, or a piece of state, came or left: over gRPC, over TCP lanes, or in shared
        memory."""

    def relayed(self, size_bytes: int) -> None:
        """A piece of state was received by a newcomer; `moved` counts it too."""

    def freed(self, effect: FreeRound) -> None:
        """A round is over."""

    def refused(self, reason: Reason) -> None:
        """A call was ended with an error."""

    def opened(self) -> None:
        """A stream was opened."""

    def closed(self) -> None:
        """A stream is over."""
