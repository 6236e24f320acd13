"""Calls that ranks of a session make together, and how their elements are divided among ranks.

docs/protocol-sessions.md, sections 28 and 29, is normative.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "EAGER_BYTES",
    "MAX_AHEAD",
    "MAX_PIECE_BYTES",
    "MAX_WORLD_SIZE",
    "SEGMENT_MULTIPLE",
    "Call",
    "CallKind",
    "PendingCall",
    "cut",
    "group_number",
    "sends_number",
]

MAX_WORLD_SIZE = 4096
"""The most ranks of a session."""
MAX_PIECE_BYTES = 4 * 2**20
"""The longest payload of one frame between two ranks."""
EAGER_BYTES = 64 * 2**10
"""What a rank gives to one other rank in stage 0 may follow its Begin at once up to this size."""
MAX_AHEAD = 64
"""The most eager calls, per group and peer, that a receiver keeps before it makes them itself."""
SEGMENT_MULTIPLE = 16
"""Segments start at a multiple of so many elements."""

_U32 = 2**32
_U64 = 2**64


class CallKind(enum.Enum):
    """What a call does; values are those of `andon.v1.CallKind`."""

    ALL_REDUCE = 1
    REDUCE = 2
    REDUCE_SCATTER = 3
    ALL_GATHER = 4
    GATHER = 5
    SCATTER = 6
    BROADCAST = 7
    ALL_TO_ALL = 8
    BARRIER = 9
    SEND = 10

    @property
    def label(self) -> str:
        """The kind as people write it, and as a metric's label: `all_reduce`."""
        return self.name.lower()

    @property
    def reduces(self) -> bool:
        """Whether inputs are reduced."""
        return self in _REDUCING

    @property
    def has_root(self) -> bool:
        """Whether one rank is the call's root."""
        return self in _ROOTED


_REDUCING = frozenset({CallKind.ALL_REDUCE, CallKind.REDUCE, CallKind.REDUCE_SCATTER})
_ROOTED = frozenset({CallKind.REDUCE, CallKind.GATHER, CallKind.SCATTER, CallKind.BROADCAST})


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call as every rank of its group must have made it.

    `count` is that of docs/protocol-sessions.md: for ALL_REDUCE, REDUCE and BROADCAST the elements
    of the input; for ALL_GATHER and GATHER those of one rank's input; for REDUCE_SCATTER and
    SCATTER those of one rank's output, 0 if they differ by rank; for ALL_TO_ALL 0; for SEND those
    that are sent. A coalesced call has `tensors` above 1, and counts the elements of all of them.
    """

    kind: CallKind
    dtype: str = ""
    """The type of the elements, as `float32`; empty for a barrier."""
    count: int = 0
    reduction: str = ""
    """How inputs are reduced, as `sum`; empty if they are not."""
    root: int | None = None
    """The root's rank in the group."""
    tag: int = 0
    """The tag of SEND."""
    tensors: int = 1

    def __post_init__(self) -> None:
        """Refuses what no rank can mean."""
        if not (0 <= self.count < _U64 and 0 <= self.tag < _U32 and 0 < self.tensors < _U32):
            raise ValueError(f"a call's numbers do not fit the wire: {self}")
        if self.kind.has_root != (self.root is not None):
            raise ValueError(
                f"{self.kind.label} {'needs a' if self.root is None else 'has no'} root"
            )
        if self.root is not None and not 0 <= self.root < MAX_WORLD_SIZE:
            raise ValueError(f"not a rank: root {self.root}")
        if self.kind.reduces != bool(self.reduction):
            raise ValueError(f"{self.kind.label} with the reduction {self.reduction!r}")

    def __str__(self) -> str:
        """The call as people read it: `all_reduce(sum) of 100 float32`."""
        how = f"({self.reduction})" if self.reduction else ""
        what = (
            ""
            if not self.dtype
            else f" of {self.count} {self.dtype}"
            if self.count
            else f" of {self.dtype}"
        )
        several = f" in {self.tensors} tensors" if self.tensors > 1 else ""
        root = "" if self.root is None else f", root {self.root}"
        tag = f", tag {self.tag}" if self.tag else ""
        return f"{self.kind.label}{how}{what}{several}{root}{tag}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCall:
    """A call that a rank has begun and that has not ended."""

    group_name: str
    """For people."""
    group: int
    """The group's number; see `group_number`."""
    sequence: int
    """The call's number in its group; of a SEND, among those of its sender to its receiver."""
    call: Call
    open_s: float
    """For how long it has been open, in seconds."""
    missing: tuple[int, ...] = ()
    """Ranks of the session of which something is missing."""

    def __str__(self) -> str:
        """The call with its place: `call 17 of group default: all_reduce(sum) of 100 float32`."""
        return f"call {self.sequence} of group {self.group_name}: {self.call}"


def group_number(name: str, ranks: Sequence[int]) -> int:
    """The number of a group: 64 bits of the SHA-256 of its name and its ranks, in order."""
    return _number(b"andon.group.v1\0", name, ranks)


def sends_number(name: str, ranks: Sequence[int]) -> int:
    """The number that frames of a group's SENDs have, which are counted for themselves."""
    return _number(b"andon.sends.v1\0", name, ranks)


def _number(purpose: bytes, name: str, ranks: Sequence[int]) -> int:
    text = purpose + name.encode() + b"\0" + struct.pack(f"<{len(ranks)}I", *ranks)
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


def cut(elements: int, segments: int) -> list[tuple[int, int]]:
    """Divides elements into segments: the first element of each, and the one after its last.

    All but the last that are not empty have the same length, a multiple of SEGMENT_MULTIPLE;
    later ones may be empty.
    """
    if elements < 0 or segments < 1:
        raise ValueError(f"{elements} elements can't be cut into {segments} segments")
    length = -(-elements // segments)
    length += -length % SEGMENT_MULTIPLE
    return [(min(elements, i * length), min(elements, (i + 1) * length)) for i in range(segments)]
