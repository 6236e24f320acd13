"""Messages of the data plane as plain values: what `andon.frames` reads and writes."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from andon.encoding import Encoding
from andon.records import Key

__all__ = [
    "Abstain",
    "AveragedBlock",
    "BlockFault",
    "BlockGradient",
    "FaultyBlockKind",
    "OpenRound",
    "Operation",
    "Request",
    "Response",
    "RoundAborted",
    "RoundOpened",
    "StaleRound",
]


class Operation(enum.Enum):
    """What a round computes; values are those of `andon.v1.Operation`."""

    WEIGHTED_MEAN = 1
    SUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5
    BROADCAST = 6
    BAND = 7
    BOR = 8
    BXOR = 9


class FaultyBlockKind(enum.Enum):
    """What is wrong with a contribution; values are those of `andon.v1.BlockFaultKind`."""

    NON_FINITE = 1
    NON_FINITE_AVERAGE = 2
    ENCODING_OVERFLOW = 3
    INCONSISTENT = 4


@dataclass(frozen=True, slots=True)
class OpenRound:
    """The first message of a stream to a reducer."""

    run_id: str
    worker: int
    session_token: bytes
    capabilities: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGradient:
    """One worker's contribution to `count` elements of a block, from element `offset` on."""

    key: Key
    rank: int
    world_size: int
    block: int
    offset: int
    count: int
    weight: float
    payload: memoryview
    encoding: Encoding = Encoding.FLOAT32
    answer_encoding: Encoding | None = None
    group: int = 0
    sequence: int = 0
    operation: Operation = Operation.WEIGHTED_MEAN


@dataclass(frozen=True, slots=True, kw_only=True)
class Abstain:
    """A rank has nothing for a whole exchange: weight 0."""

    key: Key
    rank: int
    world_size: int
    group: int = 0
    sequence: int = 0


Request = OpenRound | BlockGradient | Abstain


@dataclass(frozen=True, slots=True)
class RoundOpened:
    """The answer to OpenRound."""

    capabilities: tuple[str, ...]
    max_payload_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragedBlock:
    """`count` elements of a block, reduced; no elements at all if every rank abstained."""

    key: Key
    block: int
    offset: int
    count: int
    total_weight: float
    contributors: int
    world_size: int
    payload: memoryview
    encoding: Encoding = Encoding.FLOAT32
    group: int = 0
    sequence: int = 0
    operation: Operation = Operation.WEIGHTED_MEAN


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFault:
    """A contribution that must not be averaged; the round is void. `rank` None: nobody's alone."""

    key: Key
    kind: FaultyBlockKind
    block: int
    element: int
    message: str
    rank: int | None = None
    value: str = ""
    group: int = 0
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class StaleRound:
    """The round is older than the greatest key that the reducer has seen."""

    key: Key
    greatest: Key


@dataclass(frozen=True, slots=True)
class RoundAborted:
    """The round is void here: one of its streams ended."""

    key: Key
    message: str


Response = RoundOpened | AveragedBlock | BlockFault | StaleRound | RoundAborted
