"""The run's secret: what the coordinator and the reducers of a run share, and nobody else."""

from __future__ import annotations

import secrets
from pathlib import Path

from andon.protocol.tokens import MIN_SECRET_BYTES
from andon_server.errors import UsageError

__all__ = ["read_secret"]


def read_secret(path: Path | None) -> bytes:
    """The secret in a file, without white space around it; without a file, a new one for this run.

    Raises:
        UsageError: the file can't be read, or what it holds could be guessed.
    """
    if path is None:
        return secrets.token_bytes(32)
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise UsageError(
            f"--secret-file {path} can't be read ({error.strerror}): make one with "
            f"`(umask 077; openssl rand -hex 32 > {path})`, and give the same file to every reducer"
        ) from error
    if len(secret) < MIN_SECRET_BYTES:
        raise UsageError(
            f"--secret-file {path} holds {len(secret)} bytes, and {MIN_SECRET_BYTES} are the "
            f"least: make one with `(umask 077; openssl rand -hex 32 > {path})`"
        )
    return secret
