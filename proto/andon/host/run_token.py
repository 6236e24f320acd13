"""Run tokens: what workers, people and tools show to be admitted, from a file or a setting.

A token is never printed. An error names its file, and at most its length.
"""

from __future__ import annotations

import hmac
import logging
from pathlib import Path

from andon.host.tls import readable_by_others

__all__ = [
    "AUTHORIZATION",
    "BEARER_PREFIX",
    "MIN_TOKEN_BYTES",
    "TokenError",
    "bearer_metadata",
    "is_same_token",
    "read_token",
]

MIN_TOKEN_BYTES = 16
"""A shorter one could be guessed."""

AUTHORIZATION = "authorization"
"""The name of the metadata that carries a token."""
BEARER_PREFIX = "Bearer "

log = logging.getLogger(__name__)


class TokenError(ValueError):
    """A token can't be read, or is too easy to guess: which one, and the remedy."""


def read_token(path: Path | None, text: str = "", *, file_setting: str, text_setting: str) -> bytes:
    """The token in a file, or else the text, without surrounding white space; empty if neither.

    Args:
        path: the file; None if there is none.
        text: used if there is no file.
        file_setting: the flag or variable that names the file, for errors.
        text_setting: the one that holds the text, likewise.

    Raises:
        TokenError: the file can't be read, or the token is too short or not of printable ASCII.
    """
    if path is None:
        if not text:
            return b""
        source, token = text_setting, text.strip().encode()
    else:
        source = f"{file_setting} {path}"
        try:
            token = path.read_bytes().strip()
            if readable_by_others(path):
                log.warning("every user of this host may read %s: chmod 600 it", path)
        except OSError as error:
            raise TokenError(
                f"{source} can't be read ({error.strerror}): make it with "
                f"`(umask 077; openssl rand -hex 32 > {path})`, or ask the line's operator for it"
            ) from None
    if len(token) < MIN_TOKEN_BYTES:
        raise TokenError(
            f"{source} holds {len(token)} bytes, and must hold {MIN_TOKEN_BYTES} or more: make one "
            "with `openssl rand -hex 32`"
        )
    if not all(0x21 <= byte <= 0x7E for byte in token):
        raise TokenError(
            f"{source} holds bytes that metadata can't carry: make one of letters and digits, "
            "with `openssl rand -hex 32`"
        )
    return token


def bearer_metadata(token: bytes) -> tuple[tuple[str, str], ...]:
    """The metadata that shows a token in a call; none for an empty token."""
    return ((AUTHORIZATION, BEARER_PREFIX + token.decode("ascii")),) if token else ()


def is_same_token(shown: bytes, wanted: bytes) -> bool:
    """Whether a token is the expected one, which is not empty; compared in constant time."""
    return bool(wanted) and hmac.compare_digest(shown, wanted)
