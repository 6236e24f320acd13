"""Events that the streams' threads hand to the training thread, through the inbox."""

from __future__ import annotations

from dataclasses import dataclass

from andon.protocol.halts import HaltEvidence
from andon.protocol.records import Cursor, Key, PositionRange, Record, accuracy_of
from andon.protocol.reducers import ReducerShare

__all__ = [
    "Assigned",
    "AveragesComplete",
    "Committed",
    "ControlLost",
    "Dismissed",
    "Event",
    "ExchangeFailed",
    "Halted",
    "LeaveWanted",
    "Neighbours",
    "Resumed",
    "ScalarAllReduceDone",
    "TransferAsked",
    "Voided",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """Who stands beside this rank of a ring; see `andon.v1.RingNeighbours`."""

    address: str
    """Where the next rank listens, as host:port."""
    token: bytes
    """What this rank shows to the next one."""
    expected_token: bytes
    """What the rank before must show to this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """A share of one step; see `andon.v1.ShardAssignment`."""

    key: Key
    parent: Key | None
    roster: tuple[int, ...]
    rank: int
    world_size: int
    step: int
    attempt: int
    epoch: int
    positions: tuple[PositionRange, ...]
    batch: PositionRange
    reducers: tuple[ReducerShare, ...] = ()
    """Who averages what; empty is as told at the join."""
    ring: Neighbours | None = None
    """Set if the line's topology is a ring."""
    writes_checkpoint: bool = False
    """Whether this worker writes the checkpoint that the step may make due."""
    checkpoint_step: int = 0
    """The step of the last checkpoint that the line knows of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A record is durable. `loss`, `samples` and `correct` are the whole roster's."""

    record: Record
    loss: float = 0.0
    samples: int = 0
    correct: int | None = None
    """Samples that the models got right; None unless every worker counts them."""
    stop_reason: str = ""

    @property
    def accuracy(self) -> float | None:
        """How many of the samples that is, from 0 to 1."""
        return accuracy_of(self.correct, self.samples)


@dataclass(frozen=True, slots=True)
class Voided:
    """A round is void; a new assignment follows."""

    key: Key
    message: str


@dataclass(frozen=True, slots=True)
class Halted:
    """The line stopped."""

    evidence: HaltEvidence


@dataclass(frozen=True, slots=True)
class Resumed:
    """The halt is answered."""

    halt_id: int


@dataclass(frozen=True, slots=True)
class Dismissed:
    """The run is over for this worker; `stop_reason` if it is so for everybody."""

    message: str
    stop_reason: str = ""


@dataclass(frozen=True, slots=True)
class LeaveWanted:
    """This process was told to terminate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferAsked:
    """State is to be sent (`sends`) or received, of the head `head`."""

    transfer_id: int
    head: Key
    sends: bool
    step: int
    cursor: Cursor
    address: str = ""
    """The reducer that it goes through; empty is the coordinator's own address."""


@dataclass(frozen=True, slots=True)
class ScalarAllReduceDone:
    """The average of a scalar all-reduce."""

    head: Key | None
    sequence: int
    value: float
    weight: float
    contributors: int


@dataclass(frozen=True, slots=True)
class ControlLost:
    """The control stream `stream` ended: join again, unless `refusal` says that it is no use."""

    stream: int
    message: str
    refusal: Exception | None = None


@dataclass(frozen=True, slots=True)
class AveragesComplete:
    """Every average of the round is here."""

    key: Key
    total_weight: float
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeFailed:
    """The round can't be finished; `kind` is a name of `andon.v1.FaultKind`."""

    key: Key
    kind: str
    message: str
    rank: int | None = None
    block: int | None = None
    element: int = 0
    value: str = ""
    greatest: Key | None = None


Event = (
    Assigned
    | Committed
    | Voided
    | Halted
    | Resumed
    | Dismissed
    | LeaveWanted
    | TransferAsked
    | ScalarAllReduceDone
    | ControlLost
    | AveragesComplete
    | ExchangeFailed
)
