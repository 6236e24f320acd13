"""Tokens made of the run's secret: a worker's for the reducers and for its neighbour in a ring, a
reducer's for the coordinator.

The secret itself is never sent: a reducer proves that it has it by an answer to a challenge.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

from andon.records import Key

__all__ = ["CHALLENGE_BYTES", "LEAST_SECRET_BYTES", "issue", "link", "prove", "proves", "verify"]

CHALLENGE_BYTES = 32
"""Length of a coordinator's challenge: random, and new for each reducer that comes."""

LEAST_SECRET_BYTES = 16
"""A shorter secret could be guessed."""


def issue(secret: bytes, run_id: str, worker: int) -> bytes:
    """The token of worker `worker` of run `run_id`: HMAC-SHA256, 32 bytes.

    `secret` is shared by the coordinator and the reducers of the run, and by nobody else.
    """
    if not secret:
        raise ValueError("the secret of session tokens is empty")
    text = b"andon.session.v1\0" + worker.to_bytes(4, "little") + run_id.encode()
    return hmac.digest(secret, text, hashlib.sha256)


def verify(secret: bytes, run_id: str, worker: int, token: bytes) -> bool:
    """Whether `token` is that worker's, in a time that tells nothing about it."""
    if not 0 <= worker < 2**32:
        return False
    return hmac.compare_digest(issue(secret, run_id, worker), token)


def prove(secret: bytes, challenge: bytes, address: str) -> bytes:
    """A reducer's answer to `challenge`, for the address that it offers: HMAC-SHA256, 32 bytes."""
    if not secret:
        raise ValueError("the secret of reducers is empty")
    text = b"andon.reducer.v1\0" + len(challenge).to_bytes(4, "little") + challenge
    return hmac.digest(secret, text + address.encode(), hashlib.sha256)


def proves(secret: bytes, challenge: bytes, address: str, proof: bytes) -> bool:
    """Whether `proof` is that answer, in a time that tells nothing about it."""
    return hmac.compare_digest(prove(secret, challenge, address), proof)


def link(secret: bytes, run_id: str, key: Key, sender: int, receiver: int) -> bytes:
    """What worker `sender` shows to worker `receiver` in one round of a ring; 32 bytes.

    Nobody but these two is told, so that a rank is written to by the one before it alone.
    """
    if not secret:
        raise ValueError("the secret of link tokens is empty")
    numbers = struct.pack("<QQII", key.term, key.round, sender, receiver)
    return hmac.digest(secret, b"andon.ring.v1\0" + numbers + run_id.encode(), hashlib.sha256)
