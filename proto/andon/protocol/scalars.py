"""Scalars that scripts log beside a step: their names, and how many of them a run may have."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from andon.protocol.limits import (
    COUNT_LIMIT,
    MAX_SCALAR_NAME_BYTES,
    MAX_SCALAR_NAMES,
    require_at_most,
)

__all__ = ["Scalar", "ScalarNames", "require_scalar_name"]

_NAME = re.compile(r"[A-Za-z0-9_./-]+", re.ASCII)


def require_scalar_name(name: str) -> None:
    """Refuses what can't be the name of a scalar.

    Names go into labels, files and web pages, so they have only characters that mean nothing there.

    Raises:
        ValueError: it is empty, or has other characters than letters, digits and `_./-`.
        LimitExceeded: it is too long.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(
            "the name of a scalar consists of letters, digits, and the characters _ . / - "
            f"(not {name[:MAX_SCALAR_NAME_BYTES]!r})"
        )
    require_at_most(len(name), MAX_SCALAR_NAME_BYTES, "characters in the name of a scalar")


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number that a script logged when so many steps were committed.

    NaN and infinities are allowed: it is a measurement, and no gradient.
    """

    name: str
    step: int
    value: float

    def __post_init__(self) -> None:
        """Refuses an impossible name or step."""
        require_scalar_name(self.name)
        if not 0 <= self.step < COUNT_LIMIT:
            raise ValueError(f"the step of a scalar is from 0 to {COUNT_LIMIT - 1}")


class ScalarNames:
    """The names that are in use, of which there are at most MAX_SCALAR_NAMES."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        """Begins with the names that are known already."""
        self._taken = set(known)
        self._refused: set[str] = set()

    def take(self, name: str) -> bool:
        """Whether a scalar of this name is taken: the name is in use, or there is room for it."""
        if name in self._taken:
            return True
        if len(self._taken) >= MAX_SCALAR_NAMES:
            return False
        self._taken.add(name)
        return True

    def refuse(self, name: str) -> bool:
        """Notes a name that was not taken; whether that is worth a warning.

        It is for the first time of each name, and for a bounded number of names.
        """
        if name in self._refused or len(self._refused) >= MAX_SCALAR_NAMES:
            return False
        self._refused.add(name)
        return True
