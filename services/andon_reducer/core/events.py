"""Events: what happened to the reducer, as its adapter reports it to the core.

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
    "ReduceStreamEnded",
    "ReduceStreamOpened",
]


@dataclass(frozen=True, slots=True)
class ReduceStreamOpened:
    """A worker whose token was verified opened a stream."""

    stream: int
    run_id: str
    worker: int
    latest_term: int = 2**64 - 1
    """Greater terms are refused: see `andon.protocol.records.latest_plausible_term`."""
    listens: bool = False
    """Whether it only listens: it gets averages, and brings nothing."""


@dataclass(frozen=True, slots=True)
class MemoryMapped:
    """A stream's worker has mapped shared memory: it may send slices, and gets them."""

    stream: int


@dataclass(frozen=True, slots=True)
class GradientArrived:
    """A stream brought one contribution. Never on a stream that is paused.

    The payload of a slice is a view of memory that the worker leaves as it is until the round is
    over.
    """

    stream: int
    gradient: BlockGradient


@dataclass(frozen=True, slots=True)
class Abstained:
    """A stream's rank has nothing for an exchange. Never on a stream that is paused."""

    stream: int
    abstain: Abstain


@dataclass(frozen=True, slots=True)
class ChunkReduced:
    """A job is done. With a `fault` there is no average, and the round is void."""

    job: int
    fault: BlockFault | RoundAborted | None = None


@dataclass(frozen=True, slots=True)
class AverageSent:
    """A stream took a job's average: its memory is no longer needed for that stream.

    Also reported of a notice that has a job's number.
    """

    stream: int
    job: int


@dataclass(frozen=True, slots=True)
class ReduceStreamEnded:
    """A stream is over, for whatever reason."""

    stream: int


Event = (
    ReduceStreamOpened
    | MemoryMapped
    | GradientArrived
    | Abstained
    | ChunkReduced
    | AverageSent
    | ReduceStreamEnded
)
