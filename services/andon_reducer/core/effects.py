"""Effects: what the reducer's core wants done, in this order."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from andon.protocol.messages import AveragedBlock, BlockFault, RoundAborted, StaleRound
from andon.protocol.reasons import Reason
from andon.protocol.records import Key
from andon_reducer.core.jobs import Job

__all__ = [
    "Effect",
    "FreeRound",
    "Notice",
    "PauseStream",
    "Reduce",
    "Refusal",
    "RefuseStream",
    "ResumeStream",
    "RoundOutcome",
    "SendAverage",
    "SendNotice",
]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a stream is ended, for a program and for people."""

    reason: Reason
    message: str


class RoundOutcome(enum.Enum):
    """How a round ended here."""

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
    """Do a job's arithmetic, for an average that goes to `streams`; then say ChunkReduced."""

    job: Job
    streams: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SendAverage:
    """Send a job's average to streams, and say AverageSent as each one takes it."""

    job: int
    streams: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendNotice:
    """Send a small message to streams."""

    streams: tuple[int, ...]
    notice: Notice


@dataclass(frozen=True, slots=True)
class RefuseStream:
    """End a stream with an error, then say StreamEnded."""

    stream: int
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class PauseStream:
    """Read nothing more from a stream."""

    stream: int


@dataclass(frozen=True, slots=True)
class ResumeStream:
    """Read on from a stream."""

    stream: int


@dataclass(frozen=True, slots=True)
class FreeRound:
    """A round is over here; nothing of it is held any more.

    `exchange_seconds` has one entry for each exchange of a finished round: from its first
    contribution to its last average.
    """

    run_id: str
    key: Key
    outcome: RoundOutcome
    exchange_seconds: tuple[float, ...] = ()


Effect = Reduce | SendAverage | SendNotice | RefuseStream | PauseStream | ResumeStream | FreeRound
