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

__all__ = [
    "ANSWER_BYTES",
    "CAPABILITY",
    "NONCE_BYTES",
    "PREAMBLE_BYTES",
    "SHOWN_BYTES",
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

NONCE_BYTES = 32
"""Length of an offer's nonce, which is random."""
SHOWN_BYTES = 16
"""How much of the nonce a preamble shows: enough to find the offer, too little to forge a proof."""

_MAGIC = b"ANDONTCP"
_PREAMBLE = struct.Struct(f"<8s{SHOWN_BYTES}sB7x32s")
PREAMBLE_BYTES = _PREAMBLE.size
"""What a client sends first."""
ANSWER_BYTES = 32
"""What the listener answers. Frames follow."""

_CLIENT, _SERVER = b"andon tcp.v1 client\0", b"andon tcp.v1 server\0"


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
    proof: bytes


def preamble(session: LaneSession, nonce: bytes, direction: LaneDirection) -> bytes:
    """What a client sends first, to open one direction of an offer."""
    proof = _mac(_CLIENT, session, nonce, direction)
    return _PREAMBLE.pack(_MAGIC, nonce[:SHOWN_BYTES], direction.value, proof)


def read_preamble(data: bytes) -> Claim:
    """Reads PREAMBLE_BYTES; what they claim is not proven yet.

    Raises:
        NotAPreamble: they are something else.
    """
    magic, shown, direction, proof = _PREAMBLE.unpack(data)
    if magic != _MAGIC:
        raise NotAPreamble("the connection does not begin with the preamble of a TCP lane")
    if any(data[8 + SHOWN_BYTES + 1 : -32]):
        raise NotAPreamble("the seven bytes behind the direction are not zero")
    try:
        return Claim(shown, LaneDirection(direction), proof)
    except ValueError:
        raise NotAPreamble(f"{direction} is no direction") from None


def is_claim(session: LaneSession, nonce: bytes, claim: Claim) -> bool:
    """Whether a claim was made with the session's key; compared in constant time."""
    expected = _mac(_CLIENT, session, nonce, claim.direction)
    return hmac.compare_digest(expected, claim.proof)


def answer_of(session: LaneSession, nonce: bytes, direction: LaneDirection) -> bytes:
    """The listener's answer: it shows the client that it reached the call's other end."""
    return _mac(_SERVER, session, nonce, direction)


def is_answer(session: LaneSession, nonce: bytes, direction: LaneDirection, answer: bytes) -> bool:
    """Whether the listener has the session's key; compared in constant time."""
    return hmac.compare_digest(answer_of(session, nonce, direction), answer)


def _mac(purpose: bytes, session: LaneSession, nonce: bytes, direction: LaneDirection) -> bytes:
    run = session.run_id.encode()
    # The run's length goes before it, so that no two sessions have the same text.
    text = b"".join(
        (
            *(purpose, bytes((direction.value,)), nonce),
            *(struct.pack("<I", len(run)), run, struct.pack("<I", session.worker)),
        )
    )
    return hmac.digest(session.key or nonce, text, hashlib.sha256)
