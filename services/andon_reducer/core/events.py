"""Events: what happened to the reducer, as its core is told.

A stream is named by a number that the adapter never uses twice. Times are not in events: `now` is
an argument of `Rounds.receive`.
"""

from __future__ import annotations

from dataclasses import dataclass

from andon.protocol.messages import Abstain, BlockFault, BlockGradient, RoundAborted

__all__ = [
    "Abstained",
    "AverageSent",
    "ChunkReduced",
    "Event",
    "GradientArrived",
    "MemoryMapped",
    "StreamEnded",
    "StreamOpened",
]


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """A worker whose token was verified opened a stream."""

    stream: int
    run_id: str
    worker: int
    latest_term: int = 2**64 - 1
    """No key of a greater term can come: see `andon.protocol.records.latest_plausible_term`."""


@dataclass(frozen=True, slots=True)
class MemoryMapped:
    """A stream's worker shares memory with the reducer: it may give slices, and gets them."""

    stream: int


@dataclass(frozen=True, slots=True)
class GradientArrived:
    """A stream brought one contribution. Never on a stream that is paused.

    The payload of a slice is a view of memory that stays as it is until the round is over.
    """

    stream: int
    gradient: BlockGradient


@dataclass(frozen=True, slots=True)
class Abstained:
    """A stream said that its rank has nothing for an exchange. Never on a paused stream."""

    stream: int
    abstain: Abstain


@dataclass(frozen=True, slots=True)
class ChunkReduced:
    """A job is done; `fault` if there is no average, and the round is void."""

    job: int
    fault: BlockFault | RoundAborted | None = None


@dataclass(frozen=True, slots=True)
class AverageSent:
    """A stream took a job's average: its memory is no longer needed for that stream."""

    stream: int
    job: int


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """A stream is over, for whatever reason."""

    stream: int


Event = (
    StreamOpened
    | MemoryMapped
    | GradientArrived
    | Abstained
    | ChunkReduced
    | AverageSent
    | StreamEnded
)
