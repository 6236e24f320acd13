"""The run's tokens: what workers, people and tools show to be let in, from a file or as a text.

A token is never printed: what is wrong with one is told by its file's name and its length.
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
    """A token can't be read, or could be guessed: which, and what to do."""


def read_token(path: Path | None, text: str = "", *, file_setting: str, text_setting: str) -> bytes:
    """The token in a file, without white space around it, else the given text; empty: none.

    Args:
        path: the file; None: there is none.
        text: counts if there is no file.
        file_setting: what names the file, for errors: a flag or a variable.
        text_setting: what holds the text, likewise.

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
                f"`(umask 077; openssl rand -hex 32 > {path})`, or ask whoever runs the line for it"
            ) from None
    if len(token) < MIN_TOKEN_BYTES:
        raise TokenError(
            f"{source} holds {len(token)} bytes, and {MIN_TOKEN_BYTES} are the least: make one "
            "with `openssl rand -hex 32`"
        )
    if not all(0x21 <= byte <= 0x7E for byte in token):
        raise TokenError(
            f"{source} holds bytes that can't be sent in metadata: make one of letters and digits, "
            "with `openssl rand -hex 32`"
        )
    return token


def bearer_metadata(token: bytes) -> tuple[tuple[str, str], ...]:
    """The metadata of a call that shows a token; none for an empty one."""
    return ((AUTHORIZATION, BEARER_PREFIX + token.decode("ascii")),) if token else ()


def is_same_token(shown: bytes, wanted: bytes) -> bool:
    """Whether a token is the wanted one, in a time that tells nothing about it."""
    return bool(wanted) and hmac.compare_digest(shown, wanted)
