"""What proves that a connection belongs to a call of gRPC: the preamble, and the listener's answer.

The offer's nonce went over the call, and only the two ends of the call have the key. Preamble and
answer are HMACs of different texts, so that the one can't be made from the other.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
from dataclasses import dataclass, field

from andon.protocol.limits import MAX_CONNECTIONS

__all__ = [
    "ANSWER_BYTES",
    "CAPABILITY",
    "NONCE_BYTES",
    "PREAMBLE_BYTES",
    "SHOWN_BYTES",
    "WIDE_CAPABILITY",
    "Claim",
    "LaneDirection",
    "LaneSession",
    "NotAPreamble",
    "answer_of",
    "is_answer",
    "is_claim",
    "preamble",
    "read_preamble",
]

CAPABILITY = "tcp.v1"
WIDE_CAPABILITY = "tcp-wide.v1"
"""Both ends can send a lane's frames in segments, over several connections."""

NONCE_BYTES = 32
"""Length of an offer's nonce, which is random."""
SHOWN_BYTES = 16
"""How much of the nonce a preamble shows: enough to find the offer, too little to forge a proof."""

_MAGIC = b"ANDONTCP"
_PREAMBLE = struct.Struct(f"<8s{SHOWN_BYTES}sBB6x32s")
PREAMBLE_BYTES = _PREAMBLE.size
"""What a client sends first."""
ANSWER_BYTES = 32
"""What the listener answers. Frames follow."""

_CLIENT, _SERVER = b"andon tcp.v1 client\0", b"andon tcp.v1 server\0"
_FURTHER_CLIENT, _FURTHER_SERVER = b"andon tcp-wide.v1 client\0", b"andon tcp-wide.v1 server\0"
"""Of connections beyond the first: their text has one byte more, the index."""


class LaneDirection(enum.Enum):
    """Which way a connection carries frames; values are those of the preamble's byte."""

    CLIENT_SENDS = 1
    CLIENT_RECEIVES = 2


class NotAPreamble(ValueError):
    """Bytes that are not a preamble of this version."""


@dataclass(frozen=True, slots=True)
class LaneSession:
    """Whose connection it is: what both ends of the call know, and nobody else."""

    key: bytes = field(repr=False)
    """A star's session token. Empty for a ring, whose rounds have tokens: then it is the nonce."""
    run_id: str = ""
    worker: int = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """What a preamble says."""

    shown: bytes
    """The first bytes of the offer's nonce."""
    direction: LaneDirection
    index: int
    """Which of the direction's connections it is, from 0."""
    proof: bytes


def preamble(session: LaneSession, nonce: bytes, direction: LaneDirection, index: int = 0) -> bytes:
    """What a client sends first, to open a connection of one direction of an offer."""
    proof = _mac(_FURTHER_CLIENT if index else _CLIENT, session, nonce, direction, index)
    return _PREAMBLE.pack(_MAGIC, nonce[:SHOWN_BYTES], direction.value, index, proof)


def read_preamble(data: bytes) -> Claim:
    """Reads PREAMBLE_BYTES; what they claim is not proven yet.

    Raises:
        NotAPreamble: they are something else.
    """
    magic, shown, direction, index, proof = _PREAMBLE.unpack(data)
    if magic != _MAGIC:
        raise NotAPreamble("the connection does not begin with the preamble of a TCP lane")
    if any(data[8 + SHOWN_BYTES + 2 : -32]):
        raise NotAPreamble("the six bytes behind the index are not zero")
    if index >= MAX_CONNECTIONS:
        raise NotAPreamble(f"{index} is no index: a lane has {MAX_CONNECTIONS} connections at most")
    try:
        return Claim(shown, LaneDirection(direction), index, proof)
    except ValueError:
        raise NotAPreamble(f"{direction} is no direction") from None


def is_claim(session: LaneSession, nonce: bytes, claim: Claim) -> bool:
    """Whether a claim was made with the session's key; compared in constant time."""
    purpose = _FURTHER_CLIENT if claim.index else _CLIENT
    expected = _mac(purpose, session, nonce, claim.direction, claim.index)
    return hmac.compare_digest(expected, claim.proof)


def answer_of(
    session: LaneSession, nonce: bytes, direction: LaneDirection, index: int = 0
) -> bytes:
    """The listener's answer: it shows the client that it reached the call's other end."""
    return _mac(_FURTHER_SERVER if index else _SERVER, session, nonce, direction, index)


def is_answer(
    session: LaneSession, nonce: bytes, direction: LaneDirection, answer: bytes, index: int = 0
) -> bool:
    """Whether the listener has the session's key; compared in constant time."""
    return hmac.compare_digest(answer_of(session, nonce, direction, index), answer)


def _mac(
    purpose: bytes, session: LaneSession, nonce: bytes, direction: LaneDirection, index: int
) -> bytes:
    run = session.run_id.encode()
    # The first connection of a direction has the text that it had when there was no other.
    which = bytes((direction.value, index) if index else (direction.value,))
    # The run's length goes before it, so that no two sessions have the same text.
    text = b"".join(
        (
            *(purpose, which, nonce),
            *(struct.pack("<I", len(run)), run, struct.pack("<I", session.worker)),
        )
    )
    return hmac.digest(session.key or nonce, text, hashlib.sha256)
