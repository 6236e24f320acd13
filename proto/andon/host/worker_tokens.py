"""Worker tokens: tokens of single workers, derived from the run's token, which can be withdrawn.

Everybody who has the run's token can make one, so a worker that is to have a token of its own must
not have the run's. The service needs no list of them: the MAC in a token shows that it was made
with the run's token. A file lists the names of those that are withdrawn.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Withdrawn", "WithdrawnUnreadable", "WorkerToken", "make_worker_token"]

_PREFIX = "andon-worker"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,15}")


@dataclass(frozen=True, slots=True)
class WorkerToken:
    """What a worker token says, once its MAC was verified."""

    name: str
    """Who it was made for."""
    expires_s: int
    """Seconds since the Unix epoch; 0: never."""

    @classmethod
    def read(cls, run_token: bytes, shown: bytes) -> WorkerToken | None:
        """Reads a token; None if it was not made with this run's token."""
        try:
            prefix, name, expires, _ = shown.decode("ascii").split(".")
        except ValueError:
            return None
        if prefix != _PREFIX or not _NUMBER.fullmatch(expires) or not _NAME.fullmatch(name):
            return None
        right = make_worker_token(run_token, name, int(expires))
        return cls(name, int(expires)) if hmac.compare_digest(right, shown) else None


def make_worker_token(run_token: bytes, name: str, expires_s: int = 0) -> bytes:
    """The token of worker `name`, good until `expires_s` after the Unix epoch; 0: for ever.

    Raises:
        ValueError: the name is not one of letters, digits, `-` and `_`.
    """
    if not run_token:
        raise ValueError("a worker token is made from the run's token, and there is none")
    if not _NAME.fullmatch(name):
        raise ValueError(f"a name is up to 64 letters, digits, '-' and '_', not {name!r}")
    said = f"{name}.{expires_s}"
    # The text begins with its purpose, so that no HMAC made for one purpose serves another.
    text = b"andon.worker-token.v1\0" + said.encode()
    mac = hmac.digest(run_token, text, hashlib.sha256).hex()
    return f"{_PREFIX}.{said}.{mac}".encode()


class WithdrawnUnreadable(ValueError):
    """The file of withdrawn names can't be read: which one, and why."""


class Withdrawn:
    """The names whose tokens are withdrawn: a file with one a line, which may grow at any time."""

    def __init__(self, path: Path) -> None:
        """Reads `path` whenever it is asked."""
        self._path = path

    def has(self, name: str) -> bool:
        """Whether this name's token is withdrawn.

        Raises:
            WithdrawnUnreadable: nobody can say.
        """
        return name in self.names()

    def names(self) -> set[str]:
        """All names whose tokens are withdrawn now.

        Raises:
            WithdrawnUnreadable: the file can't be read, or a line is no name: a slip of the pen
                must not leave a token in force.
        """
        try:
            text = self._path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", "") or "it is not text"
            raise WithdrawnUnreadable(f"{self._path} can't be read ({why})") from None
        names = [line.partition("#")[0].strip() for line in text.splitlines()]
        for number, name in enumerate(names, start=1):
            if name and not _NAME.fullmatch(name):
                raise WithdrawnUnreadable(
                    f"line {number} of {self._path} is no name of a token: one name a line"
                )
        return set(names) - {""}
