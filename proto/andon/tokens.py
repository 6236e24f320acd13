"""Tokens: what lets a worker that joined open streams to the reducers, and to its neighbour."""

from __future__ import annotations

import hashlib
import hmac
import struct

from andon.records import Key

__all__ = ["issue", "link", "verify"]


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


def link(secret: bytes, run_id: str, key: Key, sender: int, receiver: int) -> bytes:
    """What worker `sender` shows to worker `receiver` in one round of a ring; 32 bytes.

    Nobody but these two is told, so that a rank is written to by the one before it alone.
    """
    if not secret:
        raise ValueError("the secret of link tokens is empty")
    numbers = struct.pack("<QQII", key.term, key.round, sender, receiver)
    return hmac.digest(secret, b"andon.ring.v1\0" + numbers + run_id.encode(), hashlib.sha256)
