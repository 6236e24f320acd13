"""Messages of the data plane as plain values, which `andon.wire.frames` reads and writes.

Attributes have the names and types of the fields in `reducer.proto` and `ring.proto`; only `offset`
and `count` are `element_offset` and `element_count` there. `andon.wire.converter` relies on that.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from andon.protocol.encoding import Encoding
from andon.protocol.grains import Node
from andon.protocol.records import Key

__all__ = [
    "Abstain",
    "AveragedBlock",
    "BlockFault",
    "BlockFaultKind",
    "BlockGradient",
    "CorruptChunk",
    "EnterRound",
    "LaneReport",
    "OpenRound",
    "Operation",
    "PassMessage",
    "Request",
    "Response",
    "RingChunk",
    "RingHeader",
    "RingStage",
    "RoundAborted",
    "RoundOpened",
    "SharedMemoryMapped",
    "SharedMemoryOffer",
    "Slice",
    "StaleRound",
    "TcpOffer",
    "TreeNode",
]

_NO_BYTES = memoryview(b"")


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
    TRIMMED_MEAN = 10

    @property
    def is_mean(self) -> bool:
        """Whether it is a mean of the contributions, all of them or those that are kept."""
        return self in (Operation.WEIGHTED_MEAN, Operation.TRIMMED_MEAN)


class BlockFaultKind(enum.Enum):
    """What is wrong with a contribution; values are those of `andon.v1.BlockFaultKind`."""

    NON_FINITE = 1
    NON_FINITE_AVERAGE = 2
    ENCODING_OVERFLOW = 3
    INCONSISTENT = 4


@dataclass(frozen=True, slots=True)
class SharedMemoryOffer:
    """A file of the shared folder that both ends may map, and where in it the nonce lies."""

    name: str
    size_bytes: int
    nonce_offset: int


@dataclass(frozen=True, slots=True)
class TcpOffer:
    """A port beside a call of gRPC, on the same host, and the nonce that its clients must prove."""

    port: int
    nonce: bytes = field(repr=False)
    reports: bool = False
    """Whether the call's server answers ReportLanes."""
    connections: int = 0
    """How many connections of each direction it takes; 0 and 1: one."""
    adaptive: bool = False
    """Whether the client begins with one, and adds others while they raise the rate; else it opens
    all of them at once."""


@dataclass(frozen=True, slots=True)
class LaneReport:
    """The TCP lanes of a call as its server sees them; bytes are those of frames."""

    received_bytes: int
    """What came of its client, parts of frames too."""
    reading: bool
    """Whether the server waits for more of it."""
    sent_bytes: int
    """The size of all frames that the server has begun to send."""
    connections: int = 0
    """On how many connections the server would send; 0: on those that there are."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Bytes of shared memory; `generation` counts the sender's exchanges in it, from 1."""

    offset: int
    length: int
    generation: int


@dataclass(frozen=True, slots=True)
class OpenRound:
    """The first message of a stream to a reducer."""

    run_id: str
    worker: int
    session_token: bytes = field(repr=False)
    capabilities: tuple[str, ...] = ()
    block_elements: tuple[int, ...] = ()
    """The elements of each block, if the worker asks for shared memory."""
    shared_folder: bytes = b""
    """The identity of the folder that this worker can share, if it asks for shared memory."""
    listens: bool = False
    """Whether the stream only takes averages, and brings nothing."""
    contribution_areas: int = 0
    """How many contributions to one exchange the worker may have in shared memory; 0: one."""


@dataclass(frozen=True, slots=True)
class SharedMemoryMapped:
    """The worker has mapped the offered memory, and found these nonces there."""

    contributions_nonce: bytes
    averages_nonce: bytes


@dataclass(frozen=True, slots=True)
class TreeNode:
    """Which node of the tree over a batch's grains the numbers are the sum of."""

    first: int
    """Its first grain."""
    grains: int
    batch_grains: int
    """Those of the whole batch."""
    grain: int
    """Positions of a grain."""

    def __post_init__(self) -> None:
        """Refuses a node beyond the batch, and grains of no positions."""
        if not (0 < self.grains <= self.batch_grains - self.first and self.grain > 0):
            raise ValueError(f"no node of a batch: {self}")

    @property
    def node(self) -> Node:
        """Its place in the tree."""
        return Node(self.first, self.first + self.grains)

    @property
    def tree(self) -> tuple[int, int]:
        """What is the same for all nodes of an exchange: the batch's grains, and their size."""
        return self.batch_grains, self.grain


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGradient:
    """One worker's contribution to `count` elements of a block, from element `offset` on.

    Its numbers are in `payload`, or in shared memory at `slice`.
    """

    key: Key
    rank: int
    world_size: int
    block: int
    offset: int
    count: int
    weight: float
    payload: memoryview = _NO_BYTES
    encoding: Encoding = Encoding.FLOAT32
    answer_encoding: Encoding | None = None
    group: int = 0
    sequence: int = 0
    operation: Operation = Operation.WEIGHTED_MEAN
    slice: Slice | None = None
    crc32c: int | None = None
    """The checksum that came with it; None if none did, and when it is sent."""
    node: TreeNode | None = None
    """The node whose sum it is; None: it is the rank's mean."""

    def resolved(self, payload: memoryview) -> BlockGradient:
        """The same contribution with the bytes of its slice, which need no checksum."""
        # Not by `replace`, which takes five times as long; so does each message of a small step.
        return BlockGradient(
            key=self.key, rank=self.rank, world_size=self.world_size, block=self.block,
            offset=self.offset, count=self.count, weight=self.weight, payload=payload,
            encoding=self.encoding, answer_encoding=self.answer_encoding, group=self.group,
            sequence=self.sequence, operation=self.operation, slice=self.slice, node=self.node,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Abstain:
    """A rank contributes nothing to a whole exchange: weight 0."""

    key: Key
    rank: int
    world_size: int
    group: int = 0
    sequence: int = 0


Request = OpenRound | BlockGradient | Abstain | SharedMemoryMapped


@dataclass(frozen=True, slots=True)
class RoundOpened:
    """The answer to OpenRound."""

    capabilities: tuple[str, ...]
    max_payload_bytes: int
    contributions: SharedMemoryOffer | None = None
    averages: SharedMemoryOffer | None = None
    shared_memory_refused: str = ""
    """Why the reducer does not offer shared memory that the worker asked for."""
    tcp: TcpOffer | None = None
    """Where the stream may go on over plain TCP; None: nowhere."""


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
    payload: memoryview = _NO_BYTES
    encoding: Encoding = Encoding.FLOAT32
    group: int = 0
    sequence: int = 0
    operation: Operation = Operation.WEIGHTED_MEAN
    slice: Slice | None = None
    crc32c: int | None = None
    """The checksum that came with it; None if none did, and when it is sent."""

    def in_memory(self, offset: int, count: int, place: Slice) -> AveragedBlock:
        """What tells of `count` elements from `offset` on, made in parts, that lie in memory."""
        # Not by `replace`: see `BlockGradient.resolved`.
        return AveragedBlock(
            key=self.key, block=self.block, offset=offset, count=count,
            total_weight=self.total_weight, contributors=self.contributors,
            world_size=self.world_size, encoding=self.encoding, group=self.group,
            sequence=self.sequence, operation=self.operation, slice=place,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFault:
    """A contribution that must not be averaged; the round is void.

    `rank` is None if no single rank is at fault.
    """

    key: Key
    kind: BlockFaultKind
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
class CorruptChunk:
    """A chunk that does not match its checksum: its sender, and its first element in its block."""

    rank: int
    block: int
    element: int


@dataclass(frozen=True, slots=True)
class RoundAborted:
    """The round is void at this reducer: a stream of it ended, or a chunk was corrupted."""

    key: Key
    message: str
    corrupt: CorruptChunk | None = None


Response = RoundOpened | AveragedBlock | BlockFault | StaleRound | RoundAborted


class RingStage(enum.Enum):
    """What the numbers of a ring's chunk are; values are those of `andon.v1.RingStage`."""

    CONTRIBUTION = 1
    PARTIAL_SUM = 2
    AVERAGE = 3
    BROADCAST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EnterRound:
    """The first message of a round on a stream; `rank` is the sender's."""

    key: Key
    rank: int
    world_size: int
    token: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RingHeader:
    """What one rank contributes to an exchange. It goes around the ring once, before the chunks."""

    key: Key
    rank: int
    weight: float
    sequence: int = 0
    operation: Operation | None = None
    first_block: int = 0
    stop_block: int = 0
    data_bytes: int = 0
    data_head: bytes = b""
    crc32c: bool = False
    """Whether each chunk that this rank makes has a checksum."""

    @property
    def agreed_fields(self) -> tuple[object, ...]:
        """The fields that must be the same for all ranks."""
        blocks = (self.first_block, self.stop_block)
        return self.operation, blocks, self.data_bytes, self.data_head


@dataclass(frozen=True, slots=True, kw_only=True)
class RingChunk:
    """`count` elements of a block, from element `offset` on."""

    key: Key
    stage: RingStage
    block: int
    offset: int
    count: int
    payload: memoryview
    encoding: Encoding = Encoding.FLOAT32
    sequence: int = 0
    crc32c: int | None = None
    """The checksum that came with it; None if none did, and when it is sent."""


PassMessage = EnterRound | RingHeader | RingChunk
