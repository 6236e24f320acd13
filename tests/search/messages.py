"""Messages of the model's own: what a worker does to the world, and what arrives at it."""

from __future__ import annotations

from dataclasses import dataclass

from andon.protocol.halts import HaltEvidence
from andon.protocol.messages import BlockFault, RoundAborted, StaleRound, TreeNode
from andon.protocol.records import Cursor, Key
from andon_coordinator.core import events as on
from andon_trainer.core.events import (
    Assigned,
    Committed,
    ControlLost,
    Dismissed,
    Halted,
    LearningAsked,
    LeftOut,
    Resumed,
    ScalarAllReduceDone,
    TransferAsked,
    Voided,
)
from search.numbers import Stream, Weights
from search.weights import Averages, Contribution

__all__ = [
    "Accepted",
    "Checkpoint",
    "Chunk",
    "CloseData",
    "CloseStream",
    "Down",
    "Lost",
    "Open",
    "OpenData",
    "Out",
    "Refused",
    "Released",
]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A worker's state at its head, on disk."""

    head: Key
    cursor: Cursor
    step: int
    weights: Weights
    scheduled: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """The coordinator's answer to Join."""

    in_sync: bool
    behind: bool
    head: Key | None
    term: int
    halt: HaltEvidence | None


@dataclass(frozen=True, slots=True)
class Refused:
    """The coordinator's other answer to Join."""

    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The data stream ended."""


@dataclass(frozen=True, slots=True)
class Released:
    """A worker that gave notice is sent away."""


@dataclass(frozen=True, slots=True)
class CloseStream:
    """Out: the worker closes its control stream."""


@dataclass(frozen=True, slots=True)
class Open:
    """Out: it opens a new control stream with a Join."""

    stream: Stream
    request: on.JoinRequest


@dataclass(frozen=True, slots=True)
class OpenData:
    """Out: it opens a data stream."""

    stream: Stream
    listens: bool = False


@dataclass(frozen=True, slots=True)
class CloseData:
    """Out: it closes its data stream."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Out: it sends one chunk of its gradients, or of a node's; without positions it abstains."""

    rank: int
    world_size: int
    offset: int
    contribution: Contribution
    node: TreeNode | None = None


Said = (
    on.WorkRequested
    | on.WorkerReady
    | on.FaultReported
    | on.StateReported
    | on.ListeningReported
    | on.WorkerComputed
    | on.NoticeGiven
    | on.ScalarAllReduceArrived
    | on.WorkerLeft
)
Out = Open | OpenData | CloseData | CloseStream | Chunk | Said
Down = (
    Assigned
    | Committed
    | Voided
    | Halted
    | Resumed
    | ScalarAllReduceDone
    | TransferAsked
    | LearningAsked
    | LeftOut
    | Dismissed
    | ControlLost
    | Averages | RoundAborted | StaleRound | BlockFault | Lost
)  # fmt: skip
