"""Frames that ranks of a session send each other on lanes; see docs/protocol-sessions.md."""

from __future__ import annotations

from dataclasses import dataclass

from andon.protocol.peer_calls import MAX_PIECE_BYTES, Call

__all__ = ["Begin", "LaneEnd", "PeerFrame", "Piece"]

_U32 = 2**32
_U64 = 2**64


@dataclass(frozen=True, slots=True)
class Begin:
    """The sender has begun a call, and has room for what the receiver gives to it."""

    group: int
    """The group's number, or that of its SENDs."""
    sequence: int
    """The call's number in the group; of a SEND, among those of its sender to its receiver."""
    call: Call
    rank: int
    """The sender's rank in the group."""
    gives_bytes: int
    """Bytes that the sender of this frame will give to the receiver."""
    receives: bool = False
    """For SEND: whether the sender of this frame receives."""

    def __post_init__(self) -> None:
        """Refuses what the wire can't hold."""
        if not (0 <= self.group < _U64 and 0 <= self.sequence < _U64):
            raise ValueError(f"group {self.group} or sequence {self.sequence} is not of 64 bits")
        if not (0 <= self.rank < _U32 and 0 <= self.gives_bytes < _U64):
            raise ValueError(f"a Begin's numbers do not fit the wire: {self}")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of what one rank gives to another in one stage of a call; the bytes follow."""

    group: int
    sequence: int
    stage: int
    offset: int
    """The first byte of what is given in this stage."""
    length: int

    def __post_init__(self) -> None:
        """Refuses what the wire can't hold, and what no rank may give."""
        if not (0 <= self.group < _U64 and 0 <= self.sequence < _U64):
            raise ValueError(f"group {self.group} or sequence {self.sequence} is not of 64 bits")
        if not (0 <= self.stage < _U32 and 0 <= self.offset < _U64):
            raise ValueError(f"a Piece's numbers do not fit the wire: {self}")
        if not 0 < self.length <= MAX_PIECE_BYTES:
            raise ValueError(f"a Piece of {self.length} bytes: it has 1 to {MAX_PIECE_BYTES}")


@dataclass(frozen=True, slots=True)
class LaneEnd:
    """The sender has begun no later call, and ends this lane."""


PeerFrame = Begin | Piece | LaneEnd
