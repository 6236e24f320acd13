"""Tokens and proofs that are derived from the run's secret, which itself is never sent.

A worker shows a session token to the reducers, and a link token to its neighbour in a ring. A rank
of a session opens a lane to another one with a peer token. A reducer proves to the coordinator that
it has the secret, by its answer to a challenge.
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
    "peer_nonce",
    "peer_token",
    "reducer_proof",
    "session_serial",
    "session_token",
]

CHALLENGE_BYTES = 32
"""Length of a coordinator's challenge, which is random, and new for each registration."""

MIN_SECRET_BYTES = 16
"""A shorter secret could be guessed."""


_SERIAL = struct.Struct("<QQ")


def session_token(
    secret: bytes, run_id: str, worker: int, serial: tuple[int, int] = (0, 0)
) -> bytes:
    """The session token of a worker: its serial, then an HMAC-SHA256; 48 bytes.

    Only the coordinator and the reducers of the run have `secret`. The serial, a term and a number
    within it, grows with each join, so that a reducer knows a newer session from an older one.
    """
    if not secret:
        raise ValueError("the secret of session tokens is empty")
    numbers = _SERIAL.pack(*serial)
    # The text begins with its purpose, so that no HMAC made for one purpose serves another.
    text = b"andon.session.v2\0" + worker.to_bytes(4, "little") + numbers + run_id.encode()
    return numbers + hmac.digest(secret, text, hashlib.sha256)


def session_serial(secret: bytes, run_id: str, worker: int, token: bytes) -> tuple[int, int] | None:
    """The serial of a session token, or None if the token is not that worker's.

    Of two tokens of one worker, the one with the lower serial belongs to a join that is over.
    """
    if not 0 <= worker < 2**32 or len(token) <= _SERIAL.size:
        return None
    # Read before it is verified: the HMAC of the token covers it.
    serial: tuple[int, int] = _SERIAL.unpack_from(token)
    return (
        serial
        if hmac.compare_digest(session_token(secret, run_id, worker, serial), token)
        else None
    )


def reducer_proof(secret: bytes, challenge: bytes, address: str) -> bytes:
    """A reducer's answer to `challenge`, bound to the address that it offers; 32 bytes."""
    if not secret:
        raise ValueError("the secret of reducers is empty")
    text = b"andon.reducer.v1\0" + len(challenge).to_bytes(4, "little") + challenge
    return hmac.digest(secret, text + address.encode(), hashlib.sha256)


def is_reducer_proof(secret: bytes, challenge: bytes, address: str, proof: bytes) -> bool:
    """Whether `proof` is the reducer's answer to `challenge`; compared in constant time."""
    return hmac.compare_digest(reducer_proof(secret, challenge, address), proof)


def link_token(secret: bytes, run_id: str, key: Key, sender: int, receiver: int) -> bytes:
    """The token that worker `sender` shows to worker `receiver` in one round of a ring; 32 bytes.

    Only these two get it: only a rank's predecessor may send to it.
    """
    if not secret:
        raise ValueError("the secret of link tokens is empty")
    numbers = struct.pack("<QQII", key.term, key.round, sender, receiver)
    return hmac.digest(secret, b"andon.ring.v1\0" + numbers + run_id.encode(), hashlib.sha256)


def peer_token(secret: bytes, run_id: str, key: Key, sender: int, receiver: int) -> bytes:
    """The token of the lane from rank `sender` of a session to rank `receiver`; 32 bytes.

    Only these two get it. It is the session key of the preamble's proof.
    """
    if not secret:
        raise ValueError("the secret of peer tokens is empty")
    numbers = struct.pack("<QQII", key.term, key.round, sender, receiver)
    return hmac.digest(secret, b"andon.peer.v1\0" + numbers + run_id.encode(), hashlib.sha256)


def peer_nonce(token: bytes) -> bytes:
    """The nonce of the lane that a peer token opens; 32 bytes. It names the token and hides it."""
    return hashlib.sha256(b"andon.peer.nonce.v1\0" + token).digest()
