"""Session tokens: what lets a worker that joined open streams to the reducers."""

from __future__ import annotations

import hashlib
import hmac

__all__ = ["issue", "verify"]


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
