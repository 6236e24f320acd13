"""Tokens made of the run's secret: a worker's for the reducers and for its neighbour in a ring, a
reducer's for the coordinator.

The secret itself is never sent: a reducer proves that it has it by an answer to a challenge.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

from andon.protocol.records import Key

__all__ = [
    "CHALLENGE_BYTES",
    "MIN_SECRET_BYTES",
    "is_reducer_proof",
    "link_token",
    "reducer_proof",
    "session_serial",
    "session_token",
]

CHALLENGE_BYTES = 32
"""Length of a coordinator's challenge: random, and new for each reducer that comes."""

MIN_SECRET_BYTES = 16
"""A shorter secret could be guessed."""


_SERIAL = struct.Struct("<QQ")


def session_token(
    secret: bytes, run_id: str, worker: int, serial: tuple[int, int] = (0, 0)
) -> bytes:
    """The token of worker `worker` of run `run_id`: its serial, then HMAC-SHA256; 48 bytes.

    `secret` is shared by the coordinator and the reducers of the run, and by nobody else. The
    serial, a term and a number of it, grows with each join: see `session_serial`.
    """
    if not secret:
        raise ValueError("the secret of session tokens is empty")
    numbers = _SERIAL.pack(*serial)
    text = b"andon.session.v2\0" + worker.to_bytes(4, "little") + numbers + run_id.encode()
    return numbers + hmac.digest(secret, text, hashlib.sha256)


def session_serial(secret: bytes, run_id: str, worker: int, token: bytes) -> tuple[int, int] | None:
    """The serial of a token that is that worker's, else None.

    Of two tokens of one worker, that with the lower serial is of a join that is over.
    """
    if not 0 <= worker < 2**32 or len(token) <= _SERIAL.size:
        return None
    serial: tuple[int, int] = _SERIAL.unpack_from(token)
    return (
        serial
        if hmac.compare_digest(session_token(secret, run_id, worker, serial), token)
        else None
    )


def reducer_proof(secret: bytes, challenge: bytes, address: str) -> bytes:
    """A reducer's answer to `challenge`, for the address that it offers: HMAC-SHA256, 32 bytes."""
    if not secret:
        raise ValueError("the secret of reducers is empty")
    text = b"andon.reducer.v1\0" + len(challenge).to_bytes(4, "little") + challenge
    return hmac.digest(secret, text + address.encode(), hashlib.sha256)


def is_reducer_proof(secret: bytes, challenge: bytes, address: str, proof: bytes) -> bool:
    """Whether `proof` is that answer, in a time that tells nothing about it."""
    return hmac.compare_digest(reducer_proof(secret, challenge, address), proof)


def link_token(secret: bytes, run_id: str, key: Key, sender: int, receiver: int) -> bytes:
    """What worker `sender` shows to worker `receiver` in one round of a ring; 32 bytes.

    Nobody but these two is told, so that a rank is written to by the one before it alone.
    """
    if not secret:
        raise ValueError("the secret of link tokens is empty")
    numbers = struct.pack("<QQII", key.term, key.round, sender, receiver)
    return hmac.digest(secret, b"andon.ring.v1\0" + numbers + run_id.encode(), hashlib.sha256)
