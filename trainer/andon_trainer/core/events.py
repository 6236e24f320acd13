"""Events: what the streams' threads put into the inbox for the training thread."""

from __future__ import annotations

from dataclasses import dataclass, field

from andon.protocol.halts import HaltEvidence
from andon.protocol.records import Cursor, Key, Record, accuracy_of
from andon.protocol.reducers import ReducerShare
from andon.protocol.rounds import RankTerms
from andon_trainer.core.reports import WrittenCheckpoint

__all__ = [
    "Assigned",
    "AveragesComplete",
    "Committed",
    "ControlLost",
    "Dismissed",
    "Event",
    "ExchangeFailed",
    "Halted",
    "LearningAsked",
    "LeaveWanted",
    "LeftOut",
    "ListeningLost",
    "Neighbours",
    "Resumed",
    "ScalarAllReduceDone",
    "TransferAsked",
    "Voided",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """The ranks before and after this one on a ring; see `andon.v1.RingNeighbours`."""

    address: str
    """Where the next rank listens, as host:port."""
    token: bytes
    """This rank proves itself to the next one with it."""
    expected_token: bytes
    """The rank before must prove itself to this one with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned(RankTerms):
    """This worker's share of one step; see `andon.v1.ShardAssignment`."""

    ring: Neighbours | None = None
    """Set if the line is a ring."""
    itemises_own: bool = False
    """Whether its own grains are attested with all components' hashes, as in an audit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A record is durable. `loss`, `samples` and `correct` count the whole roster."""

    record: Record
    loss: float = 0.0
    samples: int = 0
    correct: int | None = None
    """Samples that were predicted correctly; None unless every worker counts them."""
    stop_reason: str = ""
    pacing: bytes = field(default=b"", repr=False)
    """What the coordinator measured, for the one that comes after it."""
    overflow: bool = False
    """Whether some worker's scaled gradients overflowed, so that no weight moves."""
    gradient_scale: float = 1.0
    """What the averaged gradients are multiplied with before the optimizer."""
    next: Assigned | None = None
    """This worker's share of the next step, if it asked for it with its report of this one."""

    @property
    def epoch(self) -> int:
        """The epoch of the step's samples: no step goes beyond the end of one."""
        after = self.record.cursor
        return after.epoch if after.position else max(0, after.epoch - 1)

    @property
    def accuracy(self) -> float | None:
        """The share of samples predicted correctly, from 0 to 1."""
        return accuracy_of(self.correct, self.samples)


@dataclass(frozen=True, slots=True)
class Voided:
    """A round is void. A new assignment follows."""

    key: Key
    message: str


@dataclass(frozen=True, slots=True)
class Halted:
    """The line was halted."""

    evidence: HaltEvidence


@dataclass(frozen=True, slots=True)
class Resumed:
    """The halt was answered: the line goes on."""

    halt_id: int


@dataclass(frozen=True, slots=True)
class Dismissed:
    """The run is over for this worker. With a `stop_reason` it is over for everybody.

    With `keep_state` nobody else holds the line's state, so this worker writes a checkpoint first.
    """

    message: str
    stop_reason: str = ""
    keep_state: bool = False


@dataclass(frozen=True, slots=True)
class LeaveWanted:
    """This process was asked to terminate. The event only ends a wait: see `Leaving`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferAsked:
    """This worker is to send (`sends`) or receive the line's state at `head`."""

    transfer_id: int
    head: Key
    sends: bool
    step: int
    cursor: Cursor
    address: str = ""
    """The reducer that relays it; empty: the one at the coordinator's own address."""
    beside_training: bool = False
    """Whether rounds run meanwhile: the receiver learns, and the sender trains on."""
    checkpoint: WrittenCheckpoint | None = None
    """Where this worker reads the state from, if nobody sends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningAsked:
    """This worker is to learn the line's state while the line trains."""

    reducers: tuple[ReducerShare, ...] = ()
    """The map of reducers to listen at; empty: that of the answer to Join."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Round `key` goes on without this worker, which is late; it hears all averages from now on."""

    key: Key


@dataclass(frozen=True, slots=True)
class ListeningLost:
    """Averages of some round will be missing, so that what was heard is of no use any more."""

    message: str


@dataclass(frozen=True, slots=True)
class ScalarAllReduceDone:
    """A scalar all-reduce is complete."""

    head: Key | None
    sequence: int
    value: float
    weight: float
    contributors: int
    data: tuple[bytes, ...] = ()
    """What each of them gave; empty if none gave any."""


@dataclass(frozen=True, slots=True)
class ControlLost:
    """Control stream `stream` ended. Joining again helps unless there is a `refusal`."""

    stream: int
    message: str
    refusal: Exception | None = None


@dataclass(frozen=True, slots=True)
class AveragesComplete:
    """All averages of the present exchange are here."""

    key: Key
    total_weight: float
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeFailed:
    """The round can't be finished. `kind` is a name of `andon.v1.FaultKind`."""

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
    | LearningAsked
    | LeftOut
    | ListeningLost
    | ScalarAllReduceDone
    | ControlLost
    | AveragesComplete
    | ExchangeFailed
)
